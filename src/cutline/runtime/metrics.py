"""Counters and gauges of one running flow, in a Prometheus registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from cutline.model.generation import LostInput
from cutline.model.ids import Epoch, FlowName, OperatorId, SinkId
from cutline.model.status import SourceLag

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The metrics of a running flow. ``registry`` may be served or read by any code."""

    def __init__(self, flow: FlowName) -> None:
        self.registry = CollectorRegistry()
        self._flow = flow

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"cutline_{name}", text, ["flow", *labels], registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"cutline_{name}", text, ["flow", *labels], registry=self.registry)

        self._completed = counter("checkpoints_completed", "Complete checkpoints")
        self._aborted = counter("checkpoints_aborted", "Aborted checkpoints")
        self._seconds = Histogram(
            "cutline_checkpoint_seconds", "Trigger to manifest", ["flow"], buckets=_SECONDS, registry=self.registry
        )
        self._epoch = gauge("last_complete_epoch", "Newest complete epoch")
        self._published = gauge("sink_published_epoch", "Newest published epoch", "sink")
        self._sink_failures = counter("sink_commit_failures", "Failed sink commits", "sink")
        self._recovery = counter("recovery", "Starts by recovery path", "path")
        self._recovery_seconds = gauge("recovery_seconds", "Time from start to running", "path")
        self._restarts = counter("query_restarts", "Restarted queries", "operator")
        self._lost_input = counter("lost_input", "Files and messages that sources could not reread", "operator")
        self._source_lag = gauge("source_lag", "Messages that a source has and its operator has not read", "operator")
        self._source_expiry = gauge(
            "source_restorable_until_seconds",
            "Unix time until which sources keep what the oldest checkpoint needs",
            "operator",
        )
        self._healthy = gauge("healthy", "0 while more checkpoints in a row have failed than is tolerated")
        self._healthy.labels(flow).set(1)

    def checkpoint_completed(self, epoch: Epoch, duration_ms: int) -> None:
        self._completed.labels(self._flow).inc()
        self._seconds.labels(self._flow).observe(duration_ms / 1000)
        self._epoch.labels(self._flow).set(epoch)

    def checkpoint_aborted(self) -> None:
        self._aborted.labels(self._flow).inc()

    def sink_published(self, sink: SinkId, epoch: Epoch) -> None:
        self._published.labels(self._flow, sink).set(epoch)

    def sink_failed(self, sink: SinkId) -> None:
        self._sink_failures.labels(self._flow, sink).inc()

    def recovered(self, path: str, seconds: float) -> None:
        self._recovery.labels(self._flow, path).inc()
        self._recovery_seconds.labels(self._flow, path).set(seconds)

    def input_lost(self, lost: Iterable[LostInput]) -> None:
        for one in lost:
            self._lost_input.labels(self._flow, one.operator).inc(one.parts)

    def sources_looked_at(self, operator: OperatorId, found: Sequence[SourceLag]) -> None:
        known = [one for one in found if not one.problem]
        if known:
            self._source_lag.labels(self._flow, operator).set(sum(one.lag for one in known))
        ends_ms = [one.restorable_until_ms for one in known if one.restorable_until_ms is not None]
        if ends_ms:
            self._source_expiry.labels(self._flow, operator).set(min(ends_ms) / 1000)

    def health_changed(self, *, is_healthy: bool) -> None:
        self._healthy.labels(self._flow).set(int(is_healthy))

    def follow(self, name: str, text: str, label: str, counts: Callable[[], Mapping[str, int]]) -> None:
        """Export counts that another part keeps; they are read on each scrape."""
        self.registry.register(_Followed(f"cutline_{name}", text, self._flow, label, counts))

    def query_restarted(self, operator: OperatorId) -> None:
        self._restarts.labels(self._flow, operator).inc()


class _Followed(Collector):
    """Counts kept elsewhere, one line per label."""

    def __init__(
        self, name: str, text: str, flow: FlowName, label: str, counts: Callable[[], Mapping[str, int]]
    ) -> None:
        self._name, self._text, self._flow, self._label, self._counts = name, text, flow, label, counts

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._text, labels=["flow", self._label])
        for name, count in self._counts().items():
            family.add_metric([self._flow, name], count)
        yield family
