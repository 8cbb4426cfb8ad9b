"""Savepoints, exports and buckets that someone has tampered with: refused with a clear error, nothing written outside.

The attacker knows the format: every checksum fits.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cutline.base import records
from cutline.errors import CutlineError, DamagedRecordError
from cutline.model.ids import FlowName
from cutline.model.layout import Layout
from cutline.runtime.stores import store_at
from cutline.savepoints.store import Savepoints
from tests.support.hostile_records import stored
from tests.support.remote import copied, lose_host, remote
from tests.support.running import assert_each_once, running
from tests.support.sparkless import NUMBERS

Body = dict[str, Any]


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """A savepoint with data in flight, exported; the flow that took it is at rest."""
    with running(tmp_path) as flow:
        flow.emit(3)
        for _ in range(2):
            flow.step(NUMBERS)
        flow.run.savepoint("good", drain=False)
        Savepoints(flow.layout, store_at).export("good", str(tmp_path / "export"))
    return tmp_path / "export"


def tree(folder: Path) -> dict[str, str]:
    """Everything below a folder, links as links."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def rewrite(path: Path, change: Callable[[Body], object]) -> None:
    """Change a record's body, with a checksum that fits."""
    envelope = msgspec.json.decode(path.read_bytes())
    change(envelope["body"])
    path.write_bytes(stored(envelope["kind"], msgspec.json.encode(envelope["body"])))


def manifest_in(folder: Path) -> Path:
    return next(folder.glob("checkpoints/*/manifest.json"))


def change_record(folder: Path, change: Callable[[Body], None]) -> None:
    """Change an operator's record; the manifest names the changed one."""
    path = next(folder.glob("checkpoints/*/totals.g*.json"))
    rewrite(path, change)

    def name_it(manifest: Body) -> None:
        manifest["operators"]["totals"]["record_sha256"] = records.checksum(path.read_bytes())

    rewrite(manifest_in(folder), name_it)


def with_file(**fields: Any) -> Callable[[Path], None]:
    def change(record: Body) -> None:
        record["shared"][0] |= fields

    return lambda folder: change_record(folder, change)


def with_content_at(path: str) -> Callable[[Path], None]:
    """The case that wrote any file: content in the record itself, at a path of the attacker's choice."""
    content = b"owned"

    def change(record: Body) -> None:
        record["shared"].append(
            msgspec.to_builtins(
                {
                    "path": path,
                    "sha256": hashlib.sha256(content).hexdigest(),
                    "size_bytes": len(content),
                    "content": content,
                }
            )
        )

    return lambda folder: change_record(folder, change)


def twice(folder: Path) -> None:
    change_record(folder, lambda record: record["shared"].append(record["shared"][0]))


def file_and_folder(folder: Path) -> None:
    change_record(folder, lambda record: record["shared"].append(record["shared"][0] | {"path": "offsets"}))


def in_manifest(change: Callable[[Body], object]) -> Callable[[Path], None]:
    return lambda folder: rewrite(manifest_in(folder), change)


def renamed_operator(name: str) -> Callable[[Path], None]:
    def change(manifest: Body) -> None:
        for part in ("operators", "channels"):
            manifest[part][name] = manifest[part].pop("totals")

    return in_manifest(change)


def in_entry(change: Callable[[Body], None]) -> Callable[[Path], None]:
    def tamper(folder: Path) -> None:
        found = [path for path in sorted(folder.glob("channels/numbers/g*/*.json")) if b'"data"' in path.read_bytes()]
        rewrite(found[0], change)

    return tamper


def with_segment(name: str) -> Callable[[Path], None]:
    return in_entry(lambda entry: entry["segments"].append(entry["segments"][0] | {"name": name}))


def with_plan(name: str) -> Callable[[Path], None]:
    return in_entry(lambda entry: entry.update(plan={name: msgspec.to_builtins(b"owned")}))


def in_card(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder / "savepoint.json", lambda card: card.update(fields))


def in_generation(change: Callable[[Body], None]) -> Callable[[Path], None]:
    return lambda folder: rewrite(sorted(folder.glob("generations/*.json"))[-1], change)


