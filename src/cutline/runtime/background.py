"""The services beside a running flow: they release old checkpoints and upload new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from cutline.base.logs import get_logger
from cutline.base.outages import Outages
from cutline.config.options import Options
from cutline.coordinator.factory import cadence_of, on_ladder
from cutline.coordinator.loop import CoordinatorService
from cutline.coordinator.retention import Janitor
from cutline.errors import InvariantViolation
from cutline.model.checkpoint import Manifest
from cutline.model.ids import Epoch, Generation
from cutline.model.remote import SinkProgress
from cutline.protocol.history.retention import EpochNeeds
from cutline.recovery.retired_operators import collect_left_logs
from cutline.recovery.start import Recovered
from cutline.runtime.lifecycle import FailureSink
from cutline.runtime.parts import Background, Definition, Stores
from cutline.savepoints.store import Savepoints
from cutline.storage.detached import DetachedLogs
from cutline.storage.restore_requests import requested_epochs
from cutline.tiers.replicator import LocalCheckpoints, RemotePolicy, Replicator
from cutline.worker.log_replay import needs_behind_log

log = get_logger(__name__)


class CoordinatorFigures:
    """What the replicator needs from the coordinator, which is built later and then registers."""

    def __init__(self, what: Definition, stores: Stores) -> None:
        self._what = what
        self._stores = stores
        self._coordinator: CoordinatorService | None = None

    def register(self, coordinator: CoordinatorService) -> None:
        self._coordinator = coordinator

    def generation(self) -> Generation:
        return self._registered().generation()

    def published(self) -> SinkProgress:
        everywhere = self._registered().published_everywhere(self._what.sinks)
        return SinkProgress(everywhere=everywhere, seen=self._stores.metadata.seen())

    def pins(self) -> frozenset[Epoch]:
        """What this host keeps on its ladder stays in the remote tier too."""
        retained = self._registered().retained() if self._what.options.retain else frozenset()
        return self._stores.metadata.pins() | retained

    def on_ladder(self, load_all: Callable[[], Iterable[Manifest]]) -> set[Epoch]:
        return on_ladder(self._what.options, load_all, self._stores.generations.load_all())

    def check_fence(self) -> None:
        self._stores.metadata.check_fence()

    def _registered(self) -> CoordinatorService:
        if self._coordinator is None:
            raise InvariantViolation("the replicator runs before the coordinator is registered")
        return self._coordinator


def saved_epochs(options: Options, savepoints: Savepoints, replicator: Replicator | None) -> set[Epoch] | None:
    """Checkpoints elsewhere that the flow may be restored to; None: not known now, so sinks forget nothing."""
    there = frozenset[Epoch]() if replicator is None or not options.retain else replicator.on_ladder
    if there is None:
        return None
    try:
        return {*savepoints.epochs(), *there}
    except OSError as error:
        log.warning("savepoints_not_read", reason=str(error))
        return None


def build_background(
    what: Definition,
    stores: Stores,
    recovered: Recovered,
    figures: CoordinatorFigures,
    *,
    failures: FailureSink,
    outages: Outages,
) -> Background:
    janitor = build_janitor(what, stores)
    replicator = build_replicator(
        what, stores, recovered, janitor=janitor, figures=figures, failures=failures, outages=outages
    )
    live_needs = partial(_needs_of_lagging_operators, what, stores, recovered)
    return Background(janitor=janitor, replicator=replicator, live_needs=live_needs)


def build_janitor(what: Definition, stores: Stores) -> Janitor:
    return Janitor(
        detached=DetachedLogs(what.layout),
        checkpoints=stores.checkpoints,
        check_fence=stores.metadata.check_fence,
        collect_left_logs=partial(collect_left_logs, what.layout, stores.checkpoints, what.graph.names),
        requested=partial(requested_epochs, what.layout),
    )


def _needs_of_lagging_operators(what: Definition, stores: Stores, recovered: Recovered) -> list[EpochNeeds]:
    """``recovered`` holds the present directories and logs, including those of operators restored alone."""
    if not what.options.is_per_operator:
        return []  # no operator is ever behind the newest checkpoint
    committed = {
        name: stores.query_dirs.last_committed(what.layout.spark_checkpoint_dir(name, spark_dir))
        for name, spark_dir in recovered.spark_dirs.items()
    }
    needs = (needs_behind_log(recovered.channels[name], batch) for name, batch in committed.items())
    return [one for one in needs if one is not None]


def build_replicator(
    what: Definition,
    stores: Stores,
    recovered: Recovered,
    *,
    janitor: Janitor,
    figures: CoordinatorFigures,
    failures: FailureSink,
    outages: Outages,
) -> Replicator | None:
    if stores.remote is None:
        return None
    return Replicator(
        flow=what.graph.flow,
        tier=stores.remote,
        local=LocalCheckpoints(store=stores.checkpoints, hold=janitor.hold, end_hold=janitor.end_hold),
        facts=figures,
        entered=recovered.record,
        policy=RemotePolicy(
            cadence=cadence_of(what.graph, what.options),
            retain=what.options.retain_checkpoints,
            grace_ms=what.options.remote_grace_ms,
        ),
        on_fatal=failures.fatal,
        outages=outages,
    )
