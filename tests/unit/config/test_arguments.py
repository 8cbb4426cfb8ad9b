"""Wrong arguments of the public API are named when the flow is declared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cutline import Flow, sinks
from cutline.errors import FlowDefinitionError


def declared() -> Flow:
    flow = Flow("payments")
    flow.operator("rows")(lambda spark: spark)
    return flow


def some_function(spark: Any) -> Any:
    return spark


#: The argument, and a call that has it wrong.
WRONG: dict[str, Callable[[], Any]] = {
    "name=5": lambda: Flow(5),  # type: ignore[arg-type]
    "name=None": lambda: Flow(None),  # type: ignore[arg-type]
    "subtasks='four'": lambda: declared().operator(subtasks="four"),  # type: ignore[arg-type]
    "subtasks=True": lambda: declared().operator(subtasks=True),
    "subtasks=2.5": lambda: declared().operator(subtasks=2.5),  # type: ignore[arg-type]
    "inputs=7": lambda: declared().operator(inputs=7),  # type: ignore[arg-type]
    "inputs=[7]": lambda: declared().operator(inputs=[7]),  # type: ignore[list-item]
    "name=<function": lambda: declared().operator(some_function),  # type: ignore[arg-type]
    "output_mode=1": lambda: declared().operator(output_mode=1),  # type: ignore[arg-type]
    "alignment_timeout=[]": lambda: declared().operator(alignment_timeout=[]),  # type: ignore[arg-type]
    "function='text'": lambda: declared().operator()("text"),  # type: ignore[arg-type]
    "operator=5": lambda: declared().sink(5, sinks.Parquet("x")),  # type: ignore[arg-type]
    "sink='out'": lambda: declared().sink("rows", "out"),  # type: ignore[arg-type]
    "sink=<class": lambda: declared().sink("rows", sinks.Parquet),  # type: ignore[arg-type]
    "on_rollback=None": lambda: declared().sink("rows", sinks.Parquet("x"), on_rollback=None),  # type: ignore[arg-type]
    "publish=1": lambda: declared().sink("rows", sinks.Parquet("x"), publish=1),  # type: ignore[arg-type]
    "rename=['a']": lambda: declared().start(rename=["a"]),  # type: ignore[arg-type]
    "rename={'a': 1}": lambda: declared().start(rename={"a": 1}),  # type: ignore[dict-item]
    "restore_to=1.5": lambda: declared().start(restore_to=1.5),  # type: ignore[arg-type]
    "allow_dropped='no'": lambda: declared().start(allow_dropped="no"),  # type: ignore[arg-type]
    "path=5": lambda: sinks.Parquet(5),  # type: ignore[arg-type]
    "partition_by=3": lambda: sinks.Parquet("x", partition_by=3),  # type: ignore[arg-type]
    "partition_by=[3]": lambda: sinks.Delta("x", partition_by=[3]),  # type: ignore[list-item]
    "path=None": lambda: sinks.Delta(None),  # type: ignore[arg-type]
    "key=[None]": lambda: sinks.Delta("x", mode="upsert", key=[None]),  # type: ignore[list-item]
    "table=5": lambda: sinks.SQLite("x", 5),  # type: ignore[arg-type]
    "rewind_epochs='3'": lambda: sinks.SQLite("x", "t", rewind_epochs="3"),  # type: ignore[arg-type]
    "mode=1": lambda: sinks.SQLite("x", "t", mode=1),  # type: ignore[arg-type]
    "rewindable='no'": lambda: sinks.Postgres("x", "t", rewindable="no"),  # type: ignore[arg-type]
    "dsn=b'": lambda: sinks.Postgres(b"x", "t"),  # type: ignore[arg-type]
    "keep_epochs=1.5": lambda: sinks.Postgres("x", "t", keep_epochs=1.5),  # type: ignore[arg-type]
    "topic=None": lambda: sinks.Kafka("s", None, staging="x"),  # type: ignore[arg-type]
    "timeout_s='1m'": lambda: sinks.Kafka("s", "t", staging="x", timeout_s="1m"),  # type: ignore[arg-type]
    "url=4222": lambda: sinks.JetStream(4222, "s", "t", staging="x"),  # type: ignore[arg-type]
    "batch_messages='9'": lambda: sinks.JetStream("u", "s", "t", staging="x", batch_messages="9"),  # type: ignore[arg-type]
    "function='f'": lambda: sinks.Foreach("f", staging="x"),  # type: ignore[arg-type]
    "staging=1": lambda: sinks.Foreach(print, staging=1),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("argument", WRONG)
def test_a_wrong_argument_is_named_with_its_value(argument: str) -> None:
    with pytest.raises(FlowDefinitionError) as caught:
        WRONG[argument]()
    assert argument in str(caught.value)
    assert "Next: " in str(caught.value)


def test_the_error_names_the_flow_and_says_what_is_expected() -> None:
    with pytest.raises(FlowDefinitionError) as caught:
        declared().operator(subtasks="four")  # type: ignore[arg-type]
    assert caught.value.what == "flow.operator: subtasks='four' is not a whole number"
    assert caught.value.where == {"flow": "payments"}


def test_a_secret_in_a_wrong_argument_is_hidden() -> None:
    with pytest.raises(FlowDefinitionError) as caught:
        sinks.Postgres(["postgresql://me:geheim@host/db"], "t")  # type: ignore[arg-type]
    assert "geheim" not in str(caught.value)


def test_right_arguments_of_every_kind_pass(tmp_path: Path) -> None:
    flow = declared()
    totals = flow.operator("totals", inputs=["rows"], subtasks=4, alignment_timeout=0.5, checkpoint_timeout="3s")
    flow.operator("sums", inputs=(totals(some_function), "rows"))(some_function)
    flow.sink("totals", sinks.Parquet(tmp_path, "day"), output_mode="update", name="first")
    flow.sink("totals", sinks.SQLite(str(tmp_path / "db"), "t", mode="upsert", key=["a"], rewind_epochs=2), name="b")
    sinks.Kafka("s", "t", staging=tmp_path, timeout_s=5)
    sinks.Foreach(lambda rows, epoch, key: None, staging=tmp_path)


def test_a_missing_or_unknown_argument_is_still_reported_by_python() -> None:
    with pytest.raises(TypeError, match="pth"):
        sinks.Parquet(pth="x")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="name"):
        Flow()  # type: ignore[call-arg]
