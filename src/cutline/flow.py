"""The public API for defining a flow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, get_args

from cutline.config.arguments import check_argument, checked
from cutline.config.options import operator_options
from cutline.errors import FlowDefinitionError
from cutline.launcher import load_launcher
from cutline.model.graph import (
    FlowGraph,
    OperatorNode,
    PublishPolicy,
    RollbackPolicy,
    SinkNode,
    build_graph,
    check_name,
)
from cutline.model.ids import FlowName, OperatorId, SinkId
from cutline.ports.sinks import Sink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from cutline.runtime.handle import RunningFlow


class Operator:
    """One operator of a flow, as ``@flow.operator()`` returns it. Use it as an input of other operators."""

    def __init__(self, function: Callable[..., DataFrame], node: OperatorNode) -> None:
        self.function = function
        self.node = node

    @property
    def name(self) -> OperatorId:
        return self.node.operator

    def __call__(self, *args: Any, **kwargs: Any) -> DataFrame:
        """Call the plain function, for tests without a flow."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<operator {self.name}>"


class Flow:
    """A named graph of operators, each of which runs as one Spark streaming query."""

    @checked("Flow")
    def __init__(self, name: str) -> None:
        check_name("a flow", name)
        self.name = FlowName(name)
        self._operators: dict[OperatorId, Operator] = {}
        self._sinks: dict[SinkId, tuple[SinkNode, Sink]] = {}

    @checked("flow.operator")
    def operator(
        self,
        name: str | None = None,
        *,
        inputs: Sequence[Operator | str] = (),
        subtasks: int | None = None,
        output_mode: str | None = None,
        mode: str | None = None,
        alignment_timeout: str | float | None = None,
        checkpoint_timeout: str | float | None = None,
        checkpoint_interval: str | float | None = None,
        replicate_interval: str | float | None = None,
    ) -> Callable[[Callable[..., DataFrame]], Operator]:
        """Declare an operator.

        Without ``inputs`` it is a source: the function gets the session and returns any streaming DataFrame. With
        inputs it gets one streaming DataFrame per input, in that order, and returns one. A parameter named ``spark``
        gets the session as well. ``subtasks`` is the number of state partitions. ``mode``, ``alignment_timeout``,
        ``checkpoint_timeout``, ``replicate_interval`` and (in per-operator mode) ``checkpoint_interval`` override the
        flow's options for this operator; configuration wins over them.
        """

        def declare(function: Callable[..., DataFrame]) -> Operator:
            check_argument("flow.operator", "function", function, Callable, flow=self.name)
            operator = OperatorId(name or function.__name__)
            check_name("an operator", operator, self.name)
            if operator in self._operators:
                raise FlowDefinitionError(
                    "two operators have the same name",
                    next_step='name one of them: @flow.operator("another_name")',
                    flow=self.name,
                    operator=operator,
                )
            if isinstance(inputs, str | Operator):
                raise FlowDefinitionError(
                    f"inputs={inputs!r} is not a list",
                    next_step="write it in brackets: inputs=[...]",
                    flow=self.name,
                    operator=operator,
                )
            node = OperatorNode(
                operator=operator,
                inputs=tuple(OperatorId(one.name if isinstance(one, Operator) else one) for one in inputs),
                subtasks=subtasks,
                output_mode=output_mode,
                options=operator_options(
                    {
                        "mode": mode,
                        "alignment_timeout": alignment_timeout,
                        "checkpoint_timeout": checkpoint_timeout,
                        "checkpoint_interval": checkpoint_interval,
                        "replicate_interval": replicate_interval,
                    },
                    where=f"operator {operator}",
                ),
            )
            self._operators[operator] = Operator(function, node)
            return self._operators[operator]

        return declare

    @checked("flow.sink")
    def sink(
        self,
        operator: Operator | str,
        sink: Sink,
        *,
        output_mode: str | None = None,
        name: str | None = None,
        on_rollback: str = "rewind",
        publish: str = "checkpoint",
    ) -> None:
        """Publish an operator's rows, exactly once, with every complete checkpoint.

        ``on_rollback`` decides what happens to published rows when the flow is restored to an epoch before them:
        ``rewind`` removes them, ``keep`` leaves them and publishes repeated work again, ``fail`` refuses to restore.

        ``publish="at_once"`` (immediate publishing): rows become visible batch by batch, as soon as their batch is in
        the log. After a crash each row is still there once, but a restore may rewind rows that readers have seen.
        """
        source = OperatorId(operator.name if isinstance(operator, Operator) else operator)
        if source not in self._operators:
            raise FlowDefinitionError(
                "a sink is attached to an unknown operator",
                next_step=f"declared operators: {', '.join(sorted(self._operators)) or 'none'}",
                flow=self.name,
                operator=source,
            )
        sink_id = SinkId(name or f"{source}-{type(sink).__name__.lower()}")
        check_name("a sink", sink_id, self.name)
        if sink_id in self._sinks:
            raise FlowDefinitionError(
                f"two sinks are called {sink_id}", next_step="give one of them a name=", flow=self.name
            )
        policies = get_args(RollbackPolicy)
        if on_rollback not in policies:
            raise FlowDefinitionError(
                f"on_rollback: {on_rollback!r} is not known",
                next_step=f"use one of {', '.join(policies)}",
                flow=self.name,
                operator=source,
            )
        self._check_publish(publish, on_rollback, sink, source)
        node = SinkNode(
            sink=sink_id,
            operator=source,
            output_mode=output_mode,
            supported_modes=sink.output_modes,
            on_rollback=cast("RollbackPolicy", on_rollback),
            publish=cast("PublishPolicy", publish),
        )
        self._sinks[sink_id] = (node, sink)

    def _check_publish(self, publish: str, on_rollback: str, sink: Sink, operator: OperatorId) -> None:
        problem = None
        if publish not in get_args(PublishPolicy):
            problem = f"publish: {publish!r} is not known", f"use one of {', '.join(get_args(PublishPolicy))}"
        elif publish == "at_once" and on_rollback == "fail":
            problem = "immediate publishing is ahead of every checkpoint", 'use on_rollback="rewind" or "keep"'
        elif publish == "at_once" and on_rollback == "rewind" and not sink.can_rewind:
            problem = "the sink cannot rewind what it publishes ahead of checkpoints", 'use on_rollback="keep"'
        if problem is not None:
            raise FlowDefinitionError(problem[0], next_step=problem[1], flow=self.name, operator=operator)

    def graph(self) -> FlowGraph:
        """The checked graph; raises FlowDefinitionError for anything that cannot run."""
        return build_graph(
            self.name,
            [operator.node for operator in self._operators.values()],
            [node for node, _ in self._sinks.values()],
        )

    @property
    def functions(self) -> dict[OperatorId, Callable[..., DataFrame]]:
        return {name: operator.function for name, operator in self._operators.items()}

    @property
    def sinks(self) -> dict[SinkId, Sink]:
        return {name: sink for name, (_, sink) in self._sinks.items()}

    @checked("flow.start")
    def start(
        self,
        *,
        spark: SparkSession | None = None,
        restore_to: int | str | None = None,
        rename: Mapping[str, str] | None = None,
        allow_dropped: bool = False,
        rejoin: bool = False,
        **options: Any,
    ) -> RunningFlow:
        """Run the flow; see ``cutline.config.options.Options`` for what may be set.

        The start recovers from whatever an earlier run left in ``storage``. Without ``spark`` it uses the active
        session or creates a tuned local one. ``restore_to`` restores the whole flow to a kept checkpoint, to a
        savepoint by name, or to "before-last-deploy": sinks are rewound to it, and all later work is discarded.
        ``rename`` maps the old names of operators to their present names; ``allow_dropped`` leaves behind operators
        that the flow no longer has. Operators that the checkpoint does not have start without state. ``rejoin``: if
        another host has taken the flow over, keep what this storage did alone as a savepoint, and continue from the
        remote tier.
        """
        return load_launcher()(
            self,
            spark=spark,
            settings=options,
            restore_to=restore_to,
            rename=rename,
            allow_dropped=allow_dropped,
            rejoin=rejoin,
        )
