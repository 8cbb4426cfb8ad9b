"""Asks Spark about a query before it runs: whether its output mode fits, whether it keeps state, what its rows are."""

from __future__ import annotations

from collections import Counter
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from cutline.errors import FlowDefinitionError
from cutline.model.ids import FlowName, OperatorId
from cutline.spark.versions import arrow_schema

#: In the metadata of an event-time column: the delay of its watermark.
WATERMARK_MARK = "spark.watermarkDelayMs"
_STATEFUL_PREFIXES = (
    "Aggregate",
    "Deduplicate",
    "Distinct",
    "FlatMapGroupsWithState",
    "FlatMapGroupsInPandasWithState",
    "TransformWithState",
    "GlobalLimit",
    "SessionWindow",
)


def check_streaming(flow: FlowName, operator: OperatorId, frame: Any) -> DataFrame:
    """The operator's result, if it is a streaming DataFrame."""
    if not isinstance(frame, DataFrame) or not frame.isStreaming:
        kind = "a static DataFrame" if isinstance(frame, DataFrame) else f"{type(frame).__name__}"
        raise FlowDefinitionError(
            f"the operator's function returned {kind}",
            next_step="return a streaming DataFrame: start from spark.readStream or from the inputs",
            flow=flow,
            operator=operator,
        )
    return frame


def check_columns(flow: FlowName, operator: OperatorId, schema: StructType) -> None:
    """Refuse two columns, or two fields of a struct, with one name: Arrow and Spark then mix up their values."""
    twice = _twice_in(schema, ())
    if twice is not None:
        raise FlowDefinitionError(
            "two columns of the operator's result have the same name",
            next_step="give one of them another name: .alias(…), or leave one out",
            flow=flow,
            operator=operator,
            column=".".join(twice),
        )


def _twice_in(kind: DataType, path: tuple[str, ...]) -> tuple[str, ...] | None:
    """The first name that a struct in this type has twice, after the names that lead to it."""
    if isinstance(kind, ArrayType):
        return _twice_in(kind.elementType, path)
    if isinstance(kind, MapType):
        return _twice_in(kind.keyType, path) or _twice_in(kind.valueType, path)
    if not isinstance(kind, StructType):
        return None
    for name, count in Counter(kind.names).items():
        if count > 1:
            return (*path, name)
    found = (_twice_in(field.dataType, (*path, field.name)) for field in kind.fields)
    return next((one for one in found if one is not None), None)


def check_output_mode(flow: FlowName, operator: OperatorId, frame: DataFrame, mode: str) -> None:
    """Ask Spark whether it can run the query in this mode: Spark's own check, made before anything starts."""
    jvm: Any = frame.sparkSession._jvm
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    java_mode = {"append": modes.Append, "update": modes.Update, "complete": modes.Complete}[mode]()
    try:
        checker.checkForStreaming(frame._jdf.queryExecution().analyzed(), java_mode)
    except (PySparkException, Py4JJavaError) as error:
        raise FlowDefinitionError(
            f"output mode {mode!r} does not fit: {str(error).strip().splitlines()[0]}",
            next_step='choose another output_mode ("update" for aggregations without a watermark)',
            flow=flow,
            operator=operator,
        ) from error


def is_stateful(frame: DataFrame) -> bool:
    """Whether the query will keep state, judged by the streaming nodes of its plan."""
    return _has_state(frame._jdf.queryExecution().analyzed())


def _has_state(plan: Any) -> bool:
    if not plan.isStreaming():
        return False
    name = plan.nodeName()
    children = plan.children()
    count = children.size()
    if name.startswith(_STATEFUL_PREFIXES):
        return True
    if name == "Join" and all(children.apply(index).isStreaming() for index in range(count)):
        return True
    return any(_has_state(children.apply(index)) for index in range(count))


def watermarked_columns(frame: DataFrame) -> list[str]:
    """Event-time columns of the plan, including those that are no longer columns of the result."""
    return sorted(set(_watermarks(frame._jdf.queryExecution().analyzed())))


def _watermarks(plan: Any) -> list[str]:
    children = plan.children()
    found = [name for index in range(children.size()) for name in _watermarks(children.apply(index))]
    return [*found, plan.eventTime().name()] if plan.nodeName() == "EventTimeWatermark" else found


def channel_schema(frame: DataFrame) -> StructType:
    """The schema of the rows in a channel.

    Spark marks an event-time column in its metadata. The watermark ends with the query that keeps it, so the mark must
    end too: Spark would treat the next operator as one with a watermark, which would then never advance.
    """
    fields = [
        StructField(
            field.name,
            field.dataType,
            field.nullable,
            {key: value for key, value in field.metadata.items() if key != WATERMARK_MARK},
        )
        for field in frame.schema.fields
    ]
    return StructType(fields)


def schema_message(frame: DataFrame) -> bytes:
    """The Arrow schema of the rows as they are stored."""
    return bytes(arrow_schema(channel_schema(frame)).serialize())
