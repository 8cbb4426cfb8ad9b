"""What an operator's query reads from outside of the flow, by the leaves of its plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec
from pyspark.sql import DataFrame, SparkSession

from cutline.connectors.generator.rows import KIND as GENERATOR
from cutline.connectors.generator.rows import settings_of
from cutline.errors import ConfigError
from cutline.ports import PlannedSource
from cutline.spark.channel_source import FORMAT as CHANNEL

#: Spark's two kinds of sources. Of the older one only files are left in Spark itself.
_RELATION, _OLD_RELATION = "StreamingRelationV2", "StreamingRelation"
#: How Spark names a file source; the folder follows.
_FILES = "FileSource["


def planned_sources(frame: DataFrame) -> tuple[PlannedSource, ...]:
    """Each once, in the order of the plan; the flow's own channels are none."""
    leaves = _streaming_leaves(frame._jdf.queryExecution().analyzed())
    found = [_planned(frame.sparkSession, leaf) for leaf in leaves]
    return tuple(dict.fromkeys(one for one in found if one.format != CHANNEL))


def _streaming_leaves(plan: Any) -> Iterator[Any]:
    children = plan.children()
    count = children.size()
    if count == 0 and plan.isStreaming():
        yield plan
    for index in range(count):
        yield from _streaming_leaves(children.apply(index))


def _planned(session: SparkSession, leaf: Any) -> PlannedSource:
    node = str(leaf.nodeName())
    if node == _OLD_RELATION:
        name = str(leaf.sourceName())
        if not name.startswith(_FILES):
            return PlannedSource(format=name)
        path = name.removeprefix(_FILES).removesuffix("]")
        return PlannedSource(format=str(leaf.dataSource().className()), folder=_folder(session, path))
    if node != _RELATION:  # a stream in memory, for tests
        return PlannedSource(format=node)
    name = str(leaf.sourceName())
    if name != GENERATOR:
        return PlannedSource(format=name)
    return PlannedSource(format=name, settings=_generator_settings(leaf.extraOptions().asCaseSensitiveMap()))


def _folder(session: SparkSession, path: str) -> str:
    if urlsplit(path).scheme:
        return path
    jsc: Any = session.sparkContext._jsc
    default = str(jsc.hadoopConfiguration().get("fs.defaultFS"))
    return path if urlsplit(default).scheme == "file" else f"{default.rstrip('/')}{path}"


def _generator_settings(options: Mapping[str, str]) -> bytes:
    try:
        return msgspec.json.encode(settings_of({name.lower(): options[name] for name in options}))
    except ValueError as error:
        raise ConfigError(
            f"{GENERATOR}: {error}", next_step="correct the option; docs/sources.md has them all"
        ) from error
