"""Every port has a conformance suite and an in-memory twin, or a reason why not."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol

import pytest

import cutline.ports

#: Port → where its suite and its twin are: module and class, or function.
SUITES_AND_TWINS = {
    "CheckpointStore": ("checkpoint_store.CheckpointStoreConformance", "checkpoint_store.MemoryCheckpointStore"),
    "Engine": ("engine.EngineConformance", "engine.MemoryEngine"),
    "Executors": ("executors.ExecutorsConformance", "executors.MemoryExecutors"),
    "GenerationStore": ("generation_store.GenerationStoreConformance", "generation_store.MemoryGenerationStore"),
    "MetadataStore": ("metadata.MetadataConformance", "metadata.MemoryMetadata"),
    "QueryDir": ("query_dir.QueryDirConformance", "query_dir.MemoryQueryDir"),
    "Telemetry": ("telemetry.TelemetryConformance", "telemetry.MemoryTelemetry"),
}

#: Port → why it has no suite of its own, or no twin in ``cutline.testing.twins``.
EXCEPTIONS = {
    "ObjectStore": "suite: conformance.objects; the twin is a real adapter, open_store('memory://name')",
    "SourceGuard": "suite: conformance.source_guard; the twin is ports.source_guard.NoGuard",
    "Progress": "suite and twin: tests/unit/cli/test_steps.py runs Steps and ports.progress.NoProgress alike",
    "Query": "part of Engine: its suite starts and stops queries, its twin is twins.engine.IdleQuery",
    "StreamingBatch": "part of Engine: the twin is twins.engine.HandMadeBatch; rows need a real engine (integration)",
    "LiveDirs": "part of Engine, only for Spark on remote file systems; its scenarios run it on a stand-in for HDFS",
    "SnapshotInspector": "reads what LocalCheckpointStore wrote, for verify only; tested with damaged storage",
    "Sink": "suite: conformance.sinks; twins.sink.MemorySink publishes batches, it stages no rows",
    "Readable": "part of Sink: the sinks' suite reads through it",
    "Claimable": "part of Sink: the sinks' suite claims if the sink can",
    "TellsStanding": "optional part of Sink: asked of real targets by tests/scenarios/test_flow_reading.py",
    "RecordsReach": "optional part of Sink: recorded in real targets by tests/scenarios/test_flow_reading.py",
    "RewindsTogether": "optional part of Sink: tested with the SQL sinks, which can",
    "RewindsSoFar": "optional part of Sink: tested with the Delta and SQL sinks",
    "RewindsToPoints": "optional part of Sink: tested with the SQL sinks",
    "Stager": "part of Sink: the sinks' suite stages through it",
    "StageWriter": "part of Sink: the sinks' suite stages through it",
}


def ports() -> set[str]:
    names = [one.name for one in pkgutil.iter_modules(cutline.ports.__path__)]
    modules = [importlib.import_module(f"cutline.ports.{name}") for name in names]
    return {
        name
        for module in modules
        for name, found in vars(module).items()
        if isinstance(found, type) and found is not Protocol and getattr(found, "_is_protocol", False)
        if found.__module__ == module.__name__
    }


def test_every_port_has_a_suite_and_a_twin_or_a_reason() -> None:
    assert ports() - set(SUITES_AND_TWINS) - set(EXCEPTIONS) == set()


def test_no_name_is_of_a_port_that_is_gone() -> None:
    assert {*SUITES_AND_TWINS, *EXCEPTIONS} - ports() == set()
    assert set(SUITES_AND_TWINS).isdisjoint(EXCEPTIONS)


@pytest.mark.parametrize("port", SUITES_AND_TWINS)
def test_the_suite_and_the_twin_are_there(port: str) -> None:
    for package, place in zip(("conformance", "twins"), SUITES_AND_TWINS[port], strict=True):
        module, name = place.split(".")
        assert isinstance(getattr(importlib.import_module(f"cutline.testing.{package}.{module}"), name), type)
