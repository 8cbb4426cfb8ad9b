"""Whether sources can read again: by the logs that Spark's file source keeps, and by nothing for others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cutline.connectors.replay_guard import SOURCE_KINDS, ReplayGuard
from cutline.errors import NotDone, Refused
from cutline.model.plan import PlannedSource
from cutline.ports.inspection import FileProblem, SourceReport
from cutline.ports.source_guard import SourceKind, Today
from cutline.spark_dir.source_check import check_sources

GUARD = ReplayGuard()


def write_log(live: Path, name: str, *files: tuple[str, int]) -> None:
    path = live / "sources/0" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"path": uri, "timestamp": 1, "batchId": batch}) for uri, batch in files]
    path.write_text("\n".join(["v1", *lines]))


def gone(live: Path, position: bytes | None) -> list[str]:
    return [Path(problem.path).name for problem in check_sources(GUARD, {"0": position}, live).problems]


def test_a_compacted_log_repeats_old_files_which_are_not_needed(tmp_path: Path) -> None:
    files = [(f"file://{tmp_path}/{batch}.json", batch) for batch in range(4)]
    write_log(tmp_path, "2.compact", *files[:3])
    write_log(tmp_path, "3", files[3])
    assert gone(tmp_path, b'{"logOffset":1}') == ["2.json", "3.json"]
    assert gone(tmp_path, b'{"logOffset":3}') == []
    assert gone(tmp_path, None) == ["0.json", "1.json", "2.json", "3.json"], "it had read nothing: all is read again"


def test_names_are_written_as_addresses(tmp_path: Path) -> None:
    (tmp_path / "a b%.json").write_text("{}")
    write_log(tmp_path, "1", (f"file://{tmp_path}/a%20b%25.json", 1))
    assert gone(tmp_path, b'{"logOffset":0}') == []


@pytest.mark.parametrize("position", [b"17", b'{"channel":"a","position":3}', None])
def test_a_source_of_an_unknown_kind_is_not_guarded(tmp_path: Path, position: bytes | None) -> None:
    report = check_sources(GUARD, {"0": position}, tmp_path)
    assert report.problems == [] and "not guarded" in report.notes[0]


def test_files_elsewhere_and_lost_logs_are_not_guarded(tmp_path: Path) -> None:
    assert "not guarded" in check_sources(GUARD, {"0": b'{"logOffset":0}'}, tmp_path).notes[0]
    write_log(tmp_path, "1", ("s3a://bucket/a.json", 1))
    report = check_sources(GUARD, {"0": b'{"logOffset":0}'}, tmp_path)
    assert report.problems == [] and "another file system" in report.notes[0]
    (tmp_path / "sources/0/1").write_text("v1\nno json")
    assert "cannot be read" in check_sources(GUARD, {"0": b'{"logOffset":0}'}, tmp_path).notes[0]
    assert "not guarded" in check_sources(GUARD, {}, None).notes[0]


def test_another_kind_takes_one_entry_in_the_table(tmp_path: Path) -> None:
    expired = FileProblem("topic/0", "offset 17 has expired")
    kind = SourceKind("kafka", lambda position, _: b"topic" in (position or b""), lambda *_: SourceReport([expired]))
    guard = ReplayGuard([*SOURCE_KINDS, kind])
    assert check_sources(guard, {"0": b'{"topic":17}'}, tmp_path).problems == [expired]


# ---------------------------------------------------------------------- which server is asked

NATS_OFFSET = {"source": "cutline_nats", "stream": "S", "created": "c", "begin": 1, "sequence": 5, "messages": 4}
KAFKA_OFFSET = {"source": "cutline_kafka", "topic": "t", "topic_id": "", "begin": {"0": 1}, "offsets": {"0": 2}}
POSTGRES_OFFSET = {"source": "cutline_postgres", "table": "t", "key_column": "k", "table_id": 1, "begin": 0, "key": 2}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that something would connect to; nothing does."""
    found: list[str] = []

    def connect(address: str, *_: object, **__: object) -> None:
        found.append(address)
        raise NotDone("no answer")

    monkeypatch.setattr("cutline.connectors.nats.positions.Connection", connect)
    monkeypatch.setattr("cutline.connectors.kafka.positions.consumer", connect)
    monkeypatch.setattr("cutline.connectors.postgres.positions.connect", connect)
    return found


@pytest.mark.parametrize(
    ("offset", "field"), [(NATS_OFFSET, "url"), (KAFKA_OFFSET, "servers"), (POSTGRES_OFFSET, "url")]
)
def test_only_servers_that_the_code_names_are_asked(asked: list[str], offset: dict[str, Any], field: str) -> None:
    """The offsets may come from a savepoint that was handed over, and lead anywhere."""
    stored = json.dumps(offset | {field: "evil:1"}).encode()
    kind = GUARD.kind_of(stored, Path())
    assert kind is not None and kind.moved is not None
    moved = kind.moved

    def ask(*addresses: str, newest: bytes | None = stored) -> list[str]:
        planned = [PlannedSource(format=str(offset["source"]), address=address) for address in addresses]
        today = Today(newest, [*planned, PlannedSource(format="rate")])
        asked.clear()
        with pytest.raises(NotDone, match="no answer"):
            kind.check(stored, Path(), today)
        with pytest.raises(NotDone, match="no answer"):
            moved([stored, stored], today)
        return asked.copy()

    assert ask("good:1") == ["good:1", "good:1"]
    assert ask("good:1", newest=None) == ["good:1", "good:1"]
    assert ask("good:1", "evil:1 ") == ["evil:1", "evil:1"], "the code names it too"
    assert ask() == ["evil:1", "evil:1"], "without the flow's code, as for a person who verifies a savepoint"
    asked.clear()
    two = [PlannedSource(format=str(offset["source"]), address=address) for address in ("good:1", "good:2")]
    with pytest.raises(Refused, match="names the server evil:1"):
        kind.check(stored, Path(), Today(stored, two))
    assert asked == []
