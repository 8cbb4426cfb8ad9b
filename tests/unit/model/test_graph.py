"""The graph of a flow: every error is found before anything starts."""

from __future__ import annotations

import pytest

from cutline.errors import FlowDefinitionError
from cutline.model.graph import FlowGraph, OperatorNode, SinkNode, build_graph, check_name
from cutline.model.ids import FlowName, OperatorId, SinkId

FLOW = FlowName("payments")
ANY_MODE = frozenset({"append", "update", "complete"})


def op(name: str, *inputs: str, subtasks: int | None = None, mode: str | None = None) -> OperatorNode:
    return OperatorNode(
        operator=OperatorId(name),
        inputs=tuple(OperatorId(one) for one in inputs),
        subtasks=subtasks,
        output_mode=mode,
    )


def sink(operator: str, *, mode: str | None = None, modes: frozenset[str] = ANY_MODE, name: str = "out") -> SinkNode:
    return SinkNode(sink=SinkId(name), operator=OperatorId(operator), output_mode=mode, supported_modes=modes)


def graph(*nodes: OperatorNode | SinkNode) -> FlowGraph:
    return build_graph(
        FLOW,
        [node for node in nodes if isinstance(node, OperatorNode)],
        [node for node in nodes if isinstance(node, SinkNode)],
    )


# ------------------------------------------------------------------------------------------------- good graphs


def test_operators_come_in_an_order_in_which_inputs_are_first() -> None:
    built = graph(op("d", "b", "c"), op("b", "a"), op("c", "a"), op("a"), sink("d"))
    order = {str(name): index for index, name in enumerate(built.names)}
    assert order["a"] < order["b"] < order["d"]
    assert order["a"] < order["c"] < order["d"]


def test_a_graph_knows_its_edges() -> None:
    built = graph(op("a"), op("b"), op("c", "a", "b"), op("d", "a"), sink("c", name="one"), sink("d", name="two"))
    assert built.sources == {"a", "b"}
    assert built.consumers(OperatorId("a")) == ("c", "d")
    assert built.consumers(OperatorId("c")) == ()
    assert built.sinks_of(OperatorId("c")) == ("one",)
    assert built.sinks_of(OperatorId("a")) == ()
    assert built.node(OperatorId("c")).inputs == ("a", "b")


def test_the_output_mode_is_append_unless_somebody_says_otherwise() -> None:
    built = graph(op("a"), op("b", "a", mode="update"), op("c", "b"), sink("c", mode="complete"))
    assert built.output_modes == {"a": "append", "b": "update", "c": "complete"}


def test_operator_and_sink_may_name_the_same_mode() -> None:
    assert graph(op("a", mode="update"), sink("a", mode="update")).output_modes == {"a": "update"}


# ------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([], "no operators"),
        ([op("a", "b"), op("b", "a"), sink("b")], "a, b form a cycle"),
        ([op("a", "a"), sink("a")], "a form a cycle"),
        ([op("x"), op("a", "x", "c"), op("b", "a"), op("c", "b"), sink("c")], "a, b, c form a cycle"),
        ([op("a", "nobody"), sink("a")], "unknown input 'nobody'"),
        ([op("a"), op("b", "a", "a"), sink("b")], "named twice"),
        ([op("a", subtasks=0), sink("a")], "subtasks=0"),
        ([op("a", subtasks=-2), sink("a")], "subtasks=-2"),
        ([op("a"), op("b", "a")], "nothing reads what this operator produces"),
        ([op("a"), op("b"), sink("b")], "nothing reads what this operator produces"),
        ([op("a", mode="update"), sink("a", mode="append")], "several output modes: append, update"),
        (
            [op("a"), sink("a", mode="append", name="one"), sink("a", mode="update", name="two")],
            "several output modes: append, update",
        ),
        ([op("a", mode="sometimes"), sink("a")], "unknown output mode 'sometimes'"),
        (
            [op("a", mode="update"), sink("a", modes=frozenset({"append"}))],
            "sink out cannot publish output mode 'update'",
        ),
        ([op("a"), sink("a", modes=frozenset({"complete"}))], "cannot publish output mode 'append'"),
        ([op("a", mode="complete"), op("b", "a"), sink("b")], "'complete' cannot feed another operator"),
        ([op("a"), op("b", "a"), sink("a", mode="complete", name="x"), sink("b")], "cannot feed another operator"),
    ],
)
def test_a_graph_that_cannot_run_is_refused(nodes: list[OperatorNode | SinkNode], said: str) -> None:
    with pytest.raises(FlowDefinitionError, match=said) as caught:
        graph(*nodes)
    assert caught.value.where["flow"] == FLOW
    assert caught.value.next_step


@pytest.mark.parametrize("name", ["a", "A9_-b", "x" * 63])
def test_good_names(name: str) -> None:
    check_name("an operator", name)


@pytest.mark.parametrize(
    "name", ["", "9a", "_a", "a b", "a/b", "../a", "a.b", "é", "x" * 64, "a\n", ".", "a:b", "<lambda>"]
)
def test_a_name_that_is_no_folder_label_and_url_is_refused(name: str) -> None:
    with pytest.raises(FlowDefinitionError, match="cannot be the name of an operator"):
        check_name("an operator", name)
