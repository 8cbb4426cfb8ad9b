"""Builds a second flow from a savepoint: under the new flow's name, with operators renamed as requested.

It is built in a neighbouring folder, which is renamed at the end: the new flow exists whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from cutline.base import durable, records
from cutline.base.clock import now_ms
from cutline.base.paths import read_plain
from cutline.channels import entry_files as codec
from cutline.channels.in_flight import entry_paths
from cutline.errors import DamagedRecordError
from cutline.model.checkpoint import Manifest, OperatorRecord, SnapshotFile
from cutline.model.entries import DataEntry
from cutline.model.generation import FlowCode, GenerationRecord
from cutline.model.ids import Epoch, FlowName, OperatorId
from cutline.model.layout import Layout
from cutline.protocol.history.renaming import Renaming
from cutline.tiers.remote_tier import RemoteTier

_DAMAGED = "the savepoint is damaged: use another copy of it, or another savepoint"


def branch(
    tier_in: Callable[[Layout], RemoteTier],
    epoch: Epoch,
    target: Layout,
    flow: FlowName,
    *,
    rename: Mapping[str, str],
    drop: Collection[str],
) -> tuple[Manifest, Renaming]:
    """``tier_in``: opens the savepoint as a tier for a folder. Raises ConfigError, DamagedRecordError or StoreError.

    The second flow does not publish what the first flow's sinks had staged: its sinks begin after the savepoint.
    """
    durable.make_dir(target.root.parent)
    with tempfile.TemporaryDirectory(prefix=".tmp-clone-", dir=target.root.parent) as folder:
        fetched, built = Layout(Path(folder), "fetched"), Layout(Path(folder), "built")
        tier = tier_in(fetched)
        tier.downloader.download_records()
        manifest = tier.checkpoints.load_manifest(epoch)
        tier.downloader.download_content(manifest)
        path = fetched.generation(manifest.generation)
        generation = records.load("generation", path, GenerationRecord, flow=flow)
        records.check_identity("generation", generation.generation, manifest.generation, path=path, flow=flow)
        renaming = Renaming.checked(generation.inputs, rename, drop)
        made = _Builder(fetched, built, renaming, flow).build(manifest, generation)
        if target.root.exists():
            target.root.rmdir()  # fails unless it is empty: nothing is ever overwritten
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
        identity = {
            "name": self._flow,
            "created_ms": now_ms(),
            "cloned_from": {"flow": manifest.flow, "epoch": manifest.epoch},
        }
        self._write(self._built.identity, records.encode("flow", identity))
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
        # The new flow begins a history of its own.
        made = msgspec.structs.replace(manifest, flow=self._flow, history="", operators=operators, channels=channels)
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
            begun={},  # the new flow has no logs from before this checkpoint
            left={},
            code=self._code(generation.code),
            identity="",
            parent=generation.identity,
        )

    def _code(self, code: FlowCode | None) -> FlowCode | None:
        if code is None:
            return None
        return msgspec.structs.replace(code, operators=self._renaming.keys(code.operators))

    def _record(self, manifest: Manifest, old: OperatorId) -> OperatorRecord:
        cut = manifest.operators[old]
        path = self._fetched.record(manifest.epoch, old, cut.generation)
        data = records.read("operator", path, operator=old, flow=self._flow)
        if records.checksum(data) != cut.record_sha256:
            raise DamagedRecordError(
                "operator record is not the one the manifest names", next_step=_DAMAGED, path=path.name, operator=old
            )
        record = records.decode("operator", data, OperatorRecord, path=path.name, flow=self._flow)
        identity = (record.epoch, record.operator, record.generation)
        records.check_identity("operator", identity, (manifest.epoch, old, cut.generation), path=path.name)
        for file in record.files():
            if file.content is None:
                self._link(self._fetched.blob(file.sha256), self._built.blob(file.sha256))
        renamed = self._renaming.record(record, self._read_small)
        return msgspec.structs.replace(renamed, flow=self._flow, sinks={})

    def _read_small(self, file: SnapshotFile) -> bytes:
        try:
            return read_plain(self._fetched.blob(file.sha256), records.MOST_BYTES)
        except OSError as error:
            raise DamagedRecordError(
                f"a small file cannot be read: {error.strerror}", next_step=_DAMAGED, path=file.path
            ) from error

    def _entries(self, manifest: Manifest) -> None:
        """Writes the log entries that a restore reads, as the new flow would have written them."""
        folders = {
            self._fetched.channel(old): self._built.channel(new) for old, new in self._renaming.new_names.items()
        }
        for path in entry_paths(manifest, self._fetched):
            target = folders.get(path.parents[1])
            if target is None:
                continue
            entry = codec.check_place(codec.load(path), path)
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
            durable.fsync_dir(target.parent)
