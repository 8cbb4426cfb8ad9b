"""Every file of a flow's storage, and why it is there: written without the collector, to be held against it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cutline.base import durable, records
from cutline.channels import entry_files as codec
from cutline.model.checkpoint import Manifest, OperatorRecord
from cutline.model.entries import DataEntry
from cutline.model.generation import GenerationRecord
from cutline.model.ids import Epoch, OperatorId, Position
from cutline.model.layout import Layout
from cutline.ports.objects import ObjectStore
from cutline.protocol.history.lineage import Lineage, lineage_of
from cutline.storage.metadata.inspector import inspect_coordinator

#: Of the flow as a whole; the write-ahead log of the database comes and goes.
_ALWAYS = {
    "flow.json",
    "lock",
    "status.json",
    "restore-limits.json",
    "restore.json",
    "channels/segments.json",
    "live-dirs.json",
    *(f"coordinator.sqlite{end}" for end in ("", "-wal", "-shm")),
}


#: In the remote tier: who has ever begun there, which is never forgotten.
_FENCE = ("generations/", "claims/")


def unexplained(layout: Layout) -> list[str]:
    """Files below the flow's folder that nothing needs; the flow does not run."""
    needed = dict(explained(layout))
    there = [path for path in layout.root.rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(layout.root)) for path in there if path not in needed)


def explained(layout: Layout) -> Iterator[tuple[Path, str]]:
    """(file, why it is there)."""
    yield from ((layout.root / name, "of the flow as a whole") for name in _ALWAYS)
    generations = sorted(path for path in layout.generations.iterdir() if not durable.is_temporary(path.name))
    yield from ((path, "a generation, which is never forgotten") for path in generations)
    newest = records.load("generation", generations[-1], GenerationRecord)
    for folder in (layout.gates, *(path for path in _in(layout.savepoints) if (path / "savepoint.json").exists())):
        yield from ((path, "a gate, or of a savepoint") for path in folder.rglob("*") if not _is_temporary(path))
    for operator, generation in newest.spark_dirs.items():
        live = layout.spark_checkpoint_dir(operator, generation)
        yield from ((path, "Spark's own, and live") for path in live.rglob("*"))
    manifests = []
    for path in layout.checkpoints.glob("[0-9]*/manifest.json"):
        if records.kind_of(path.read_bytes()) == "manifest":
            manifests.append(records.load("manifest", path, Manifest))
        yield path, "a complete checkpoint, or the stone on the grave of one"
    for manifest in manifests:
        yield from _parts_of(layout, manifest)
    for path in layout.checkpoints.glob("[0-9]*/*.g*.json"):
        # A flow that is stopped leaves open what it had begun.
        if int(path.parent.name) >= inspect_coordinator(layout.metadata).open_from and not _is_temporary(path):
            yield path, "of a checkpoint under way"
            yield from _content_of(layout, path, "of a checkpoint under way")
    for operator, spans in newest.lineage.items():
        yield from _log_of(layout, operator, lineage_of(spans), manifests)


def _in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_temporary(path: Path) -> bool:
    return durable.is_temporary(path.name)


def _parts_of(layout: Layout, manifest: Manifest) -> Iterator[tuple[Path, str]]:
    for operator, cut in manifest.operators.items():
        path = layout.record(manifest.epoch, operator, cut.generation)
        yield path, f"named by checkpoint {manifest.epoch}"
        yield from _content_of(layout, path, f"content of checkpoint {manifest.epoch}")


def _content_of(layout: Layout, record: Path, why: str) -> Iterator[tuple[Path, str]]:
    for file in records.load("operator", record, OperatorRecord).files():
        if file.content is None:
            yield layout.blob(file.sha256), why


def _log_of(
    layout: Layout, operator: OperatorId, lineage: Lineage, manifests: list[Manifest]
) -> Iterator[tuple[Path, str]]:
    """From the oldest entry on that a checkpoint needs; the newest entry is there in any case."""
    needed = [
        min([manifest.channels[operator].barrier, *(cut.positions.get(operator, 1 << 60) for cut in cuts)])
        for manifest in manifests
        if (cuts := list(manifest.operators.values()))
    ]
    folder = layout.channel(operator)
    visible = [
        (int(path.stem), path)
        for path in folder.glob("g*/*.json")
        if not _is_temporary(path) and lineage.owner(Position(int(path.stem))) == int(path.parent.name[1:])
    ]
    newest = max((seq for seq, _ in visible), default=0)
    for seq, path in visible:
        if seq >= min(needed, default=0) or seq == newest:
            yield path, "an entry that a checkpoint or a consumer needs"
            entry = codec.load(path)
            for segment in entry.segments if isinstance(entry, DataEntry) else ():
                yield codec.data_dir(folder) / segment.name, "rows of such an entry"


def unexplained_remotely(store: ObjectStore, fetched: Layout) -> list[str]:
    """Objects that no checkpoint there needs; ``fetched``: an empty folder into which all of them were brought."""
    names = {"flow.json"}
    there = {info.path for info in store.walk()}
    for epoch in {Epoch(int(name.split("/")[1])) for name in there if name.endswith("/manifest.json")}:
        manifest = records.load("manifest", fetched.manifest(epoch), Manifest)
        names |= {fetched.manifest(epoch).relative_to(fetched.root).as_posix(), f"published/{epoch:012d}.json"}
        names |= {path.relative_to(fetched.root).as_posix() for path, _ in _parts_of(fetched, manifest)}
        for operator, cut in manifest.channels.items():
            log = _log_of(fetched, operator, lineage_of(cut.lineage), [manifest])
            names |= {path.relative_to(fetched.root).as_posix() for path, _ in log}
    is_needed = names | {f"{name}.zst" for name in names}
    left = [name for name in there if name not in is_needed and not name.startswith(("generations/", "claims/"))]
    return sorted([*left, *(info.path for info in store.leftovers(0))])
