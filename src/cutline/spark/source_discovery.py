"""Finds the sources that an operator's query reads from outside the flow, by the leaves of its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource

from cutline.model.plan import PlannedSource
from cutline.spark.channel_source import FORMAT as CHANNEL

#: Spark's two kinds of sources. In Spark itself, only file sources still use the older one.
_RELATION, _OLD_RELATION = "StreamingRelationV2", "StreamingRelation"
#: How Spark names a file source; the folder follows.
_FILES = "FileSource["


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSources:
    """Sources in Python that every flow can read from."""

    classes: Sequence[type[DataSource]] = ()
    #: By format: selects the options (with lower-case names) that are needed later. Raises ConfigError.
    settings: Mapping[str, Callable[[Mapping[str, str]], bytes]] = field(default_factory=dict)
    #: By format: the option that names the server.
    address_options: Mapping[str, str] = field(default_factory=dict)


def planned_sources(frame: DataFrame, known: KnownSources) -> tuple[PlannedSource, ...]:
    """Each source once, in the order of the plan, without the flow's own channels."""
    leaves = _streaming_leaves(frame._jdf.queryExecution().analyzed())
    found = [_planned(frame.sparkSession, leaf, known) for leaf in leaves]
    return tuple(dict.fromkeys(one for one in found if one.format != CHANNEL))


def _streaming_leaves(plan: Any) -> Iterator[Any]:
    children = plan.children()
    count = children.size()
    if count == 0 and plan.isStreaming():
        yield plan
    for index in range(count):
        yield from _streaming_leaves(children.apply(index))


def _planned(session: SparkSession, leaf: Any, known: KnownSources) -> PlannedSource:
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
    if name not in known.settings and name not in known.address_options:
        return PlannedSource(format=name)
    given = leaf.extraOptions().asCaseSensitiveMap()
    options = {option.lower(): str(given[option]) for option in given}
    encode = known.settings.get(name)
    return PlannedSource(
        format=name,
        settings=encode(options) if encode is not None else None,
        address=options.get(known.address_options.get(name, ""), ""),
    )


def _folder(session: SparkSession, path: str) -> str:
    if urlsplit(path).scheme:
        return path
    jsc: Any = session.sparkContext._jsc
    default = str(jsc.hadoopConfiguration().get("fs.defaultFS"))
    return path if urlsplit(default).scheme == "file" else f"{default.rstrip('/')}{path}"
