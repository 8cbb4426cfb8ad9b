"""The description of a whole flow: what its code is, in hashes that differ when it does."""

from __future__ import annotations

import importlib.metadata
import inspect
import platform
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import msgspec

from cutline.base.redaction import address_without_secrets, is_secret_name
from cutline.fingerprint.functions import Functions, hash_of, is_place
from cutline.fingerprint.objects import is_own
from cutline.model.generation import FlowCode, OperatorCode
from cutline.model.graph import FlowGraph, OperatorNode, SinkNode
from cutline.model.ids import NO_CODE, CodeHash, OperatorId, SinkId
from cutline.ports.sinks import Sink

#: What a version is made of; anything else in it is left out.
_NOT_IN_VERSIONS = re.compile(r"[^A-Za-z0-9.+_-]")
_VERSION_CHARS = 64
#: Where a sink is, in the arguments of Cutline's own sinks.
_PLACES = frozenset({"dsn", "servers", "staging", "url"})
#: The arguments that say what a sink publishes to. Not the lists of servers: any of a cluster will do.
_TARGETS = frozenset({"dsn", "path", "stream", "subject", "table", "topic"})


def code_of(
    graph: FlowGraph, functions: Mapping[OperatorId, Callable[..., Any]], sinks: Mapping[SinkId, Sink]
) -> FlowCode:
    """The code of a flow that is about to start. The same file gives the same hash, wherever it is.

    Neither the flow's name nor its options count: a clone and another interval are the same code.
    """
    hashing = Functions()
    operators = {
        node.operator: OperatorCode(
            function=hashing.hash(functions[node.operator]), declaration=_declaration(node, graph)
        )
        for node in graph.operators
    }
    found = FlowCode(
        python=platform.python_version(),
        pyspark=version_of("pyspark"),
        cutline=version_of("cutline"),
        operators=operators,
        sinks={node.sink: _sink(node, sinks[node.sink], hashing) for node in graph.sinks},
    )
    return msgspec.structs.replace(found, hash=hash_of(msgspec.to_builtins(found)))


def version_of(package: str) -> str:
    """The version that runs; spark-submit brings a PySpark that is not installed. Empty: not known."""
    loaded = getattr(sys.modules.get(package), "__version__", None)
    if not isinstance(loaded, str):
        try:
            loaded = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return ""
    return _NOT_IN_VERSIONS.sub("", loaded)[:_VERSION_CHARS]


def _declaration(node: OperatorNode, graph: FlowGraph) -> CodeHash:
    mode = graph.output_modes[node.operator]
    return hash_of([list(node.inputs), node.subtasks, mode, msgspec.to_builtins(node.options)])


def _sink(node: SinkNode, sink: Sink, hashing: Functions) -> CodeHash:
    """Where it publishes to does not count, except the last name of a path; what and how it publishes does."""
    own = [node.operator, node.output_mode, node.on_rollback, node.publish, sorted(node.supported_modes)]
    kind = type(sink)
    settings = _settings(sink, hashing)
    if is_own(kind):  # it may keep its arguments under other names
        settings = {**hashing.attributes(sink, or_all=False), **settings}
    return hash_of([own, kind.__qualname__, bool(sink.can_rewind), settings, hashing.class_parts(kind)])


def place_of(sink: Sink) -> CodeHash:
    """Where it publishes to, without secrets; the same in each process of a host. Empty: not known."""
    found: dict[str, str] = {}
    for name, value in _arguments(sink).items():
        if isinstance(value, PurePath) or (isinstance(value, str) and name in _TARGETS and not is_secret_name(name)):
            found[name] = address_without_secrets(str(value))
    found.pop("staging", None)
    return hash_of(sorted(found.values())) if found else NO_CODE


def _arguments(sink: Sink) -> dict[str, Any]:
    """What it was given, by the names of the parameters, as far as it has kept it."""
    kept = getattr(sink, "__dict__", {})
    constructors = [vars(one)["__init__"] for one in type(sink).__mro__[:-1] if "__init__" in vars(one)]
    names = dict.fromkeys(name for one in constructors for name in inspect.signature(one).parameters)
    return {name: kept.get(name, kept.get(f"_{name}")) for name in names}


def _settings(sink: Sink, hashing: Functions) -> dict[str, Any]:
    """The arguments of its constructors that it has kept under their names."""
    found: dict[str, Any] = {}
    for name, value in _arguments(sink).items():
        if value is None or is_secret_name(name) or name in _PLACES:
            continue
        if isinstance(value, PurePath) or (isinstance(value, str) and value.startswith("/")):
            found[name] = PurePath(value).name
        elif not (isinstance(value, str) and is_place(value)):
            found[name] = hashing.parts(value) if callable(value) else hashing.value(value)
    return found
