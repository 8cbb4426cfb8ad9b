"""Errors of an operator's function in a few lines: its own exception and line first; the whole trace in a file."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from cutline.base.traces import cause_of, store_trace
from cutline.errors import CutlineError, FlowDefinitionError
from cutline.model.ids import FlowName, OperatorId


@contextlib.contextmanager
def failing_function(flow: FlowName, operator: OperatorId, traces: Path) -> Iterator[None]:
    """While an operator is planned: raise what goes wrong as an error that names the flow and the operator."""
    try:
        yield
    except CutlineError as error:
        error.add_where(flow=flow, operator=operator)
        raise
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        raise FlowDefinitionError(
            f"{cause_of(error)}, raised by the operator's function",
            next_step=_next_step(error),
            flow=flow,
            operator=operator,
            trace=store_trace(traces, operator, trace),
        ) from error


def _next_step(error: Exception) -> str:
    if isinstance(error, ImportError) and "pandas" in str(error).lower():
        return "python -m pip install 'cutline[pandas]', on the executors too"
    return "correct the function, then start the flow again"
