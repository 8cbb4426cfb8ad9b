"""The sink that docs and examples show as "your own" passes the suite that they say it passes."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pyarrow as pa

from cutline.ports.sinks import Sink
from cutline.testing.conformance.sinks import Row, SinkConformance

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_sink.py"


def _load() -> Any:
    """The example as a module; it writes samples when it is loaded, and they go elsewhere."""
    if "own_sink" not in sys.modules:
        spec = importlib.util.spec_from_file_location("own_sink", EXAMPLE)
        assert spec is not None and spec.loader is not None
        module = sys.modules["own_sink"] = importlib.util.module_from_spec(spec)
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.dict(os.environ, {"INPUT_DIR": f"{folder}/input", "OUTPUT_DIR": f"{folder}/output"}),
        ):
            spec.loader.exec_module(module)
    return sys.modules["own_sink"]


class TestJsonLines(SinkConformance):
    rewind_crash_points = ("sink-rewind-half",)
    rich_schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("flag", pa.bool_()), ("real", pa.float64())])
    rich_rows: ClassVar[list[Row]] = [
        {"id": 1, "text": "naïve ☃", "flag": True, "real": 0.25},
        {"id": 2, "text": None, "flag": None, "real": None},
    ]

    def make_sink(self, tmp_path: Path) -> Sink:
        sink: Sink = _load().JsonLines(tmp_path / "target")
        return sink

    def read_rows(self, tmp_path: Path) -> list[Row]:
        paths = sorted((tmp_path / "target").glob("epoch-*.jsonl"))
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]
