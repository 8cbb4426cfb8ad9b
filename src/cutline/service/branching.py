"""A second flow from a savepoint: everything under the new flow's name, and operators under new names if they have any.

Built in a folder beside, which is renamed at the end: the new flow is there with all it needs, or not at all.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from cutline import durable, records
from cutline.channels import entries as codec
from cutline.channels.entries import DataEntry
from cutline.errors import ConfigError, DamagedRecordError
from cutline.ids import Epoch, FlowName, OperatorId
from cutline.layout import Layout
from cutline.ports import GenerationRecord, Manifest, OperatorRecord, SnapshotFile
from cutline.service.checkpoint_content import entry_paths
from cutline.service.clock import now_ms
from cutline.service.replica import Replica

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Renaming:
    """What operators are called in the new flow; those that are missing here are dropped."""

    new_names: Mapping[OperatorId, OperatorId]

    @classmethod
    def checked(
        cls,
        inputs: Mapping[OperatorId, Collection[OperatorId]],
        rename: Mapping[str, str],
        drop: Collection[str],
    ) -> Renaming:
        """``inputs``: of every operator of the savepoint. Raises ConfigError for what cannot be meant."""
        known = ", ".join(inputs)
        for name in [*rename, *drop]:
            if name not in inputs:
                raise ConfigError(f"the savepoint has no operator {name!r}", next_step=f"it has: {known}")
        new_names = {name: OperatorId(rename.get(name, name)) for name in inputs if name not in drop}
        taken = list(new_names.values())
        for name in taken:
            if taken.count(name) > 1:
                raise ConfigError(f"two operators would be called {name!r}", next_step="give each a name of its own")
        for name in new_names:
            for channel in inputs[name]:
                if channel not in new_names:
                    raise ConfigError(
                        f"{channel!r} cannot be dropped: {name!r} reads it", next_step=f"drop {name!r} too"
                    )
        return cls(new_names)

    def keys(self, values: Mapping[OperatorId, V]) -> dict[OperatorId, V]:
        return {self.new_names[name]: value for name, value in values.items() if name in self.new_names}

    def names(self, values: Iterable[OperatorId]) -> list[OperatorId]:
        return [self.new_names[name] for name in values if name in self.new_names]

    def offsets(self, content: bytes) -> bytes:
        """Spark's own note of how far it has read each channel names the channel."""

        def renamed(found: re.Match[bytes]) -> bytes:
            old = OperatorId(found[2].decode())
            return found[1] + self.new_names.get(old, old).encode() + found[3]

        return re.sub(rb'("channel"\s*:\s*")([^"]+)(")', renamed, content)


def branch(
    replica_in: Callable[[Layout], Replica],
    epoch: Epoch,
    target: Layout,
    flow: FlowName,
    *,
    rename: Mapping[str, str],
    drop: Collection[str],
) -> tuple[Manifest, Renaming]:
    """``replica_in``: the savepoint, as a source for a folder. Raises ConfigError, DamagedRecordError or StoreError.

    What the first flow's sinks had staged is not the second one's to publish: its sinks begin after the savepoint.
    """
    durable.make_dir(target.root.parent)
    with tempfile.TemporaryDirectory(prefix=".tmp-clone-", dir=target.root.parent) as folder:
        fetched, built = Layout(Path(folder), "fetched"), Layout(Path(folder), "built")
        replica = replica_in(fetched)
        replica.fetch_records()
        manifest = replica.load_manifest(epoch)
        replica.fetch_content(manifest)
        generation = records.load("generation", fetched.generation(manifest.generation), GenerationRecord)
        renaming = Renaming.checked(generation.inputs, rename, drop)
        made = _Builder(fetched, built, renaming, flow).build(manifest, generation)
        if target.root.exists():
            target.root.rmdir()  # empty, or it fails: nothing is ever written over
        os.rename(built.root, target.root)
        durable.fsync_dir(target.root.parent)
    return made, renaming


