"""Everything around a flow that outlives its hosts: the sinks' targets and the bucket; and which host runs the flow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutline.model.history import Identity
from cutline.model.ids import SinkId
from cutline.protocol.history.histories import history_in, identities_of, takeovers_in
from cutline.protocol.history.remote_claims import generation_to_take
from cutline.testing.simulator.graphs import Graph
from cutline.testing.simulator.settings import FlowSettings
from cutline.testing.simulator.storage.bucket import Bucket
from cutline.testing.simulator.storage.disk import Disk
from cutline.testing.simulator.storage.sinks import SinkTarget
from cutline.testing.simulator.world import World

if TYPE_CHECKING:
    from cutline.testing.simulator.processes.flow import SimulatedFlow


class Site:
    """Hosts, each with a disk of its own; one bucket; the same sinks for all."""

    def __init__(self, world: World, graph: Graph, settings: FlowSettings) -> None:
        self.world = world
        self.graph = graph
        self.settings = settings
        self.sinks: dict[SinkId, SinkTarget] = {
            sink: SinkTarget(sink, operator, is_immediate=sink in settings.immediate)
            for sink, operator in graph.sinks.items()
        }
        self.bucket = Bucket() if settings.has_remote else None
        #: Why a start refused to go on, for good.
        self.refusal = ""
        #: A copy of the flow's folder, and one of the bucket.
        self._backup: Disk | None = None
        self._bucket_backup: Bucket | None = None
        #: Disks on which the flow ran once, or copies of one: each may be started again.
        self._former: list[Disk] = []
        self._flows: list[SimulatedFlow] = []
        self._tokens = 0
        self._identities = 0
        self._hosts = 0
        self.flow: SimulatedFlow = self._new_host()

    def new_token(self, host: str) -> str:
        self._tokens += 1
        return f"{host}-{self._tokens}"

    def new_identity(self) -> Identity:
        self._identities += 1
        return f"{self._identities:032x}"

    def _new_host(self) -> SimulatedFlow:
        return self._host_of(self.new_disk())

    def new_disk(self) -> Disk:
        self._hosts += 1
        return Disk(self.graph, f"host{self._hosts}")

    def _host_of(self, disk: Disk) -> SimulatedFlow:
        """A host runs the flow once at most: its lock sees to that."""
        from cutline.testing.simulator.processes.flow import SimulatedFlow

        for one in self._flows:
            if one.disk is disk:
                one.end("it is stopped, to be started anew")
        self._flows = [one for one in self._flows if one.is_alive]
        flow = SimulatedFlow(self, disk)
        self._flows.append(flow)
        return flow

    # ------------------------------------------------------------------ backups

    def back_up(self) -> None:
        """A copy without any checkpoint is as good as none: a start from it refuses to empty the sinks."""
        if self.flow.live():
            self._backup = self.flow.disk.snapshot()
            self.world.tell("person", "makes a backup")
        if self.bucket is not None:
            self._bucket_backup = self.bucket.snapshot()

    def restore_backup(self) -> bool:
        """The flow's folder is lost, and a copy takes its place. False: there is none, or it is of no use."""
        # In per-operator mode no checkpoint can be restored on request: the newest storage is needed.
        if self._backup is None or self.settings.is_per_operator:
            return False
        self.flow.restore_backup(self._backup)
        return True

    def restore_bucket(self) -> bool:
        """The bucket is lost, and a copy takes its place while the flow does not run."""
        if self.bucket is None or self._bucket_backup is None or self.bucket.is_away:
            return False
        self.bucket.become(self._bucket_backup)
        self.flow.restart_all("its bucket is restored from a backup")
        return True

    # ------------------------------------------------------------------ hosts that return

    def copy_host(self) -> None:
        """A person copies the flow's folder to another host; perhaps it is started there one day."""
        if self.flow.live():
            copy = self.flow.disk.snapshot()
            self._hosts += 1
            copy.name = f"copy{self._hosts}"
            self._former.append(copy)
            self.world.tell("person", "copies the folder", to=copy.name)

    def return_host(self) -> bool:
        """A host that ran the flow once, or has a copy, is started again; the present one stops, or does not know."""
        if not self._former:
            return False
        disk = self._former.pop(self.world.rng.randrange(len(self._former)))
        before = self.flow
        before.is_replaced = True
        self.world.tell("site", "sees a host return", host=disk.name, instead_of=before.disk.name)
        if self.world.rng.random() < 0.5:
            self.world.after(self.world.between(50, 1_500), lambda: before.end("it is switched off"))
        else:
            before.end("a person stops it")
        self._former.append(before.disk)
        self.flow = self._host_of(disk)
        self.flow.begin()
        return True

    def start_elsewhere(self, refused: SimulatedFlow) -> bool:
        """A person starts the flow from the storage that ran it last, as the refusal says. False: it is gone."""
        newest = self._newest_storage()
        if newest is None:
            return False
        refused.end("it was refused")
        self._former.remove(newest)
        self._former.append(refused.disk)
        self.world.tell("person", "starts the flow where it ran last", host=newest.name)
        self.flow = self._host_of(newest)
        self.flow.begin()
        return True

    def _newest_storage(self) -> Disk | None:
        """The one that knows the newest takeover of every sink, as far as any does."""
        wanted = [takeovers[-1].identity for one in self.sinks.values() if (takeovers := takeovers_in(one.claimed()))]

        def known(disk: Disk) -> tuple[int, int]:
            identities = identities_of(disk.generations.values())
            return sum(one in identities for one in wanted), disk.last_epoch

        able = [disk for disk in self._former if wanted and known(disk)[0] == len(wanted)]
        return max(able, key=known) if able else None

    # ------------------------------------------------------------------ faults

    def lose_host(self, *, leaves_zombie: bool) -> bool:
        """The host is lost, or thought lost; another one takes over from the remote tier. False: nothing is there."""
        if self.bucket is None or not self._can_take_over(self.bucket):
            return False
        lost, self.flow = self.flow, self._new_host()
        lost.is_replaced = True
        self.world.tell("site", "loses a host", host=lost.disk.name, leaves_zombie=leaves_zombie)
        if leaves_zombie:
            self.world.after(self.world.between(300, 2_500), lambda: lost.end("it is switched off"))
        else:
            lost.end("its host is lost")
        if leaves_zombie or self.world.rng.random() < 0.5:
            self._former.append(lost.disk)  # it was only out of reach
        self.flow.begin()
        return True

    def _can_take_over(self, bucket: Bucket) -> bool:
        """Without a checkpoint of the present history in the bucket, a start refuses: sinks would be emptied.

        That is so before the first upload, and known to be so between a restore to an epoch that the bucket has
        dropped and the next upload.
        """
        return bucket.has_checkpoint_of(self.flow.disk.generations.values())

    def lose_claims(self) -> bool:
        """A second start of the flow claims the sinks and what follows in the remote tier, and then is gone."""
        token = self.new_token("rival")
        for target in self.sinks.values():
            # From the same storage: it has seen the same history.
            before = target.claimed()
            target.claim(token, history_in(before), expected=before)
        if self.bucket is not None and not self.bucket.is_away and self.world.rng.random() < 0.5:
            self.bucket.create_claim(generation_to_take(self.bucket.newest_generation()), token)
        self.world.tell("site", "sees a second start", token=token)
        return True

    def sink_leaves(self) -> bool:
        """One sink takes no commits for a while; checkpoints go on, and what it has yet to publish adds up."""
        target = self.world.rng.choice(list(self.sinks.values()))
        if target.is_away:
            return False
        target.is_away = True

        def back() -> None:
            target.is_away = False

        self.world.tell(target.sink, "is away")
        self.world.after(self.world.between(100, 1_500), back)
        return True

    def remote_leaves(self) -> bool:
        """The bucket is away for a while."""
        bucket = self.bucket
        if bucket is None or bucket.is_away:
            return False
        bucket.is_away = True

        def back() -> None:
            bucket.is_away = False

        self.world.tell("bucket", "is away")
        self.world.after(self.world.between(30, 1_200), back)
        return True
