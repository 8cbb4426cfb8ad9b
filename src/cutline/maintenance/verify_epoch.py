"""Verifies one epoch: its manifest, its operators' records, their files, and whether sources can continue from it."""

from __future__ import annotations

from pathlib import Path

from cutline.errors import CutlineError
from cutline.maintenance.findings import BACKUP, RESTORE_INPUT
from cutline.maintenance.looking import Look, text_of
from cutline.maintenance.stored_generations import StoredGenerations, load_generations
from cutline.maintenance.verify_channels import ChannelCheck
from cutline.model.checkpoint import Manifest, OperatorCut, OperatorRecord
from cutline.model.ids import OperatorId
from cutline.model.layout import Layout
from cutline.ports.inspection import SnapshotInspector


class EpochCheck:
    """Verifies the parts of one checkpoint. ``deep``: reads every byte, not only sizes."""

    def __init__(self, layout: Layout, snapshots: SnapshotInspector, *, deep: bool) -> None:
        self._layout = layout
        self._snapshots = snapshots
        self._deep = deep
        self._channels = ChannelCheck(layout, deep=deep)

    def check(self, look: Look, manifest: Manifest, generations: StoredGenerations) -> None:
        self._check_manifest(look, manifest, generations)
        for operator in sorted(manifest.operators):
            self._check_operator(look, manifest, operator, generations)
        self._channels.check(look, manifest, generations)

    def _check_manifest(self, look: Look, manifest: Manifest, generations: StoredGenerations) -> None:
        path = self._layout.manifest(manifest.epoch)
        if manifest.flow != self._layout.root.name or manifest.epoch != look.report.epoch:
            look.problem(path, f"it is the manifest of epoch {manifest.epoch} of flow {manifest.flow}")
        if manifest.operators.keys() != manifest.channels.keys():
            look.problem(path, "its operators and its channels do not match")
        if manifest.previous_epoch >= manifest.epoch:
            look.problem(path, f"it names epoch {manifest.previous_epoch} as its predecessor")
        named = {manifest.generation, *(cut.generation for cut in manifest.operators.values())}
        named |= {generation for cut in manifest.channels.values() for generation, _ in cut.lineage}
        for generation in sorted(named):
            problem = generations.problem_of(generation)
            if problem:
                look.problem(self._layout.generation(generation), problem, next_step=BACKUP)
        for name, cut in manifest.operators.items():
            if cut.after_batch > cut.batch:
                text = f"its output begins after batch {cut.after_batch}, its cut is after batch {cut.batch}"
                look.problem(path, text, name)
        self._check_order(look, manifest)

    def _check_order(self, look: Look, manifest: Manifest) -> None:
        """No cut is earlier than that of the previous epoch, if that one still exists."""
        try:
            before = self._snapshots.load_manifest(manifest.previous_epoch)
        except (CutlineError, OSError):
            return  # released, or damaged: then it is reported under its own number
        current = load_generations(self._layout).newest
        begun = current.begun if current is not None else {}
        for name in sorted(manifest.operators.keys() & before.operators.keys()):
            new, old = manifest.operators[name], before.operators[name]
            if before.generation < begun.get(name, 0) <= manifest.generation:
                continue  # another log of the same name
            if new.batch < old.batch or new.barrier <= old.barrier:
                text = f"its cut is before that of epoch {before.epoch}, which was taken earlier"
                look.problem(self._layout.manifest(manifest.epoch), text, name)

    def _check_operator(
        self, look: Look, manifest: Manifest, operator: OperatorId, generations: StoredGenerations
    ) -> None:
        cut = manifest.operators[operator]
        path = self._layout.record(manifest.epoch, operator, cut.generation)
        try:
            record = self._snapshots.load_record(manifest, operator)
        except (CutlineError, OSError) as error:
            look.problem(path, text_of(error), operator)
            return
        look.count(path)
        contradiction = _contradiction(manifest, operator, cut, record)
        if contradiction:
            look.problem(path, contradiction, operator)
        if not self._check_files(look, record, path):
            return
        for problem in self._snapshots.incomplete(record):
            look.problem(path, f"{problem.path}: {problem.problem}", operator)
        current = generations.newest
        if current is not None and current.inputs.get(operator) == []:
            live = self._layout.spark_checkpoint_dir(operator, current.spark_dirs[operator])
            sources = self._snapshots.sources(record, live)
            for problem in sources.problems:
                look.problem(Path(problem.path), problem.problem, operator, next_step=RESTORE_INPUT)
            look.report.notes += [f"{operator}: {note}" for note in sources.notes]

    def _check_files(self, look: Look, record: OperatorRecord, path: Path) -> bool:
        """Whether every stored file of the record is whole."""
        are_whole = True
        for file in record.files():
            try:
                damage = self._snapshots.file_damage(file, deep=self._deep)
            except OSError as error:
                damage = f"{file.path}: it cannot be read: {error.strerror}"
            if damage:
                where = path if file.content is not None else self._layout.blob(file.sha256)
                look.problem(where, damage, record.operator)
                are_whole = False
            look.add(file.size_bytes)
        return are_whole


def _contradiction(manifest: Manifest, operator: OperatorId, cut: OperatorCut, record: OperatorRecord) -> str | None:
    """How a record contradicts the manifest that names it."""
    said = (record.flow, record.operator, record.epoch, record.generation, record.batch, record.barrier)
    if said != (manifest.flow, operator, manifest.epoch, cut.generation, cut.batch, cut.barrier):
        return "record and manifest disagree about the record's identity"
    if record.positions != cut.positions:
        return "record and manifest disagree about how far the inputs were read"
    channel = manifest.channels.get(operator)
    if channel is None or channel.barrier != cut.barrier:
        return "the manifest gives two different barrier positions"
    return None