RECORDS = {
    "absolute path": with_content_at("/tmp/cutline-hostile"),
    "path above": with_content_at("../../../../hostile"),
    "path above in the middle": with_content_at("offsets/../../../../hostile"),
    "backslashes": with_content_at("..\\..\\hostile"),
    "NUL": with_content_at("a\0b"),
    "control characters": with_content_at("a\x1b[2Jb"),
    "direction marks": with_content_at("a\u202egnp.b"),
    "full-width dots": with_content_at("．．/hostile"),
    "a name that no file system takes": with_content_at("x" * 300),
    "no path": with_content_at(""),
    "a path that is no text": with_file(path=7),
    "a hash that is a path": with_file(sha256="../../hostile"),
    "a hash of another size": with_file(sha256="ab"),
    "negative size": with_file(size_bytes=-1),
    "huge size": with_file(size_bytes=2**63),
    "the same path twice": twice,
    "a file that is a folder too": file_and_folder,
    "operator named by a path": renamed_operator("../../hostile"),
    "operator named manifest.json": renamed_operator("x/../manifest"),
    "a million million entries": in_manifest(lambda it: it["channels"]["numbers"].update(barrier=2**40)),
    "both barriers at a million million": in_manifest(
        lambda it: (it["channels"]["numbers"].update(barrier=2**40), it["operators"]["numbers"].update(barrier=2**40))
    ),
    "no lineage": in_manifest(lambda it: it["channels"]["numbers"].update(lineage=[])),
    "a lineage that descends": in_manifest(lambda it: it["channels"]["numbers"].update(lineage=[[2, 0], [1, 0]])),
    "negative epoch": in_manifest(lambda it: it.update(epoch=-1)),
    "another epoch": in_manifest(lambda it: it.update(epoch=77)),
    "a year that no calendar has": in_manifest(lambda it: it.update(completed_ms=2**60)),
    "segment above": with_segment("../../hostile"),
    "absolute segment": with_segment("/tmp/cutline-hostile"),
    "plan above": with_plan("../../hostile"),
    "absolute plan": with_plan("/tmp/cutline-hostile"),
    "an entry at another's place": in_entry(lambda entry: entry.update(seq=99)),
    "a generation at another's place": in_generation(lambda it: it.update(generation=99)),
    "a schema that is no base64": in_generation(lambda it: it["schemas"].update(totals="?")),
    "the card's name": in_card(name="../../hostile"),
    "the card's epoch": in_card(epoch=77),
    "the card's flow": in_card(flow="../hostile"),
    "the card's size": in_card(size_bytes=-5),
    "the card's time": in_card(created_ms=2**60),
}


@pytest.mark.parametrize("case", RECORDS)
def test_tampered_records_are_refused_and_nothing_is_written(tmp_path: Path, export: Path, case: str) -> None:
    RECORDS[case](export)
    before = tree(tmp_path)
    savepoints = Savepoints(Layout(tmp_path / "storage", "counting"), store_at)
    with pytest.raises(CutlineError) as refused:
        savepoints.import_from(str(export), "imported")
    assert refused.value.next_step or isinstance(refused.value.__cause__, CutlineError)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 2_000
    assert tree(tmp_path) == before
    assert not Path("/tmp/cutline-hostile").exists()
    # Without an import: the folder of a savepoint may be copied, too.
    shutil.copytree(export, tmp_path / "storage" / "counting" / "savepoints" / "copied")
    before = tree(tmp_path)
    with pytest.raises(CutlineError):
        savepoints.clone("copied", Layout(tmp_path / "storage", "second"), FlowName("second"))
    assert savepoints.load("good").epoch
    assert tree(tmp_path) == before
    assert not Path("/tmp/cutline-hostile").exists()


def test_the_flow_lost_nothing_by_what_was_refused(tmp_path: Path, export: Path) -> None:
    with_content_at("../../../../hostile")(export)
    with pytest.raises(DamagedRecordError, match="not a relative path"):
        Savepoints(Layout(tmp_path / "storage", "counting"), store_at).import_from(str(export), "imported")
    shutil.copytree(export, tmp_path / "storage" / "counting" / "savepoints" / "copied")
    with pytest.raises(CutlineError), running(tmp_path, restore_to="copied"):
        pass
    assert not list(tmp_path.rglob("hostile*"))
    with running(tmp_path) as flow:
        flow.emit(2)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 7


# ------------------------------------------------------------------------------------------------- files


def blob_in(folder: Path) -> Path:
    return max((path for path in folder.glob("blobs/*/*")), key=lambda path: path.stat().st_size)


def linked(folder: Path) -> None:
    blob = blob_in(folder)
    outside = folder.parent / "secret"
    outside.write_bytes(blob.read_bytes())
    blob.unlink()
    blob.symlink_to(outside)


def linked_folder(folder: Path) -> None:
    blobs = blob_in(folder).parent
    shutil.move(blobs, folder.parent / "elsewhere")
    blobs.symlink_to(folder.parent / "elsewhere")


def hard_linked(folder: Path) -> None:
    os.link(blob_in(folder), folder.parent / "second-name")


def cut_short(folder: Path) -> None:
    blob_in(folder).write_bytes(blob_in(folder).read_bytes()[:-1])


