"""The graph of a flow, checked before anything starts. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from cutline.config.options import OperatorOptions, Options
from cutline.errors import FlowDefinitionError
from cutline.model.ids import NAME, FlowName, OperatorId, SinkId

_NAME = re.compile(NAME)
#: An operator's record is stored under its name, beside the manifest of the checkpoint.
_TAKEN = frozenset({"manifest"})
#: "complete" re-emits the whole result with every batch, which a log of changes cannot represent.
CHANNEL_OUTPUT_MODES = frozenset({"append", "update"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorNode:
    """One operator as the user declared it."""

    operator: OperatorId
    inputs: tuple[OperatorId, ...]
    subtasks: int | None
    #: None: not declared; then "append", unless a sink declares another mode.
    output_mode: str | None
    options: OperatorOptions = field(default_factory=OperatorOptions)


RollbackPolicy = Literal["rewind", "keep", "fail"]
PublishPolicy = Literal["checkpoint", "at_once"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkNode:
    """One sink as the user declared it."""

    sink: SinkId
    operator: OperatorId
    output_mode: str | None
    #: Modes the sink can publish.
    supported_modes: frozenset[str]
    #: What happens to its published epochs when the flow is restored to an earlier one.
    on_rollback: RollbackPolicy = "rewind"
    #: When its rows become visible: with the checkpoint they belong to, or as soon as their batch is in the log.
    publish: PublishPolicy = "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowGraph:
    """A graph that has passed every check. Operators are in an order in which inputs come before consumers."""

    flow: FlowName
    operators: tuple[OperatorNode, ...]
    sinks: tuple[SinkNode, ...]
    output_modes: dict[OperatorId, str]

    @property
    def names(self) -> tuple[OperatorId, ...]:
        return tuple(node.operator for node in self.operators)

    @property
    def sources(self) -> frozenset[OperatorId]:
        return frozenset(node.operator for node in self.operators if not node.inputs)

    def node(self, operator: OperatorId) -> OperatorNode:
        return next(node for node in self.operators if node.operator == operator)

    def consumers(self, operator: OperatorId) -> tuple[OperatorId, ...]:
        return tuple(node.operator for node in self.operators if operator in node.inputs)

    def own_options(self, options: Options) -> dict[str, OperatorOptions]:
        """The options of each operator: configuration wins over code."""
        return {node.operator: options.of_operator(node.operator, node.options) for node in self.operators}

    def sinks_of(self, operator: OperatorId) -> tuple[SinkId, ...]:
        return tuple(node.sink for node in self.sinks if node.operator == operator)


def check_name(kind: str, name: str, flow: str | None = None) -> None:
    """Raise unless the name is valid wherever names are used."""
    if not _NAME.fullmatch(name) or name.lower() in _TAKEN:
        raise FlowDefinitionError(
            f"{name!r} cannot be the name of {kind}",
            next_step="begin with A-Z or a-z, then use up to 62 of A-Z, a-z, 0-9, '_' and '-'; 'manifest' is reserved",
            flow=flow,
        )


def build_graph(flow: FlowName, operators: Iterable[OperatorNode], sinks: Iterable[SinkNode]) -> FlowGraph:
    """Check everything that can be checked without Spark."""
    nodes = {node.operator: node for node in operators}
    sink_nodes = tuple(sinks)
    if not nodes:
        raise FlowDefinitionError("the flow has no operators", next_step="declare one with @flow.operator()", flow=flow)
    _check_inputs(flow, nodes)
    ordered = _in_order(flow, nodes)
    modes = {node.operator: _output_mode(flow, node, sink_nodes, nodes) for node in ordered}
    for node in ordered:
        has_consumer = any(node.operator in other.inputs for other in ordered)
        if not has_consumer and not any(sink.operator == node.operator for sink in sink_nodes):
            raise FlowDefinitionError(
                "nothing reads what this operator produces",
                next_step="give it a sink with flow.sink(...), make it an input of another operator, or remove it",
                flow=flow,
                operator=node.operator,
            )
    return FlowGraph(flow=flow, operators=ordered, sinks=sink_nodes, output_modes=modes)


def _check_inputs(flow: FlowName, nodes: dict[OperatorId, OperatorNode]) -> None:
    for node in nodes.values():
        if len(set(node.inputs)) != len(node.inputs):
            raise FlowDefinitionError(
                "an input is named twice",
                next_step="name it once and use the DataFrame twice in the function",
                flow=flow,
                operator=node.operator,
            )
        for name in node.inputs:
            if name not in nodes:
                raise FlowDefinitionError(
                    f"unknown input {name!r}",
                    next_step=f"declare it first; declared operators: {', '.join(sorted(nodes))}",
                    flow=flow,
                    operator=node.operator,
                )
        if node.subtasks is not None and node.subtasks < 1:
            raise FlowDefinitionError(
                f"subtasks={node.subtasks}", next_step="use 1 or more", flow=flow, operator=node.operator
            )


def _in_order(flow: FlowName, nodes: dict[OperatorId, OperatorNode]) -> tuple[OperatorNode, ...]:
    done: dict[OperatorId, OperatorNode] = {}
    waiting = dict(nodes)
    while waiting:
        ready = [node for node in waiting.values() if all(name in done for name in node.inputs)]
        if not ready:
            raise FlowDefinitionError(
                f"the operators {', '.join(sorted(waiting))} form a cycle",
                next_step="make the graph acyclic: rows flow from sources to sinks only",
                flow=flow,
            )
        for node in ready:
            done[node.operator] = waiting.pop(node.operator)
    return tuple(done.values())


def _output_mode(
    flow: FlowName, node: OperatorNode, sinks: tuple[SinkNode, ...], nodes: dict[OperatorId, OperatorNode]
) -> str:
    asked = {node.output_mode} if node.output_mode else set()
    asked |= {sink.output_mode for sink in sinks if sink.operator == node.operator and sink.output_mode}
    if len(asked) > 1:
        raise FlowDefinitionError(
            f"the operator has several output modes: {', '.join(sorted(asked))}",
            next_step="an operator runs as one query and has one mode; split it into two operators",
            flow=flow,
            operator=node.operator,
        )
    mode = asked.pop() if asked else "append"
    if mode not in ("append", "update", "complete"):
        raise FlowDefinitionError(
            f"unknown output mode {mode!r}", next_step="use append or update", flow=flow, operator=node.operator
        )
    for sink in sinks:
        if sink.operator == node.operator and mode not in sink.supported_modes:
            raise FlowDefinitionError(
                f"sink {sink.sink} cannot publish output mode {mode!r}",
                next_step=f"use one of {', '.join(sorted(sink.supported_modes))}",
                flow=flow,
                operator=node.operator,
            )
    if mode not in CHANNEL_OUTPUT_MODES and any(node.operator in other.inputs for other in nodes.values()):
        raise FlowDefinitionError(
            f"output mode {mode!r} cannot feed another operator",
            next_step="use append or update, which describe changes",
            flow=flow,
            operator=node.operator,
        )
    return mode
