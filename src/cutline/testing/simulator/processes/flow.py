"""A flow on one host: which of its processes live, and which are started again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cutline.model.generation import GenerationRecord
from cutline.model.history import Identity
from cutline.model.ids import NO_BATCH, NO_EPOCH, START, BatchId, Epoch, Generation, OperatorId, Position, SinkId
from cutline.protocol.history.epochs import GenerationStart, is_resumable, lost_behind
from cutline.protocol.history.known_checkpoints import generation_starts_of, of_present_history
from cutline.protocol.history.lineage import Lineage, lineage_of
from cutline.protocol.recovery.plan import Refusal
from cutline.testing.simulator.network import Book, Network
from cutline.testing.simulator.processes.collector import Collector
from cutline.testing.simulator.processes.coordinator import CoordinatorProcess
from cutline.testing.simulator.processes.operator import OperatorProcess
from cutline.testing.simulator.processes.recovery import Start
from cutline.testing.simulator.processes.uploader import Uploader
from cutline.testing.simulator.site import Site
from cutline.testing.simulator.storage.checkpoints import Blob, Checkpoint
from cutline.testing.simulator.storage.disk import Disk
from cutline.testing.simulator.world import COORDINATOR, Steps, Violation


class SimulatedFlow:
    """Starts processes, starts them again, and knows the disk they share."""

    def __init__(self, site: Site, disk: Disk) -> None:
        self.site = site
        self.world = site.world
        self.graph = site.graph
        self.settings = site.settings
        self.sinks = site.sinks
        self.disk = disk
        self.network = Network(site.world)
        self.book: Book = {}
        self.is_alive = True
        #: Another host has taken over: when its processes learn of it, nothing starts them again.
        self.is_replaced = False
        self.is_paused = False
        #: The claim of the present process; another one with every start.
        self.token = ""
        self.coordinator: CoordinatorProcess | None = None
        self.operators: dict[OperatorId, OperatorProcess] = {}
        self.uploader: Uploader | None = None
        self._sessions = 0
        #: Grows with each start of the whole flow; whatever was planned for an earlier one is void.
        self.attempt = 0
        self._zombies: list[OperatorProcess | CoordinatorProcess] = []
        #: Generations that a start has found in the bucket and was not refused for.
        self.known_there: frozenset[Identity] = frozenset()
        #: The highest epoch that anything had seen when the flow was started.
        self.highest_seen = NO_EPOCH
        self._lineages: tuple[GenerationRecord, dict[OperatorId, Lineage]] | None = None

    # ------------------------------------------------------------------ what processes ask

    def current_generation(self) -> GenerationRecord:
        newest = self.disk.newest_generation()
        assert newest is not None, "nothing runs before the first generation"
        return newest

    def lineage(self, operator: OperatorId) -> Lineage:
        current = self.current_generation()
        if self._lineages is None or self._lineages[0] is not current:
            self._lineages = (current, {name: lineage_of(spans) for name, spans in current.lineage.items()})
        return self._lineages[1][operator]

    def generation(self) -> Generation:
        return self.coordinator.generation if self.coordinator is not None else self.disk.generation

    def last_epoch(self) -> Epoch:
        return max(self.disk.last_epoch, self.highest_seen)

    def clock_offset(self) -> int:
        """Clocks of different processes do not agree."""
        return self.world.between(-2_000, 2_000) if self.world.strikes("clock_jump") else 0

    def generation_starts(self) -> list[GenerationStart]:
        return generation_starts_of(self.disk.generations[one] for one in sorted(self.disk.generations))

    def live(self) -> list[Checkpoint]:
        """The complete checkpoints of the present history, ascending."""
        complete = {one.manifest.epoch: one for one in self.disk.complete()}
        generations = [self.disk.generations[one] for one in sorted(self.disk.generations)]
        live = of_present_history((one.manifest for one in complete.values()), generations)
        # An epoch of one operator comes after that operator's own epochs, and only its sinks publish it.
        names = self.graph.operators
        groups = [{name} for name in names] if self.settings.is_per_operator else [set(names)]
        for group in groups:
            lost = lost_behind(
                [(one.epoch, one.previous_epoch) for one in live if not group.isdisjoint(one.operators)],
                unreadable=(),
                pins=self.disk.pins,
                published=[self.published(target.sink) for target in self.sinks.values() if target.operator in group],
            )
            if lost:
                raise Violation(f"epoch {lost[0][0]} cannot be used, because epoch {lost[0][1]} before it is lost")
        return [complete[one.epoch] for one in live]

    def published(self, sink: SinkId) -> Epoch:
        target = self.sinks[sink]
        own = NO_EPOCH if target.is_immediate else target.ledger.published
        return max(own, self.disk.published.get(target.sink, NO_EPOCH))

    def published_everywhere(self) -> Epoch:
        """The newest epoch that every sink has published, as the coordinator knows it."""
        if self.coordinator is None or not self.sinks:
            return NO_EPOCH
        return min(self.coordinator.core.published(sink) for sink in self.sinks)

    def newest_checkpoint(self, operator: OperatorId) -> Checkpoint | None:
        """The newest one that holds a snapshot of this operator."""
        return next((one for one in reversed(self.live()) if operator in one.manifest.operators), None)

    def newest_epoch(self, operator: OperatorId) -> Epoch:
        newest = self.newest_checkpoint(operator)
        return newest.manifest.epoch if newest else NO_EPOCH

    def completed_batch(self, operator: OperatorId) -> BatchId:
        newest = self.newest_checkpoint(operator)
        return newest.manifest.operators[operator].batch if newest else NO_BATCH

    def open_epochs(self, operator: OperatorId) -> frozenset[Epoch]:
        generation_starts = self.generation_starts()
        return frozenset(
            epoch
            for epoch, (begun_in, terms) in self.disk.pending.items()
            if is_resumable(begun_in, generation_starts) and terms.alone in (None, operator)
        )

    def position_of(self, consumer: OperatorId, channel: OperatorId) -> Position:
        """How far a consumer has read, by its own log."""
        return self.disk.logs[consumer].view(self.lineage(consumer)).positions.get(channel, START)

    def consumed(self, consumer: OperatorId, positions: Mapping[OperatorId, Position]) -> None:
        for channel, position in positions.items():
            producer = self.operators.get(channel)
            if producer is not None and producer.is_alive:
                producer.credits.consumed(consumer, position)
                producer.query.poke()

    def entry_appended(self, consumer: OperatorId, channel: OperatorId) -> None:
        """Every process that reads the channel as this consumer looks there, one that is thought dead too."""
        readers = [self.operators.get(consumer), *self._zombies_of(consumer)]
        for reader in dict.fromkeys(readers):
            if reader is not None and reader.is_alive:
                reader.look(channel)

    def _zombies_of(self, operator: OperatorId) -> list[OperatorProcess]:
        return [one for one in self._zombies if isinstance(one, OperatorProcess) and one.operator == operator]

    def references(self) -> set[Blob]:
        """Content that snapshots under way refer to."""
        living = [one for one in (*self.operators.values(), *self._zombies) if one.is_alive]
        return {
            blob
            for one in living
            if isinstance(one, OperatorProcess)
            for blobs in one.snapshots.references.values()
            for blob in blobs
        }

    def discard(self, epoch: Epoch) -> None:
        """What an aborted epoch has left, of whichever operator."""
        if self.disk.checkpoint(epoch) is None:
            for key in [key for key in self.disk.records if key[0] == epoch]:
                self.disk.remove_record(key)

    def collector(self) -> Collector | None:
        return self.coordinator.collector if self.coordinator is not None and self.coordinator.is_alive else None

    # ------------------------------------------------------------------ starting

    def _session(self) -> int:
        self._sessions += 1
        return self._sessions

    def begin(self) -> None:
        self._start(None)
        self.world.spawn(self._watch(), self)

    def _start(self, target: Epoch | str | None) -> None:
        self.token = self.site.new_token(self.disk.name)
        self.world.spawn(Start(self, target).run(), self)

    def start_processes(self, entered: GenerationRecord) -> None:
        """The flow has returned: everything runs."""
        if self.site.bucket is not None:
            self.uploader = Uploader(self, self.site.bucket, entered)
            self.uploader.start()
        self._start_coordinator()
        for operator in self.graph.operators:
            self._start_operator(operator)

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
        """The next checkpoint may begin before the new processes do, while an old one still talks."""
        for operator in self.graph.operators:
            process = self.operators[operator]
            if operator in region:
                self._later(lambda one=process: self._replace(one))  # type: ignore[misc]
            elif process.is_alive:
                for channel in region.intersection(self.graph.inputs[operator]):
                    process.input_went_on(channel, self.lineage(channel))
                process.consumers_went_back()
                process.query.poke()

    # ------------------------------------------------------------------ dying

    def operator_died(self, process: OperatorProcess) -> None:
        """It is started again, soon."""
        self.world.counts["operator_restarts"] += 1
        self._later(lambda: self._replace(process))

    def coordinator_died(self, process: CoordinatorProcess) -> None:
        self.world.counts["coordinator_restarts"] += 1
        self._later(lambda: self._start_coordinator() if self.coordinator is process else None)

    def _later(self, do: Callable[[], None]) -> None:
        attempt = self.attempt

        def unless_void() -> None:
            if attempt == self.attempt:
                do()

        self.world.after(self.world.between(5, 120), unless_void, self)

    def _replace(self, process: OperatorProcess) -> None:
        operator = process.operator
        if self.operators.get(operator) is not process or self._is_being_restored(operator):
            return
        current = self.current_generation()
        if not self.disk.spark[operator, current.spark_dirs[operator]].is_lost:
            self._start_operator(operator)
        elif self.coordinator is not None and self.coordinator.is_alive:
            self.coordinator.regions.failed(operator)

    def _is_being_restored(self, operator: OperatorId) -> bool:
        coordinator = self.coordinator
        return coordinator is not None and coordinator.is_alive and coordinator.regions.is_restoring(operator)

    def _watch(self) -> Steps:
        """Whatever is dead and was not replaced is started again."""
        while True:
            yield 150
            for process in list(self.operators.values()):
                if not process.is_alive and self.coordinator is not None:
                    self._later(lambda one=process: self._replace(one))  # type: ignore[misc]

    def kill(self, operator: OperatorId, why: str) -> None:
        """The caller starts the next one. A process that is thought dead goes on, but its sinks are closed."""
        for zombie in self._zombies_of(operator):
            zombie.publishing.close()
        process = self.operators[operator]
        if process.is_alive and not process.is_zombie:
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

    def restart_all(self, why: str, *, target: Epoch | str | None = None, leaves_zombies: bool = False) -> None:
        """The whole process dies and is started again, perhaps with a request to restore."""
        self.world.tell("flow", "dies", host=self.disk.name, why=why)
        self.attempt += 1
        for process in self._processes():
            if process.is_alive and leaves_zombies:
                self._turn_zombie(process)
            else:
                process.is_alive = False
        if self.uploader is not None:
            self.uploader.is_alive = False
        self.coordinator = self.uploader = None
        self.book = {}
        self.is_paused = False
        self._start(target)

    def fenced(self, why: str) -> None:
        """A process of the flow has found that another one has claimed what it writes to."""
        if self.is_replaced:
            self.end(why)
        else:
            self.world.counts["fenced"] += 1
            self.restart_all(f"fenced: {why}")

    def refused(self, refusal: Refusal, target: Epoch | str | None) -> None:
        """A start refuses to go on: only a person can help."""
        self.world.tell("flow", "refuses to start", why=refusal.what)
        if refusal.kind == "other_history":
            if not self._is_helped(refusal):
                # The newest storage is lost, and the sinks share no checkpoint that this one still has.
                self.site.refusal = refusal.what
                self.world.counts["refusals"] += 1
            return
        if isinstance(target, int) and target in self.disk.only_records:
            # Its content was collected in the remote tier; nothing has been changed.
            self.world.counts["requests_refused"] += 1
            self.restart_all("a person starts it without the request")
            return
        raise Violation(f"the flow refuses to start: {refusal.what}")

    def _is_helped(self, refusal: Refusal) -> bool:
        """A person takes one of the ways out that the refusal names."""
        if not refusal.has_run:
            self.world.counts["downloaded_again"] += 1
            self._begin_anew("what it had downloaded is out of date")
            return True
        self.world.counts["other_histories"] += 1
        ways = self.world.rng.sample(["there", "rejoin", "restore"], 3)
        for way in ways:
            if way == "there" and self.site.start_elsewhere(self):
                self.world.counts["started_elsewhere"] += 1
                return True
            if way == "rejoin" and refusal.can_rejoin:
                self.world.counts["rejoined"] += 1
                self._begin_anew("a person has it rejoin")
                return True
            if way == "restore" and refusal.restorable is not None:
                self.world.counts["restored_on_refusal"] += 1
                self.restart_all("a person gives up the other history", target=refusal.restorable)
                return True
        return False

    def _begin_anew(self, why: str) -> None:
        """As a host without any state but its savepoints."""
        kept, self.disk = self.disk, self.site.new_disk()
        self.disk.savepoints = kept.savepoints
        self.restart_all(why)

    def end(self, why: str) -> None:
        """For good: another host runs the flow."""
        if self.is_alive:
            self.world.tell("flow", "ends", host=self.disk.name, why=why)
        self.is_alive = False
        self.attempt += 1
        for process in (*self._processes(), *self._zombies):
            process.is_alive = False
        if self.uploader is not None:
            self.uploader.is_alive = False

    def restore_backup(self, backup: Disk) -> None:
        """A person replaces the flow's folder by a copy of it that was made earlier."""
        for process in (*self._processes(), *self._zombies):
            process.is_alive = False
        self.disk = backup.snapshot()
        self.restart_all("its folder is restored from a backup")

    def power_cut(self) -> None:
        for process in (*self._processes(), *self._zombies):
            process.is_alive = False
        lost = self.disk.lose_power(self.world.rng)
        if self.settings.are_sinks_local:
            for target in self.sinks.values():
                target.lose_power(self.world.rng)
        self.restart_all(f"power cut, {lost} files lost")