def other_content(folder: Path) -> None:
    blob = blob_in(folder)
    blob.write_bytes(bytes(len(blob.read_bytes())))


def linked_card(folder: Path) -> None:
    shutil.move(folder / "savepoint.json", folder.parent / "card")
    (folder / "savepoint.json").symlink_to(folder.parent / "card")


def piped(folder: Path) -> None:
    blob = blob_in(folder)
    blob.unlink()
    os.mkfifo(blob)


def without_generations(folder: Path) -> None:
    for path in folder.glob("generations/*"):
        path.unlink()


def folder_as_manifest(folder: Path) -> None:
    path = manifest_in(folder)
    path.unlink()
    path.mkdir()


FILES: dict[str, Callable[[Path], object]] = {
    "a link in place of a blob": linked,
    "a link in place of a folder": linked_folder,
    "a link that nothing names": lambda folder: (folder / "more").symlink_to("/etc/hostname"),
    "a link as card": linked_card,
    "a hard link": hard_linked,
    "a pipe": lambda folder: os.mkfifo(folder / "blobs" / "pipe"),
    "a pipe in place of a blob": piped,
    "a file that nothing names": lambda folder: (blob_in(folder).parent / "more").write_bytes(b""),
    "a file cut short": cut_short,
    "other content": other_content,
    "a file missing": lambda folder: blob_in(folder).unlink(),
    "a record missing": lambda folder: next(folder.glob("checkpoints/*/totals.g*.json")).unlink(),
    "a generation missing": without_generations,
    "a folder as record": folder_as_manifest,
}


@pytest.mark.parametrize("case", FILES)
def test_odd_files_are_refused_and_nothing_stays(tmp_path: Path, export: Path, case: str) -> None:
    FILES[case](export)
    savepoints = Savepoints(Layout(tmp_path / "storage", "counting"), store_at)
    with pytest.raises(CutlineError) as refused:
        savepoints.import_from(str(export), "imported")
    assert str(refused.value)
    assert not (tmp_path / "storage" / "counting" / "savepoints" / "imported").exists()
    assert [one.name for one in savepoints.list()] == ["good"]


def test_a_savepoint_that_is_whole_is_imported_byte_by_byte(tmp_path: Path, export: Path) -> None:
    savepoints = Savepoints(Layout(tmp_path / "shelf", "counting"), store_at)
    savepoints.import_from(str(export), "moved")
    there, here = tree(export), tree(tmp_path / "shelf" / "counting" / "savepoints" / "moved")
    assert {name for name in there if there[name] != here[name]} == {"savepoint.json"}
    assert there.keys() == here.keys()


# ------------------------------------------------------------------------------------------------- buckets


def test_a_hostile_bucket_writes_nothing_outside(tmp_path: Path) -> None:
    with running(tmp_path, **remote(tmp_path)) as flow:
        flow.emit(3)
        flow.drain()
        flow.checkpoint()
        copied(flow, flow.checkpoints.epochs()[-1])
    lose_host(tmp_path)
    bucket = tmp_path / "remote" / "counting"
    for path in bucket.glob("checkpoints/*/manifest.json"):
        folder = path.parent
        record = next(folder.glob("totals.g*.json"))
        rewrite(record, lambda body: body["shared"][0].update(path="../../../../hostile"))

        def name_it(manifest: Body, record: Path = record) -> None:
            manifest["operators"]["totals"]["record_sha256"] = records.checksum(record.read_bytes())

        rewrite(path, name_it)
    with pytest.raises(CutlineError), running(tmp_path, **remote(tmp_path)):
        pass
    assert not list(tmp_path.rglob("hostile*"))
    assert len(list((tmp_path / "table").glob("*.json"))) >= 1, "what was published stays"


def test_foreign_objects_in_a_bucket_do_not_disturb(tmp_path: Path) -> None:
    with running(tmp_path, **remote(tmp_path)) as flow:
        flow.emit(3)
        flow.drain()
        flow.checkpoint()
        copied(flow, flow.checkpoints.epochs()[-1])
    lose_host(tmp_path)
    bucket = tmp_path / "remote" / "counting"
    for name in ("checkpoints/readme.txt", "checkpoints/latest/manifest.json", "generations/x.json", "claims/note.md"):
        (bucket / name).parent.mkdir(exist_ok=True)
        (bucket / name).write_bytes(b"not ours")
    (bucket / "checkpoints" / "link").symlink_to("/etc")
    with running(tmp_path, **remote(tmp_path)) as flow:
        assert flow.recovered.path == "remote"
        flow.emit(2)
        flow.drain()
        assert_each_once(flow.sink.rows())