class _Builder:
    def __init__(self, fetched: Layout, built: Layout, renaming: Renaming, flow: FlowName) -> None:
        self._fetched = fetched
        self._built = built
        self._renaming = renaming
        self._flow = flow

    def build(self, manifest: Manifest, generation: GenerationRecord) -> Manifest:
        self._write(self._built.identity, records.encode("flow", {"name": self._flow, "created_ms": now_ms()}))
        self._write(self._built.generation(generation.generation), records.encode("generation", self._of(generation)))
        self._entries(manifest)
        operators = {}
        for old, cut in manifest.operators.items():
            if old not in self._renaming.new_names:
                continue
            new = self._renaming.new_names[old]
            record = self._record(manifest, old)
            encoded = records.encode("operator", record)
            self._write(self._built.record(manifest.epoch, new, cut.generation), encoded)
            positions = self._renaming.keys(cut.positions)
            operators[new] = msgspec.structs.replace(cut, record_sha256=records.checksum(encoded), positions=positions)
        channels = {
            name: msgspec.structs.replace(cut, in_flight=self._renaming.keys(cut.in_flight))
            for name, cut in self._renaming.keys(manifest.channels).items()
        }
        made = msgspec.structs.replace(manifest, flow=self._flow, operators=operators, channels=channels)
        self._write(self._built.manifest(manifest.epoch), records.encode("manifest", made))
        return made

    def _of(self, generation: GenerationRecord) -> GenerationRecord:
        keys = self._renaming.keys
        inputs = {name: self._renaming.names(channels) for name, channels in keys(generation.inputs).items()}
        return msgspec.structs.replace(
            generation,
            lineage=keys(generation.lineage),
            spark_dirs=keys(generation.spark_dirs),
            inputs=inputs,
            schemas=keys(generation.schemas),
        )

    def _record(self, manifest: Manifest, old: OperatorId) -> OperatorRecord:
        cut = manifest.operators[old]
        path = self._fetched.record(manifest.epoch, old, cut.generation)
        if records.checksum(path.read_bytes()) != cut.record_sha256:
            raise DamagedRecordError("operator record is not the one the manifest names", path=path.name, operator=old)
        record = records.load("operator", path, OperatorRecord)
        for file in record.files():
            if file.content is None:
                self._link(self._fetched.blob(file.sha256), self._built.blob(file.sha256))
        return msgspec.structs.replace(
            record,
            flow=self._flow,
            operator=self._renaming.new_names[old],
            positions=self._renaming.keys(record.positions),
            shared=[self._shared(file) for file in record.shared],
            sinks={},
        )

    def _shared(self, file: SnapshotFile) -> SnapshotFile:
        if not file.path.startswith("offsets/"):
            return file
        before = file.content if file.content is not None else self._fetched.blob(file.sha256).read_bytes()
        content = self._renaming.offsets(before)
        if content == before:
            return file
        digest = hashlib.sha256(content).hexdigest()
        return SnapshotFile(path=file.path, sha256=digest, size_bytes=len(content), content=content)

    def _entries(self, manifest: Manifest) -> None:
        """What a restore reads of the logs, as the new flow would have written it."""
        folders = {
            self._fetched.channel(old): self._built.channel(new) for old, new in self._renaming.new_names.items()
        }
        for path in entry_paths(manifest, self._fetched):
            target = folders.get(path.parents[1])
            if target is None:
                continue
            entry = codec.load(path)
            entry = msgspec.structs.replace(entry, positions=self._renaming.keys(entry.positions))
            if isinstance(entry, DataEntry):
                entry = msgspec.structs.replace(entry, staged={})
                for segment in entry.segments:
                    source = codec.data_dir(path.parents[1]) / segment.name
                    self._link(source, codec.data_dir(target) / segment.name)
            self._write(target / path.parent.name / path.name, codec.encode(entry))

    def _write(self, path: Path, data: bytes) -> None:
        durable.make_dir(path.parent)
        durable.replace(path, data)

    def _link(self, source: Path, target: Path) -> None:
        durable.make_dir(target.parent)
        if not target.exists():
            shutil.copyfile(source, target)
            durable.fsync_file(target)
