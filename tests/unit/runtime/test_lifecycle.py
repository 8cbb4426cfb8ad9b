"""Errors that no part can handle reach whoever responds, also when they come first."""

from __future__ import annotations

from cutline.runtime.lifecycle import FailureSink


def test_the_first_error_from_before_anything_responds_is_passed_on_once() -> None:
    sink, heard = FailureSink(), list[BaseException]()
    first, second, third = ValueError("first"), ValueError("second"), ValueError("third")
    sink.fatal(first)
    sink.fatal(second)
    assert heard == []
    sink.register(on_fatal=heard.append)
    assert heard == [first]
    sink.fatal(third)
    assert heard == [first, third]
