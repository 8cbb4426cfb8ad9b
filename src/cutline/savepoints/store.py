"""Savepoints: named checkpoints that users create; self-contained, kept until a user deletes them, movable anywhere.

A savepoint is its own folder, laid out like a flow's: manifest, records, content, in-flight data. It holds no path of a
machine, so a copy of the folder in a bucket or on another disk is equivalent. ``savepoint.json`` is written last: a
savepoint exists whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from cutline.base import durable, records
from cutline.base.clock import now_ms
from cutline.base.crashpoints import crashpoint
from cutline.errors import ConfigError, CutlineError, MissingObject, UnknownSavepointError
from cutline.model.checkpoint import Manifest
from cutline.model.graph import check_name
from cutline.model.ids import (
    NO_CODE,
    BatchId,
    CodeHash,
    Count,
    Epoch,
    FlowName,
    Generation,
    MomentMs,
    OperatorId,
    SizeBytes,
    Text,
)
from cutline.model.layout import Layout
from cutline.ports.objects import ObjectStore
from cutline.protocol.deploys import BEFORE_LAST_DEPLOY, TakenBefore
from cutline.protocol.history.renaming import Renaming
from cutline.savepoints.clone import branch
from cutline.savepoints.importing import SavepointImport
from cutline.storage.detached import DetachedLogs
from cutline.tiers.remote_checkpoints import is_record
from cutline.tiers.remote_tier import RemoteTier

KIND = "savepoint"
#: A plain number would be mistaken for an epoch.
_NAME = re.compile(r"^(?!\d+\Z)[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
SavepointName = Annotated[str, msgspec.Meta(pattern=_NAME.pattern)]
_CARD = "savepoint.json"
#: Larger objects are copied through a file instead of through memory.
_LARGE_BYTES = 32 << 20

OpenStore = Callable[[str], ObjectStore]


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a savepoint, not the remains of one that was never finished or is being deleted."""
    return (folder / _CARD).exists()


