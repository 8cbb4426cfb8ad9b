"""Savepoints: checkpoints with all they need, under a name, on the disk of one host."""

from __future__ import annotations

from cutline.model.checkpoint import Tombstone
from cutline.model.ids import Epoch, OperatorId
from cutline.testing.simulator.storage import checks
from cutline.testing.simulator.storage.checkpoints import Checkpoint, EntryName, Savepoint, content_names
from cutline.testing.simulator.storage.disk import Disk
from cutline.testing.simulator.storage.log import Entry
from cutline.testing.simulator.world import Violation


def create(disk: Disk, epoch: Epoch) -> str:
    """The caller holds the epoch. The savepoint's own files are synced before it is one."""
    checkpoint = disk.checkpoint(epoch)
    if checkpoint is None:
        raise Violation(f"epoch {epoch} is held, and gone")
    names = content_names(checkpoint.manifest, disk.records)
    for name in names:
        if not isinstance(name, EntryName) and name not in disk.blobs:
            raise Violation(f"epoch {epoch} is held, and its content is gone: {name}")
    title = f"savepoint{len(disk.savepoints) + 1}"
    disk.savepoints[title] = Savepoint(
        manifest=checkpoint.manifest,
        records={key: disk.records[key] for key in checkpoint.record_keys().values()},
        blobs=frozenset(name for name in names if not isinstance(name, EntryName)),
        entries=in_flight(disk, checkpoint),
    )
    return title


def in_flight(disk: Disk, checkpoint: Checkpoint) -> tuple[tuple[OperatorId, Entry], ...]:
    """What a restore reads from the logs."""
    epoch, found = checkpoint.manifest.epoch, []
    for name in content_names(checkpoint.manifest, disk.records):
        if isinstance(name, EntryName):
            entry = disk.logs[name.channel].entry(name.generation, name.seq)
            if entry is None:
                raise Violation(f"epoch {epoch} stays, and entry {name.seq} of {name.channel} is gone")
            found.append((name.channel, entry))
    return tuple(found)


def usable(disk: Disk) -> list[str]:
    """Those of the present history whose place is not taken by something else."""
    return [
        name
        for name, one in sorted(disk.savepoints.items())
        if checks.is_live(disk, Checkpoint(one.manifest))
        and not isinstance(disk.manifests.get(one.manifest.epoch), Tombstone)
    ]


def put_back(disk: Disk, name: str) -> Epoch:
    """Put all that a savepoint holds where a restore finds it, as ``Savepoints.fetch`` does."""
    savepoint = disk.savepoints[name]
    for key, record in savepoint.records.items():
        disk.records.setdefault(key, record)
    disk.blobs |= savepoint.blobs
    for channel, entry in savepoint.entries:
        disk.logs[channel].put(entry)
    if savepoint.manifest.epoch not in disk.manifests:
        disk.put_manifest(savepoint.manifest)
    disk.only_records.discard(savepoint.manifest.epoch)
    return savepoint.manifest.epoch
