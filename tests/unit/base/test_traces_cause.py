"""The user's own exception and line, from exceptions and from the texts in which Spark wraps them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cutline.base.traces import MOST_CHARACTERS, Cause, cause_in, cause_of

#: As a query reports a UDF that raised.
OF_A_UDF = """An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/py4j/clientserver.py", line 644, in _call_proxy
    return_value = getattr(self.pool[obj_id], method)(*params)
                   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/venv/lib/python3.11/site-packages/pyspark/sql/utils.py", line 166, in call
    raise e
pyspark.errors.exceptions.captured.PythonException: An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/flows/flow.py", line 12, in broken
    raise ValueError(f"bad row {a}")
  File "/venv/lib/python3.11/site-packages/numpy/core.py", line 3, in add
    raise ValueError("bad row 1")
ValueError: bad row 1
more of the message
 SQLSTATE: 39000
\tat org.apache.spark.sql.execution.streaming.sources.ForeachBatchSink.callBatchWriter(ForeachBatchSink.scala:60)
"""
#: As a query reports an expression that failed.
OF_AN_EXPRESSION = """An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/pyspark/errors/exceptions/captured.py", line 262, in deco
    raise converted from None
pyspark.errors.exceptions.captured.ArithmeticException: [DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012
== DataFrame ==
"selectExpr" was called from
/flows/flow.py:10
"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (OF_A_UDF, Cause("ValueError: bad row 1", "/flows/flow.py, line 12, in broken")),
        (
            OF_AN_EXPRESSION,
            Cause("ArithmeticException: [DIVIDE_BY_ZERO] Division by zero.", "/flows/flow.py, line 10"),
        ),
        ("Job aborted.\nCaused by: java.io.IOException: No space left\n\tat x", Cause("IOException: No space left")),
        ("Job aborted.\n\tat org.x", Cause("Job aborted.")),
        ("Traceback (most recent call last):\n", Cause("Traceback (most recent call last):")),
        ("", Cause("an unknown error")),
    ],
)
def test_the_cause_is_found_in_the_text_of_a_trace(text: str, cause: Cause) -> None:
    assert cause_in(text) == cause


def test_a_cause_shows_no_secret() -> None:
    said = "cannot connect to postgresql://bob:hunter2@db/x"
    in_python = f'Traceback (most recent call last):\n  File "shop.py", line 3, in keyed\nOperationalError: {said}\n'
    causes = [cause_in(text) for text in (in_python, f"Job aborted.\nCaused by: java.lang.X: {said}", said)]
    assert not [cause for cause in [*causes, cause_of(ValueError(said))] if "hunter2" in str(cause)]


def test_a_long_message_is_cut() -> None:
    assert len(cause_in("x" * 10_000).what) == MOST_CHARACTERS


def test_the_line_is_that_of_the_users_code_and_not_of_a_library() -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    cause = cause_of(caught.value)
    assert cause.what.startswith("JSONDecodeError: Expecting property name")
    assert cause.at.startswith(__file__) and cause.at.endswith(
        "in test_the_line_is_that_of_the_users_code_and_not_of_a_library"
    )


def test_a_syntax_error_has_the_line_that_it_names(tmp_path: Path) -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("x = (\n", "flow.py", "exec")
    assert cause_of(caught.value) == Cause("SyntaxError: '(' was never closed", "flow.py, line 1")


def test_an_exception_without_a_message_or_frames_has_its_name() -> None:
    assert str(cause_of(KeyError())) == "KeyError"