class Savepoint(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a savepoint, readable without reading its content."""

    name: SavepointName
    flow: FlowName
    epoch: Epoch
    generation: Generation
    created_ms: MomentMs
    #: No data was in flight: code and schemas may change before it is restored.
    is_drained: bool
    #: Per operator: the last batch that its state includes.
    batches: dict[OperatorId, BatchId]
    files: Count
    size_bytes: SizeBytes
    note: Text = ""
    #: The code that made its checkpoint; empty: not known.
    code: CodeHash = NO_CODE
    #: Of an automatic savepoint, which is removed when newer ones are taken: before what. Empty: a person took it.
    taken_before: TakenBefore = ""


class Savepoints:
    """The savepoints of one flow."""

    def __init__(self, layout: Layout, open_store: OpenStore, *, open_source: OpenStore | None = None) -> None:
        """``open_source``: for a place that is only read; by default the same."""
        self._layout = layout
        self._open_store = open_store
        self._open_source = open_source or open_store
        self._epochs: dict[tuple[str, int], Epoch] = {}

    def epochs(self) -> list[Epoch]:
        """The checkpoints that savepoints hold. Each card is read once, since this is asked for every checkpoint."""
        found: dict[tuple[str, int], Epoch] = {}
        for name in os.listdir(self._layout.savepoints) if self._layout.savepoints.exists() else ():
            # Unfinished, being removed, or damaged. Other errors pass: a savepoint that is left out is forgotten.
            with contextlib.suppress(CutlineError, FileNotFoundError, NotADirectoryError):
                path = self._layout.savepoints / name / _CARD
                key = (name, path.stat().st_mtime_ns)
                known = self._epochs.get(key)
                found[key] = records.load(KIND, path, Savepoint).epoch if known is None else known
        self._epochs = found
        return sorted(found.values())

    def list(self) -> list[Savepoint]:
        """All readable savepoints, oldest first."""
        found = []
        for path in self._layout.savepoints.glob(f"*/{_CARD}") if self._layout.savepoints.exists() else ():
            try:
                found.append(records.load(KIND, path, Savepoint))
            except CutlineError:
                continue  # ``show`` and ``verify`` report what is wrong with it
        return sorted(found, key=lambda one: (one.created_ms, one.name))

    def load(self, name: str) -> Savepoint:
        folder = self._folder(name)
        if not folder.exists():
            known = ", ".join(one.name for one in self.list()) or "none"
            raise UnknownSavepointError(f"there is no savepoint {name!r}", next_step=f"available savepoints: {known}")
        return records.load(KIND, folder / _CARD, Savepoint)

    def tier(self, name: str, layout: Layout | None = None) -> RemoteTier:
        """The savepoint as a tier to download from into a flow's folder (its own by default)."""
        return RemoteTier.open(self._open_store(str(self._folder(name))), layout or self._layout, has_rivals=False)

    # ------------------------------------------------------------------ making and deleting

    def manifest_of(self, savepoint: Savepoint) -> Manifest:
        return self.tier(savepoint.name).checkpoints.load_manifest(savepoint.epoch)

    def create(
        self, name: str, manifest: Manifest, *, is_drained: bool, note: str = "", taken_before: TakenBefore = ""
    ) -> Savepoint:
        """Store a complete checkpoint under a name; the caller protects it from collection meanwhile."""
        self.check_free(name)
        folder = self._folder(name)
        shutil.rmtree(folder, ignore_errors=True)  # remains of a savepoint that was not finished
        durable.make_dir(folder)
        uploader = self.tier(name).uploader
        copied = uploader.send(manifest, manifest.generation)
        crashpoint("savepoint-sent")
        uploader.seal(manifest, manifest.generation)
        savepoint = Savepoint(
            name=name,
            flow=manifest.flow,
            epoch=manifest.epoch,
            generation=manifest.generation,
            created_ms=now_ms(),
            is_drained=is_drained,
            batches={operator: cut.batch for operator, cut in manifest.operators.items()},
            files=copied.files,
            size_bytes=copied.size_bytes,
            note=note,
            code=manifest.code,
            taken_before=taken_before,
        )
        durable.replace(folder / _CARD, records.encode(KIND, savepoint))
        return savepoint

    def delete(self, name: str) -> None:
        """Removes the card first: after a kill, the folder is no longer a savepoint."""
        self.load(name)
        folder = self._folder(name)
        (folder / _CARD).unlink()
        durable.fsync_dir(folder)
        shutil.rmtree(folder)

    def remove_unfinished(self, prefix: str) -> None:
        """Remove what is left of savepoints with such names that were never finished; the caller makes none now."""
        for folder in self._layout.savepoints.glob(f"{prefix}*"):
            if not (folder / _CARD).exists():
                shutil.rmtree(folder, ignore_errors=True)

    def export(self, name: str, url: str) -> int:
        """Copy it to another place, in a bucket or on another disk; returns the bytes copied."""
        self.load(name)
        target = self._open_store(url)
        if target.find(_CARD) is not None:
            raise ConfigError(f"a savepoint exists already at {target.url}", next_step="choose another place")
        return _copy_all(self._open_store(str(self._folder(name))), target)

    def import_from(self, url: str, name: str) -> Savepoint:
        """Import an exported savepoint, of this flow or another; refuse one that no export writes."""
        self.check_free(name)
        source, folder = self._open_source(url), self._folder(name)
        try:
            data = source.read(_CARD, records.MOST_BYTES)
        except MissingObject as error:
            raise UnknownSavepointError(
                f"there is no savepoint at {source.url}",
                next_step="name the place that cutline savepoint export was given",
                flow=self._layout.flow,
            ) from error
        card = records.decode(KIND, data, Savepoint, path=f"{source.url}/{_CARD}", flow=self._layout.flow)
        shutil.rmtree(folder, ignore_errors=True)
        durable.make_dir(folder)
        try:
            manifest = SavepointImport(source, _CARD, folder, self._layout).run(card.epoch)
            batches = {operator: cut.batch for operator, cut in manifest.operators.items()}
            found = (manifest.flow, manifest.generation, batches)
            records.check_identity(KIND, (card.flow, card.generation, card.batches), found, path=source.url)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        crashpoint("savepoint-sent")
        savepoint = msgspec.structs.replace(card, name=name, taken_before="")  # from now on a person owns it
        durable.replace(folder / _CARD, records.encode(KIND, savepoint))
        return savepoint

    # ------------------------------------------------------------------ restoring and cloning

    def fetch(self, name: str) -> Manifest:
        """Download all its content into the flow's folder, where a restore finds it."""
        savepoint = self.check_own(name)
        tier = self.tier(name)
        # Its manifest comes last: after a kill, it would else be a checkpoint without content.
        tier.downloader.download_records(with_manifests=False)
        manifest = tier.checkpoints.load_manifest(savepoint.epoch)
        DetachedLogs(self._layout).store_downloaded(manifest, lambda: tier.downloader.download_content(manifest))
        tier.downloader.download_records()
        return manifest

    def check_own(self, name: str) -> Savepoint:
        """Raise ConfigError if the flow cannot be restored to it, because it is of another history."""
        savepoint = self.load(name)
        self._refuse_foreign(name, savepoint)
        return savepoint

    def layout_of(self, name: str) -> Layout:
        """Its folder is laid out like that of a flow; content may be packed."""
        folder = self._folder(name)
        return Layout(folder.parent, folder.name)

    def _refuse_foreign(self, name: str, savepoint: Savepoint) -> None:
        """Records of this flow's history are here or were collected; a record that differs is of another history."""
        store = self._open_store(str(self._folder(name)))
        generations = [info.path for info in store.walk("generations") if is_record(info.path)]
        others = [path for path in generations if self._differs(path, store.read(path, records.MOST_BYTES))]
        if self._is_another_here(self.tier(name).checkpoints.load_manifest(savepoint.epoch)):
            others.append(self._layout.manifest(savepoint.epoch).relative_to(self._layout.root).as_posix())
        if others:
            raise ConfigError(
                f"savepoint {name!r} does not belong to this flow's history",
                next_step="create a separate flow from it: cutline clone",
                path=others[0],
            )
        newest = self.tier(name).checkpoints.newest_generation()
        if self._layout.generations.exists() and not self._layout.generation(newest).exists():
            raise ConfigError(
                f"savepoint {name!r} was taken by a flow that is no ancestor of this one",
                next_step="create a separate flow from it: cutline clone",
            )

    def _differs(self, path: str, content: bytes) -> bool:
        here = self._layout.root / path
        return here.exists() and here.read_bytes() != content

    def _is_another_here(self, manifest: Manifest) -> bool:
        """Compares decoded manifests: the savepoint's copy was re-encoded, and a number may be spelled in two ways."""
        here = self._layout.manifest(manifest.epoch)
        if not here.exists() or not records.is_whole(here.read_bytes()):
            return False
        is_manifest = records.kind_of(here.read_bytes()) == "manifest"
        return not is_manifest or records.load("manifest", here, Manifest) != manifest

    def clone(
        self,
        name: str,
        target: Layout,
        flow: FlowName,
        *,
        rename: Mapping[str, str] | None = None,
        drop: Collection[str] = (),
    ) -> tuple[Manifest, Renaming]:
        """Create another flow that begins at this savepoint and shares nothing with the first.

        ``rename``: new names of operators; ``drop``: operators that it does not have. Its sinks begin empty.
        """
        check_name("a flow", flow)
        if target.root.exists() and any(target.root.iterdir()):
            raise ConfigError(
                f"{target.root.name} exists already",
                next_step="choose another name for the clone, or remove its folder",
                flow=flow,
            )
        epoch = self.load(name).epoch
        return branch(lambda layout: self.tier(name, layout), epoch, target, flow, rename=rename or {}, drop=drop)

    def _folder(self, name: str) -> Path:
        if name.isascii() and name.isdigit():
            raise ConfigError(
                f"a savepoint cannot be called {name!r}: a number is an epoch",
                next_step=f"choose another name, for example v{name}",
            )
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} is not a valid savepoint name", next_step="use A-Z, a-z, digits, dots, dashes, underscores"
            )
        return self._layout.savepoint(name)

    def check_free(self, name: str) -> None:
        """Raise ConfigError if the name is invalid or taken."""
        if name == BEFORE_LAST_DEPLOY:
            raise ConfigError(f"{name!r} means a savepoint that a start took", next_step="choose another name")
        if (self._folder(name) / _CARD).exists():
            raise ConfigError(f"savepoint {name!r} exists already", next_step="choose another name, or delete it first")


def _copy_all(source: ObjectStore, target: ObjectStore) -> int:
    """Copies every object, the card last."""
    infos = sorted(source.walk(), key=lambda info: info.path == _CARD)
    for info in infos:
        if info.size_bytes <= _LARGE_BYTES:
            target.replace(info.path, source.read(info.path))
            continue
        with tempfile.TemporaryDirectory(prefix="cutline-savepoint-") as folder:
            held = Path(folder) / "object"
            source.download(info.path, held)
            target.upload(info.path, held)
    return sum(info.size_bytes for info in infos)
