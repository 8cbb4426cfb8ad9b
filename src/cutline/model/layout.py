"""Every path that Cutline uses below a flow's folder, built here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cutline.errors import InvariantViolation
from cutline.model.ids import Epoch, Generation, OperatorId


def _part(name: str) -> str:
    """One name of a path. Records are checked when they are decoded; this is the last line before the file system."""
    if "/" in name or "\0" in name or name in ("", ".", ".."):
        raise InvariantViolation(f"{name!r} cannot be a part of a path")
    return name


class Layout:
    """Paths of one flow."""

    def __init__(self, storage: Path, flow: str) -> None:
        self.root = storage / flow

    @property
    def flow(self) -> str:
        """The name of the flow, or of the folder that holds it for a while."""
        return self.root.name

    def name(self, path: Path) -> str:
        """A path below the flow's folder, relative to it and with slashes: its name in an object store too."""
        return path.relative_to(self.root).as_posix()

    @property
    def identity(self) -> Path:
        return self.root / "flow.json"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def metadata(self) -> Path:
        return self.root / "coordinator.sqlite"

    @property
    def status(self) -> Path:
        """A small file for monitoring; rewritten all the time, never read by the flow."""
        return self.root / "status.json"

    @property
    def starting(self) -> Path:
        """Which step a start is at; only while it lasts, for a person."""
        return self.root / "starting.json"

    @property
    def traces(self) -> Path:
        """Whole traces of errors, for a person; never read by the flow."""
        return self.root / "traces"

    @property
    def generations(self) -> Path:
        return self.root / "generations"

    def generation(self, generation: Generation) -> Path:
        return self.generations / f"{generation:06d}.json"

    @property
    def channels(self) -> Path:
        return self.root / "channels"

    def channel(self, operator: OperatorId) -> Path:
        return self.channels / _part(operator)

    def spark_checkpoint_dir(self, operator: OperatorId, generation: Generation) -> Path:
        return self.root / "spark" / _part(operator) / f"g{generation:06d}"

    def live_dirs(self, generations: Mapping[OperatorId, Generation]) -> dict[OperatorId, Path]:
        return {name: self.spark_checkpoint_dir(name, generation) for name, generation in generations.items()}

    @property
    def spark_dirs(self) -> Path:
        return self.root / "spark"

    @property
    def live_home(self) -> Path:
        """Records where Spark's directories are, if not here."""
        return self.root / "live-dirs.json"

    @property
    def gates(self) -> Path:
        return self.root / "gates"

    @property
    def blobs(self) -> Path:
        return self.root / "blobs"

    def blob(self, sha256: str) -> Path:
        return self.blobs / _part(sha256[:2]) / _part(sha256)

    @property
    def pins(self) -> Path:
        return self.root / "pins"

    def pin(self, epoch: Epoch, operator: OperatorId) -> Path:
        return self.pins / f"{epoch:012d}" / _part(operator)

    @property
    def requests(self) -> Path:
        """Requests from other processes to the running one."""
        return self.root / "requests"

    @property
    def restore_request(self) -> Path:
        """The restore request that the next start carries out, if there is one."""
        return self.root / "restore.json"

    @property
    def restore_lock(self) -> Path:
        """Held by a command that requests a restore, so that two people do not mix theirs."""
        return self.root / "restore.lock"

    @property
    def set_aside(self) -> Path:
        """Says that the flow's state is being moved into the folder ``aside``."""
        return self.root / "set-aside.json"

    def aside(self, name: str) -> Path:
        return self.root / "aside" / _part(name)

    def kept_when_set_aside(self) -> frozenset[Path]:
        """What belongs to the storage and not to the flow's state."""
        own = (self.identity, self.lock, self.starting, self.live_home, self.savepoints, self.set_aside)
        return frozenset((*own, self.root / "aside"))

    @property
    def detached(self) -> Path:
        return self.root / "detached"

    def detached_epoch(self, epoch: Epoch) -> Path:
        """What a detached checkpoint had in flight."""
        return self.detached / f"{epoch:012d}"

    @property
    def restore_limits(self) -> Path:
        """What limited restores when the flow stopped; for a person."""
        return self.root / "restore-limits.json"

    @property
    def put_back(self) -> Path:
        """Names what a start has put back into the logs."""
        return self.root / "put-back.json"

    @property
    def savepoints(self) -> Path:
        return self.root / "savepoints"

    def savepoint(self, name: str) -> Path:
        return self.savepoints / _part(name)

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, epoch: Epoch) -> Path:
        return self.checkpoints / f"{epoch:012d}"

    def manifest(self, epoch: Epoch) -> Path:
        return self.checkpoint(epoch) / "manifest.json"

    def record(self, epoch: Epoch, operator: OperatorId, generation: Generation) -> Path:
        """One per generation: a record is never changed, so a restored operator writes its own."""
        return self.checkpoint(epoch) / f"{_part(operator)}.g{generation:06d}.json"
