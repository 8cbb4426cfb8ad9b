"""The README's flow does what the README says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cutline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.spark
def test_the_flow_of_the_readme_publishes_totals_to_delta(spark: SparkSession, tmp_path: Path) -> None:
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "flow.sink" in block]
    folders = {name: tmp_path / "in" / name for name in ("cards", "upi")}
    for number, folder in enumerate(folders.values()):
        folder.mkdir(parents=True)
        rows = [{"merchant": f"shop-{row % 3}", "amount": row + number} for row in range(10)]
        (folder / "1.json").write_text("\n".join(map(json.dumps, rows)))
    names: dict[str, object] = {"__name__": "readme"}
    exec(
        compile(code.replace('"in/', f'"{tmp_path}/in/').replace('"out/', f'"{tmp_path}/out/'), str(README), "exec"),
        names,
    )
    flow = names["flow"]
    assert isinstance(flow, cutline.Flow)

    run = flow.start(spark=spark, storage=str(tmp_path / "storage"), checkpoint_interval=0)
    run.process_all_available()
    run.trigger_checkpoint()
    run.stop()

    found = cutline.read(cutline.sinks.Delta(tmp_path / "out" / "totals"))
    expected = {f"shop-{shop}": sum(2 * row + 1 for row in range(10) if row % 3 == shop) for shop in range(3)}
    assert dict(zip(*found.to_arrow().to_pydict().values(), strict=True)) == expected
    assert {row.merchant: row.amount for row in found.to_spark(spark).collect()} == expected
