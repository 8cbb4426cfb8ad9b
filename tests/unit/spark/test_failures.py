"""Errors of an operator's function name what to do next."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import PySparkImportError

from cutline.errors import FlowDefinitionError
from cutline.model.ids import FlowName, OperatorId
from cutline.spark.failures import failing_function


def told(error: Exception, traces: Path) -> str:
    with (
        pytest.raises(FlowDefinitionError) as raised,
        failing_function(FlowName("payments"), OperatorId("totals"), traces),
    ):
        raise error
    return str(raised.value)


def test_a_function_that_needs_pandas_is_told_the_extra(tmp_path: Path) -> None:
    missing = PySparkImportError(
        errorClass="PACKAGE_NOT_INSTALLED", messageParameters={"package_name": "Pandas", "minimum_version": "2.2.0"}
    )
    assert "pip install 'cutline[pandas]'" in told(missing, tmp_path)
    assert "pip install 'cutline[pandas]'" in told(ModuleNotFoundError("No module named 'pandas'"), tmp_path)


def test_any_other_error_is_the_functions_own(tmp_path: Path) -> None:
    assert "correct the function" in told(ModuleNotFoundError("No module named 'rules'"), tmp_path)
    assert "correct the function" in told(ValueError("pandas"), tmp_path)
