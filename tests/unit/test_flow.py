"""The public way to write a flow, without running it."""

from __future__ import annotations

from typing import Any

import pytest

import cutline
from cutline.config.options import OperatorOptions
from cutline.errors import ConfigError, FlowDefinitionError
from cutline.flow import Flow, Operator
from cutline.testing.twins.sink import MemorySink


@pytest.fixture
def flow() -> Flow:
    return Flow("payments")


def declare(flow: Flow, name: str, **options: Any) -> Operator:
    def function(*frames: Any) -> Any:
        return frames

    return flow.operator(name, **options)(function)


def test_a_flow_is_built_from_functions(flow: Flow) -> None:
    @flow.operator()
    def orders(spark: Any) -> Any:
        return spark

    @flow.operator("sums", inputs=[orders], subtasks=4, output_mode="update")
    def totals(frame: Any) -> Any:
        return frame

    sink = MemorySink()
    flow.sink(totals, sink, name="table")
    graph = flow.graph()
    assert graph.names == ("orders", "sums")
    assert graph.node(totals.name).subtasks == 4
    assert graph.output_modes == {"orders": "append", "sums": "update"}
    assert flow.sinks == {"table": sink}
    assert flow.functions == {"orders": orders.function, "sums": totals.function}


def test_an_operator_can_be_called_like_the_function_it_is(flow: Flow) -> None:
    @flow.operator()
    def double(frame: Any) -> Any:
        return [frame, frame]

    called: Any = double("rows")
    assert called == ["rows", "rows"]
    assert repr(double) == "<operator double>"


def test_inputs_and_sinks_may_be_named(flow: Flow) -> None:
    declare(flow, "a")
    declare(flow, "b", inputs=["a"])
    flow.sink("b", MemorySink())
    assert flow.graph().node(flow.graph().names[1]).inputs == ("a",)
    assert list(flow.sinks) == ["b-memorysink"]


def test_an_input_may_be_declared_later(flow: Flow) -> None:
    declare(flow, "b", inputs=["a"])
    declare(flow, "a")
    flow.sink("b", MemorySink())
    assert flow.graph().names == ("a", "b")


def test_two_operators_of_one_name_are_refused(flow: Flow) -> None:
    first = declare(flow, "a")
    with pytest.raises(FlowDefinitionError, match="two operators have the same name"):
        declare(flow, "a")
    flow.sink(first, MemorySink())
    assert flow.functions == {"a": first.function}


@pytest.mark.parametrize("name", ["manifest", "Manifest"])
def test_a_name_that_checkpoints_use_themselves_is_refused(flow: Flow, name: str) -> None:
    """The record of an operator lies beside the manifest, under the operator's name."""
    with pytest.raises(FlowDefinitionError, match="cannot be the name of an operator"):
        declare(flow, name)


def test_a_function_without_a_usable_name_needs_one(flow: Flow) -> None:
    with pytest.raises(FlowDefinitionError):
        flow.operator()(lambda frame: frame)


@pytest.mark.parametrize("name", ["", "two words", "../up"])
def test_a_flow_needs_a_usable_name(name: str) -> None:
    with pytest.raises(FlowDefinitionError, match="cannot be the name of a flow"):
        Flow(name)


def test_a_sink_needs_an_operator_of_the_flow(flow: Flow) -> None:
    declare(flow, "a")
    with pytest.raises(FlowDefinitionError) as caught:
        flow.sink("b", MemorySink())
    assert "declared operators: a" in caught.value.next_step


def test_an_operator_of_another_flow_is_unknown_here(flow: Flow) -> None:
    stranger = declare(Flow("other"), "theirs")
    with pytest.raises(FlowDefinitionError):
        flow.sink(stranger, MemorySink())
    declare(flow, "mine", inputs=[stranger])
    with pytest.raises(FlowDefinitionError, match="unknown input 'theirs'"):
        flow.graph()


def test_two_sinks_of_one_name_are_refused(flow: Flow) -> None:
    declare(flow, "a")
    flow.sink("a", MemorySink())
    with pytest.raises(FlowDefinitionError, match="two sinks are called a-memorysink"):
        flow.sink("a", MemorySink())
    flow.sink("a", MemorySink(), name="second")
    assert len(flow.sinks) == 2


def test_a_sink_with_an_unusable_name_is_refused(flow: Flow) -> None:
    declare(flow, "a")
    with pytest.raises(FlowDefinitionError, match="cannot be the name of a sink"):
        flow.sink("a", MemorySink(), name="a b")


def test_an_operator_may_have_options_of_its_own(flow: Flow) -> None:
    declare(flow, "a", mode="unaligned", alignment_timeout="2s", checkpoint_timeout=30)
    declare(flow, "b", inputs=["a"])
    flow.sink("b", MemorySink())
    first, second = (flow.graph().node(name).options for name in flow.graph().names)
    assert first == OperatorOptions(mode="unaligned", alignment_timeout_ms=2_000, checkpoint_timeout_ms=30_000)
    assert second == OperatorOptions()


def test_an_option_of_an_operator_that_makes_no_sense_is_refused_with_its_name(flow: Flow) -> None:
    with pytest.raises(ConfigError, match="operator a: mode: 'sideways' is not known"):
        declare(flow, "a", mode="sideways")


def test_one_input_is_not_taken_for_a_list_of_inputs(flow: Flow) -> None:
    """A string is a sequence of strings: "ab" would read the operators "a" and "b"."""
    a = declare(flow, "a")
    for wrong in ("a", a):
        with pytest.raises(FlowDefinitionError, match="is not a list"):
            declare(flow, "b", inputs=wrong)


def test_the_public_names_are_there_without_spark() -> None:
    assert cutline.Flow is Flow
    assert cutline.Operator is Operator
    assert cutline.__version__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        cutline.nothing  # noqa: B018
