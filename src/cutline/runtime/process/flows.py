"""The flows of one process: each starts, runs and fails by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cutline.base.logs import get_logger
from cutline.errors import FlowFailedError
from cutline.model.ids import FlowName
from cutline.model.status import FlowStatus
from cutline.runtime.handle import RunningFlow

log = get_logger(__name__)

#: The flow is not there yet, or never was.
STARTING, FAILED = "starting", "failed"


@dataclass(slots=True)
class _Member:
    run: RunningFlow | None = None
    #: Why it could not be started, or has ended.
    error: BaseException | None = None
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowHealth:
    """What ``/healthz`` says of a flow."""

    state: str
    healthy: bool
    reason: str


class Flows(Collector):
    """Starts flows one after the other and watches them; what ends one of them leaves the others alone.

    It is a collector of Prometheus: the metrics of all its flows, each family once.
    """

    def __init__(self, names: list[FlowName]) -> None:
        self._members = {name: _Member() for name in names}

    @classmethod
    def of(cls, *runs: RunningFlow) -> Flows:
        """Flows that run already."""
        flows = cls([run.name for run in runs])
        for run in runs:
            flows.start(run.name, lambda run=run: run)  # type: ignore[misc]
        return flows

    def start(self, name: FlowName, launch: Callable[[], RunningFlow]) -> None:
        """Start a flow. Of several, one that cannot start does not keep the others from it: see ``failures``."""
        member = self._members[name]
        try:
            member.run = launch()
        except Exception as error:  # also what a function of the user raises while it is planned
            if len(self._members) == 1:
                raise
            member.error, member.is_over = error, True
            log.error("flow_not_started", flow=name, error=str(error))

    @property
    def running(self) -> dict[FlowName, RunningFlow]:
        """The flows that were started, also those that have ended since."""
        return {name: member.run for name, member in self._members.items() if member.run is not None}

    def are_over(self) -> bool:
        """Whether no flow runs anymore."""
        for member in self._members.values():
            if member.run is None or member.is_over:
                continue
            try:
                member.is_over = member.run.await_termination(0)
            except Exception as error:  # noqa: BLE001 (whatever ended the flow is kept for the end of the process)
                member.error, member.is_over = error, True
        return all(member.is_over for member in self._members.values())

    def process_all(self) -> Callable[[], bool]:
        """Let every flow process its present input and publish it; returns what tells whether all are done."""
        done: list[Future[None]] = []

        def process(member: _Member, run: RunningFlow, one: Future[None]) -> None:
            try:
                run.process_all_available()
            except Exception as error:  # noqa: BLE001 (kept for the end of the process; the others go on)
                member.error = member.error or error
            finally:
                one.set_result(None)

        for name, run in self.running.items():
            done.append(Future())
            work = (self._members[name], run, done[-1])
            threading.Thread(target=process, args=work, name="cutline-until-done", daemon=True).start()
        return lambda: all(one.done() for one in done)

    def statuses(self) -> list[FlowStatus]:
        return [run.status() for run in self.running.values()]

    def stop(self) -> None:
        """Stop all flows that run, at the same time: each waits for its batches."""
        runs = [member.run for member in self._members.values() if member.run is not None]
        if len(runs) <= 1:
            for run in runs:
                run.stop()
            return
        with ThreadPoolExecutor(len(runs), thread_name_prefix="cutline-stop") as pool:
            stops = [pool.submit(run.stop) for run in runs]
        for one in stops:
            one.result()

    def failures(self) -> dict[FlowName, BaseException]:
        """The flows that did not start or have failed, and why."""
        self.are_over()
        return {name: member.error for name, member in self._members.items() if member.error is not None}

    def raise_failures(self) -> None:
        """Raise what was wrong with a flow; of several, one error that names each."""
        failures = self.failures()
        if not failures:
            return
        if len(self._members) == 1:
            raise next(iter(failures.values()))
        texts = [f"{name}: {error}" for name, error in failures.items()]
        raise FlowFailedError(
            f"{len(failures)} of {len(self._members)} flows have failed\n" + "\n".join(texts),
            next_step="fix the cause, then run them again: all resume where they ended",
        )

    # ------------------------------------------------------------------ health and metrics

    def health(self) -> dict[FlowName, FlowHealth]:
        return {name: _health_of(member) for name, member in self._members.items()}

    def collect(self) -> Iterator[Metric]:
        """The families of all flows, merged: a family may stand only once in an answer."""
        merged: dict[str, Metric] = {}
        for run in self.running.values():
            for family in run.metrics.registry.collect():
                if family.name in merged:
                    merged[family.name].samples.extend(family.samples)
                else:
                    copy = Metric(family.name, family.documentation, family.type, family.unit)
                    copy.samples = list(family.samples)
                    merged[family.name] = copy
        return iter(merged.values())


def _health_of(member: _Member) -> FlowHealth:
    if member.run is None:
        state = FAILED if member.error is not None else STARTING
        return FlowHealth(state=state, healthy=False, reason=str(member.error or "the flow is being started"))
    status = member.run.status()
    is_well = status.health.healthy and not status.failure
    reason = "" if is_well else status.failure or status.health.reason
    return FlowHealth(state=status.state, healthy=is_well, reason=reason)
