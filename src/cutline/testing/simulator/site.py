"""Everything around a flow that outlives its hosts: the sinks' targets and the bucket; and which host runs the flow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutline.model.ids import Epoch, SinkId
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
        #: A copy of the flow's folder, and how far sinks had been rewound when it was made.
        self._backup: tuple[Disk, dict[SinkId, Epoch]] | None = None
        self._tokens = 0
        self._hosts = 0
        self.flow: SimulatedFlow = self._new_host()

    def new_token(self, host: str) -> str:
        self._tokens += 1
        return f"{host}-{self._tokens}"

    def _new_host(self) -> SimulatedFlow:
        from cutline.testing.simulator.processes.flow import SimulatedFlow

        self._hosts += 1
        return SimulatedFlow(self, Disk(self.graph, f"host{self._hosts}"))

    # ------------------------------------------------------------------ backups

    def back_up(self) -> None:
        """A flow with a remote tier is restored from there; per-operator mode does not survive sinks that are ahead.

        A copy without any checkpoint is as good as none: a start from it refuses to empty the sinks.
        """
        if self.bucket is None and not self.settings.is_per_operator and self.flow.live():
            self._backup = (self.flow.disk.snapshot(), self._rewound())
            self.world.tell("person", "makes a backup")

    def restore_backup(self) -> bool:
        """False: there is none that can be used. What a sink has rewound since then it cannot publish again."""
        if self._backup is None or self._backup[1] != self._rewound():
            return False
        self.flow.restore_backup(self._backup[0])
        return True

    def _rewound(self) -> dict[SinkId, Epoch]:
        return {name: target.ledger.rewound for name, target in self.sinks.items()}

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
            target.claim(token)
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
