"""One flow with its processes: who lives where, who is started again, and how all come back at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from random import Random

from cutline.model.ids import NO_BATCH, NO_EPOCH, START, BatchId, Epoch, FlowName, Generation, OperatorId, Position
from cutline.protocol.checkpoint.coordinator import Coordinator, EpochNumbers, Settings, Topology
from cutline.protocol.checkpoint.per_operator import FlowCoordinator, PerOperatorCoordinator
from cutline.protocol.checkpoint.trigger import TriggerPolicy, TriggerSettings
from cutline.protocol.cut.agent import AS_FLOW
from cutline.protocol.history.epochs import Incarnation, is_of_history, is_resumable, live_epochs, lost_behind
from cutline.protocol.history.lineage import Lineage
from cutline.protocol.history.retention import RetentionPolicy
from cutline.protocol.publish.publishing import CompleteEpoch
from cutline.testing.simulator.graphs import Graph
from cutline.testing.simulator.network import Book, Network
from cutline.testing.simulator.processes.coordinator import CoordinatorProcess
from cutline.testing.simulator.processes.operator import COORDINATOR, OperatorProcess
from cutline.testing.simulator.storage.disk import Blob, Counts, Data, Disk, GenerationModel, ManifestModel, SparkDir
from cutline.testing.simulator.world import Steps, Violation, World


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """How one flow is configured."""

    interval_ms: int
    timeout_ms: int
    patience_ms: int
    alignment_limit_ms: int | None
    own_limits_ms: Mapping[OperatorId, int | None]
    operator_timeouts_ms: Mapping[OperatorId, int]
    trigger: TriggerSettings
    retention: RetentionPolicy
    tolerable_failures: int | None
    capacity_entries: int
    rows_per_source: int
    batch_ms: tuple[int, int]
    #: Every operator is checkpointed by itself, each at its own interval.
    is_per_operator: bool = False
    own_intervals_ms: Mapping[OperatorId, int] = field(default_factory=dict)

    def alone(self, operators: Collection[OperatorId]) -> OperatorId | None:
        return next(iter(operators)) if self.is_per_operator else None

    @property
    def needs_progress(self) -> bool:
        return self.trigger.needs_progress()


def random_settings(rng: Random, graph: Graph) -> FlowSettings:
    interval, timeout = rng.choice([60, 120, 250]), rng.choice([700, 1_500, 3_000])
    size = len(graph.operators)
    return FlowSettings(
        own_intervals_ms={name: interval * (1 + n % 4) * (1 + size // 6) for n, name in enumerate(graph.operators)},
        interval_ms=interval,
        timeout_ms=timeout,
        patience_ms=rng.choice([timeout, timeout, timeout // 10]),
        alignment_limit_ms=rng.choice([None, 0, 0, 20, 80]),
        own_limits_ms={name: rng.choice([None, 0, 30]) if rng.random() < 0.1 else AS_FLOW for name in graph.operators},
        operator_timeouts_ms={name: 600 for name in graph.operators if rng.random() < 0.05},
        trigger=TriggerSettings(
            interval_ms=interval,
            min_pause_ms=rng.choice([0, 0, 30]),
            max_concurrent=rng.choice([1, 1, 2, 3]),
            every_batches=rng.choice([0, 0, 0, 7]),
            every_rows=rng.choice([0, 0, 0, 20]),
            event_time_ms=rng.choice([0, 0, 0, 100]),
            backlog_interval_ms=rng.choice([0, 0, 2 * interval]),
        ),
        retention=RetentionPolicy(count=rng.choice([1, 1, 2, 3]), age_ms=rng.choice([None, None, 300])),
        tolerable_failures=rng.choice([None, 0, 2]),
        capacity_entries=rng.choice([1, 4, 64]),
        rows_per_source=rng.choice([30, 80, 150]),
        batch_ms=(4, 18) if size <= 10 else (15, 60),
    )


class SimulatedFlow:
    """The host: starts processes, starts them again, and knows the durable world they share."""

    def __init__(self, world: World, graph: Graph, settings: FlowSettings) -> None:
        self.world = world
        self.graph = graph
        self.settings = settings
        self.disk = Disk(graph)
        self.network = Network(world)
        self.book: Book = {}
        self.is_alive = True
        self.is_paused = False
        self.coordinator: CoordinatorProcess | None = None
        self.operators: dict[OperatorId, OperatorProcess] = {}
        self._sessions = 0
        #: Grows with each way back of the whole flow; whatever was planned for an earlier one is void.
        self._attempt = 0
        self._zombies: list[OperatorProcess | CoordinatorProcess] = []

    # ------------------------------------------------------------------ what processes ask

    def rows_per_source(self) -> int:
        return self.settings.rows_per_source

    def current_generation(self) -> GenerationModel:
        newest = self.disk.newest_generation()
        assert newest is not None, "nothing runs before the first generation"
        return newest

    def clock_offset(self) -> int:
        """Clocks of different lives do not agree."""
        return self.world.between(-2_000, 2_000) if self.world.strikes("clock_jump") else 0

    def incarnations(self) -> list[Incarnation]:
        return [
            Incarnation(generation=one.generation, restored_epoch=one.restored_epoch, is_fresh=one.is_fresh)
            for one in self.disk.generations.values()
        ]

    def live_manifests(self) -> list[ManifestModel]:
        complete = {one.epoch: one for one in self.disk.complete()}
        live = live_epochs(((one.epoch, one.generation) for one in complete.values()), self.incarnations())
        now = self.disk.newest_generation()
        if now is not None:
            live = [e for e in live if is_of_history(complete[e].barriers, complete[e].lineage, now.lineage)]
        # An epoch of one operator comes after that operator's own epochs, and only its sinks publish it.
        for alone in sorted({complete[epoch].alone or "" for epoch in live}):
            lost = lost_behind(
                [(epoch, complete[epoch].previous_epoch) for epoch in live if (complete[epoch].alone or "") == alone],
                unreadable=(),
                pins=self.disk.pins,
                published=[
                    max(self.disk.published[name], max(sink.epochs, default=NO_EPOCH))
                    for name, sink in self.disk.sinks.items()
                    if alone in ("", self.graph.sinks[name])
                ],
            )
            if lost:
                raise Violation(f"epoch {lost[0][0]} cannot be used, because epoch {lost[0][1]} before it is lost")
        return [complete[epoch] for epoch in live]

    def newest_manifest(self, operator: OperatorId) -> ManifestModel | None:
        """The newest one that holds a snapshot of this operator."""
        return next((one for one in reversed(self.live_manifests()) if operator in one.batches), None)

    def gone_on(self, operator: OperatorId, current: GenerationModel, generation: Generation) -> Lineage:
        """The lineage of a log that goes on at its end."""
        old = current.lineage[operator]
        entries = self.disk.logs[operator].visible(old)
        end = entries[-1].seq + 1 if entries else old.spans[-1].start
        return old.fork(generation, Position(end))

    def open_epochs(self, operator: OperatorId) -> frozenset[Epoch]:
        incarnations = self.incarnations()
        return frozenset(
            epoch
            for epoch, (begun_in, terms) in self.disk.pending.items()
            if is_resumable(begun_in, incarnations) and terms.alone in (None, operator)
        )

    def completed_batch(self, operator: OperatorId) -> BatchId:
        newest = self.newest_manifest(operator)
        return newest.batches[operator] if newest else NO_BATCH

    def position_of(self, consumer: OperatorId, channel: OperatorId) -> Position:
        """How far a consumer has read, by its own log."""
        entries = self.disk.logs[consumer].visible(self.current_generation().lineage[consumer])
        return entries[-1].positions.get(channel, START) if entries else START

    def consumed(self, consumer: OperatorId, positions: Mapping[OperatorId, Position]) -> None:
        for channel, position in positions.items():
            producer = self.operators.get(channel)
            if producer is not None and producer.is_alive:
                producer.credits.consumed(consumer, position)
                producer.poke()

    def entry_appended(self, consumer: OperatorId, producer: OperatorProcess) -> None:
        reader = self.operators.get(consumer)
        if reader is not None and reader.is_alive:
            reader.look(producer.operator)

    def claims(self) -> set[Blob]:
        living = [one for one in (*self.operators.values(), *self._zombies) if one.is_alive]
        return {
            blob
            for one in living
            if isinstance(one, OperatorProcess)
            for blobs in one.claims.values()
            for blob in blobs
        }

    def discard(self, epoch: Epoch) -> None:
        """What an aborted epoch has left, of whichever operator."""
        manifest = self.disk.manifests.get(epoch)
        if manifest is None or manifest.is_aborted:
            for key in [key for key in self.disk.records if key[0] == epoch]:
                del self.disk.records[key]

    def check_read_by_all(self, channel: OperatorId, entry: Data) -> None:
        for consumer in self.graph.consumers[channel]:
            if entry.rows and self.position_of(consumer, channel) <= entry.seq:
                raise Violation(f"entry {entry.seq} of {channel} was deleted before {consumer} had read it")

    def coordinator_core(self, generation: Generation, now_ms: int) -> FlowCoordinator:
        numbers = EpochNumbers(max([self.disk.last_epoch, *(one for one in self.disk.manifests)]))
        if not self.settings.is_per_operator:
            return self._core(generation, now_ms, numbers, self.graph.operators, None)
        return PerOperatorCoordinator(
            {name: self._core(generation, now_ms, numbers, (name,), name) for name in self.graph.operators}, numbers
        )

    def _core(
        self,
        generation: Generation,
        now_ms: int,
        numbers: EpochNumbers,
        operators: tuple[OperatorId, ...],
        alone: OperatorId | None,
    ) -> Coordinator:
        live = [one for one in self.live_manifests() if one.alone == alone]
        newest = live[-1].epoch if live else NO_EPOCH
        trigger = self.settings.trigger
        if alone is not None:
            trigger = replace(trigger, interval_ms=self.settings.own_intervals_ms[alone])
        return Coordinator(
            topology=Topology(
                flow=FlowName("simulated"),
                subtasks={name: self.graph.subtasks[name] for name in operators},
                sources=frozenset(self.graph.sources if alone is None else operators),
                sinks={name: self.graph.sinks_of(name) for name in operators},
                alone=alone,
            ),
            generation=generation,
            generations={name: one.generation for name, one in self.current_generation().lineage.items()},
            settings=Settings(
                timeout_ms=self.settings.timeout_ms,
                operator_timeouts_ms=self.settings.operator_timeouts_ms,
                alignment_limit_ms=self.settings.alignment_limit_ms,
                retention=self.settings.retention,
                trigger=TriggerPolicy(trigger, first_ms=now_ms),
                tolerable_failures=self.settings.tolerable_failures,
                ask_again_ms=150,
                ask_again_limit=5,
                sink_retry_ms=20,
                sink_retry_limit_ms=300,
                sink_silence_ms=500,
            ),
            numbers=numbers,
            complete=[
                CompleteEpoch(
                    epoch=one.epoch,
                    generation=one.generation,
                    previous_epoch=one.previous_epoch,
                    batches=one.batches,
                    after_batches=one.after_batches,
                    completed_ms=min(one.completed_ms, now_ms),
                )
                for one in live
            ],
            published={
                name: min(max(self.disk.published[name], max(sink.epochs, default=NO_EPOCH)), newest)
                for name, sink in self.disk.sinks.items()
                if self.graph.sinks[name] in operators
            },
            pins=self.disk.pins & {one.epoch for one in live},
        )

    # ------------------------------------------------------------------ starting

    def _session(self) -> int:
        self._sessions += 1
        return self._sessions

    def begin(self) -> None:
        self.world.spawn(self._come_back(None), self)
        self.world.spawn(self._watch(), self)

    def _start_operator(self, operator: OperatorId) -> None:
        before = self.operators.get(operator)
        if before is not None and not before.is_zombie:
            before.is_alive = False
        process = OperatorProcess(self, operator, self._session())
        self.operators[operator] = process
        self.book[operator] = process
        process.start()

    def _start_coordinator(self) -> None:
        self.coordinator = CoordinatorProcess(self, self._session())
        self.book[COORDINATOR] = self.coordinator
        self.coordinator.start()

    def start_region(self, region: frozenset[OperatorId]) -> None:
        for operator in self.graph.operators:
            if operator in region:
                self._start_operator(operator)
        for operator in self.graph.operators:
            if operator not in region and self.operators[operator].is_alive:
                for channel in region.intersection(self.graph.inputs[operator]):
                    self.operators[operator].input_went_on(channel, self.current_generation().lineage[channel])
                self.operators[operator].consumers_went_back()
                self.operators[operator].poke()

    # ------------------------------------------------------------------ dying

    def operator_died(self, process: OperatorProcess) -> None:
        """Somebody starts it again, soon."""
        self.world.counts["operator_restarts"] += 1
        self._later(lambda: self._replace(process))

    def coordinator_died(self, process: CoordinatorProcess) -> None:
        self.world.counts["coordinator_restarts"] += 1
        self._later(lambda: self._start_coordinator() if self.coordinator is process else None)

    def _later(self, do: object) -> None:
        attempt = self._attempt

        def unless_void() -> None:
            if attempt == self._attempt:
                do()  # type: ignore[operator]

        self.world.after(self.world.between(5, 120), unless_void)

    def _replace(self, process: OperatorProcess) -> None:
        operator = process.operator
        if self.operators.get(operator) is not process or self._is_being_restored(operator):
            return
        current = self.current_generation()
        if not self.disk.spark[operator, current.spark_dirs[operator]].is_lost:
            self._start_operator(operator)
        elif self.coordinator is not None and self.coordinator.is_alive:
            self.coordinator.region_failed(operator)

    def _is_being_restored(self, operator: OperatorId) -> bool:
        return self.coordinator is not None and self.coordinator.is_alive and self.coordinator.is_restoring(operator)

    def _watch(self) -> Steps:
        """Whoever is dead and forgotten is started again."""
        while True:
            yield 150
            for process in list(self.operators.values()):
                if not process.is_alive and self.coordinator is not None:
                    self._later(lambda one=process: self._replace(one))

    def kill(self, operator: OperatorId, why: str) -> None:
        """For good: whoever kills it starts the next one."""
        process = self.operators[operator]
        if process.is_alive:
            process.is_alive = False
            self.world.tell(operator, "is stopped", why=why)

    def crash_operator(self, operator: OperatorId, *, leaves_zombie: bool) -> None:
        process = self.operators[operator]
        if not process.is_alive:
            return
        if leaves_zombie:
            self._turn_zombie(process)
            self.operator_died(process)
        else:
            process.die("killed")

    def crash_coordinator(self, *, leaves_zombie: bool) -> None:
        process = self.coordinator
        if process is None or not process.is_alive:
            return
        if leaves_zombie:
            self._turn_zombie(process)
            self.coordinator_died(process)
        else:
            process.die("killed")

    def _turn_zombie(self, process: OperatorProcess | CoordinatorProcess) -> None:
        """It is thought dead and goes on for a while."""
        process.is_zombie = True
        self._zombies = [one for one in self._zombies if one.is_alive] + [process]

        def end() -> None:
            process.is_alive = False

        self.world.tell("zombie", "goes on", who=getattr(process, "operator", COORDINATOR))
        self.world.after(self.world.between(100, 1_500), end)

    # ------------------------------------------------------------------ all at once

    def _processes(self) -> list[OperatorProcess | CoordinatorProcess]:
        return [*self.operators.values(), *([self.coordinator] if self.coordinator else [])]

    def restart_all(self, why: str, *, target: Epoch | None = None, leaves_zombies: bool = False) -> None:
        """The whole process dies and comes back, to where it was or to the epoch that a person names."""
        self.world.tell("flow", "dies", why=why)
        self._attempt += 1
        for process in self._processes():
            if process.is_alive and leaves_zombies:
                self._turn_zombie(process)
            else:
                process.is_alive = False
        self.coordinator = None
        self.book = {}
        self.is_paused = False
        self.world.spawn(self._come_back(target), self)

    def power_cut(self) -> None:
        for process in (*self._processes(), *self._zombies):
            process.is_alive = False
        chances = iter(lambda: self.world.rng.random() < 0.5, None)
        lost = sum(self.disk.logs[name].lose_unsynced(chances) for name in self.graph.operators)
        self.restart_all(f"power cut, {lost} entries lost")

    def _come_back(self, target: Epoch | None) -> Steps:
        """As ``cutline.recovery.start`` does it: prepare everything, then create the generation record."""
        attempt = self._attempt
        yield self.world.between(5, 60)
        if attempt != self._attempt:
            return
        generation = self.disk.next_generation()
        live = self.live_manifests()
        current = self.disk.newest_generation()
        chosen = [one for one in live if target is None or one.epoch <= target]
        is_per_operator = self.settings.is_per_operator
        if current is None or (not live and self._is_damaged(current) and not is_per_operator):
            record = self._fresh(generation)
        elif target is None and (is_per_operator or not self._is_damaged(current)):
            record = self._resumed(generation, current)
        else:
            record = self._restored(generation, chosen[-1]) if chosen else self._resumed(generation, current)
        yield self.world.between(1, 10)
        if attempt != self._attempt or self.disk.generation != generation:
            return
        if self.world.strikes("recovery_killed"):
            self.restart_all("killed before its generation was recorded", target=target)
            return
        self.disk.generations[generation] = record
        self.world.tell("flow", "comes back", generation=generation, restored_to=record.restored_epoch)
        self.world.counts["restores" if record.restored_epoch is not None else "resumes"] += 1
        if self.world.strikes("recovery_killed"):
            self.restart_all("killed right after its generation was recorded")
            return
        self._settle_sinks()
        for name in self.graph.operators:
            self.disk.logs[name].sweep(record.lineage[name])
        self._start_coordinator()
        for operator in self.graph.operators:
            self._start_operator(operator)

    def _is_damaged(self, current: GenerationModel) -> bool:
        return any(self._is_lost(name, current) for name in self.graph.operators)

    def _is_lost(self, operator: OperatorId, current: GenerationModel) -> bool:
        return self.disk.spark[operator, current.spark_dirs[operator]].is_lost

    def _fresh(self, generation: Generation) -> GenerationModel:
        if self.disk.complete() and self.live_manifests():
            raise Violation("a flow that has checkpoints begins from nothing")
        for name in self.graph.operators:
            self.disk.spark[name, generation] = SparkDir()
        return GenerationModel(
            generation=generation,
            restored_epoch=None,
            is_fresh=True,
            lineage={name: Lineage.begin(generation) for name in self.graph.operators},
            spark_dirs=dict.fromkeys(self.graph.operators, generation),
        )

    def _resumed(self, generation: Generation, current: GenerationModel) -> GenerationModel:
        """All go on; in per-operator mode, one whose directory is lost goes back alone and catches up with its log."""
        lost = [name for name in self.graph.operators if self._is_lost(name, current)]
        for name in lost:
            self.restore_dir(self.newest_manifest(name), name, generation)
            self.world.counts["alone"] += 1
        return GenerationModel(
            generation=generation,
            restored_epoch=None,
            is_fresh=False,
            lineage={name: self.gone_on(name, current, generation) for name in self.graph.operators},
            spark_dirs={**current.spark_dirs, **dict.fromkeys(lost, generation)},
        )

    def _restored(self, generation: Generation, manifest: ManifestModel) -> GenerationModel:
        self.disk.check_reachable(manifest)
        for operator in self.graph.operators:
            self.restore_dir(manifest, operator, generation)
        return GenerationModel(
            generation=generation,
            restored_epoch=manifest.epoch,
            is_fresh=False,
            lineage={
                name: manifest.lineage[name].fork(generation, Position(manifest.barriers[name] + 1))
                for name in self.graph.operators
            },
            spark_dirs=dict.fromkeys(self.graph.operators, generation),
        )

    def restore_dir(self, manifest: ManifestModel | None, operator: OperatorId, generation: Generation) -> None:
        if manifest is None:
            self.disk.spark[operator, generation] = SparkDir()
            return
        record = self.disk.record_of(manifest, operator)
        if record is None or any(blob not in self.disk.blobs for blob in record.blobs):
            raise Violation(f"epoch {manifest.epoch} cannot be restored: content of {operator} is gone")
        counts: Counts = record.counts()
        spark = SparkDir()
        if record.batch != NO_BATCH:
            spark.planned[record.batch] = (record.positions, 0)
            spark.committed = record.batch
            spark.states = {record.batch: counts}
        self.disk.spark[operator, generation] = spark

    def _settle_sinks(self) -> None:
        """Undo what sinks published of a history that was given up, be it that the life that gave it up was killed."""
        went_back = [g for g, one in self.disk.generations.items() if one.is_fresh or one.restored_epoch is not None]
        for name, sink in self.disk.sinks.items():
            manifest = self.newest_manifest(self.graph.sinks[name])
            newest = manifest.epoch if manifest else NO_EPOCH
            if max(went_back, default=0) > self.disk.settled:
                # What was given out after it is never used again: none of it will ever be published rightly.
                sink.rewind(newest, self.disk.last_epoch)
            self.disk.published[name] = min(self.disk.published[name], newest)
        self.disk.settled = self.disk.generation
