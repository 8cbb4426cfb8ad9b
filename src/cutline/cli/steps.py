"""Shows the steps of something that takes a while: as a small table that changes, or as one plain line per step."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cutline.cli.words import size

_REFRESHES_PER_SECOND = 8
_TURNING = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


@dataclass(slots=True)
class _Taken:
    """A step that has begun."""

    name: str
    detail: str
    began_s: float
    ended_s: float | None = None
    size_bytes: int = 0
    of_bytes: int = 0
    #: False: an error or a signal has ended it.
    is_done: bool = True

    def told(self) -> str:
        if not self.of_bytes:
            return self.detail
        is_done = self.ended_s is not None or self.size_bytes >= self.of_bytes
        amount = size(self.of_bytes) if is_done else f"{size(self.size_bytes)} of {size(self.of_bytes)}"
        return f"{self.detail}, {amount}"

    def seconds(self, now_s: float) -> float:
        return (now_s if self.ended_s is None else self.ended_s) - self.began_s


class Steps:
    """The steps of one command. Use it with ``with``; any thread may tell it something.

    In a terminal it is gone when it ends without an error: what comes next says more. Otherwise every step is a line
    when it begins, and a last line says how long each took.
    """

    def __init__(
        self,
        title: str,
        names: Sequence[str],
        *,
        console: Console | None,
        say: Callable[[str], None] = lambda line: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``names``: the steps that are expected, in their order. ``console``: a terminal; None: ``say`` gets lines."""
        self._title = title
        self._names = list(names)
        self._say = say
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._taken: list[_Taken] = []
        self._footer = ""
        self._live: Live | None = None
        if console is not None:
            self._live = Live(
                self,
                console=console,
                refresh_per_second=_REFRESHES_PER_SECOND,
                transient=True,
                # What a flow's file prints stands above the table.
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=False,
            )

    def __enter__(self) -> Steps:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_step(is_done=error is None)
        if self._live is not None:
            self._live.transient = error is None
            self._live.stop()
        elif error is None:
            self._say(self._summary())

    # ------------------------------------------------------------------ what happens

    def begin(self, step: str, detail: str = "") -> None:
        """The next step begins."""
        self._end_step()
        with self._lock:
            self._taken.append(_Taken(step, detail, self._monotonic()))
        if self._live is None:
            self._say(f"{self._title}: {step}{f' ({detail})' if detail else ''}")

    def tell(self, detail: str, of_bytes: int = 0) -> None:
        with self._lock:
            if self._taken:
                now = self._taken[-1]
                now.detail, now.of_bytes, now.size_bytes = detail, of_bytes, 0

    def add_bytes(self, size_bytes: int) -> None:
        with self._lock:
            if self._taken:
                self._taken[-1].size_bytes += size_bytes

    def name(self, footer: str) -> None:
        """A line below the table, for example where the log is."""
        with self._lock:
            self._footer = footer

    def _end_step(self, *, is_done: bool = True) -> None:
        with self._lock:
            if self._taken and self._taken[-1].ended_s is None:
                self._taken[-1].ended_s, self._taken[-1].is_done = self._monotonic(), is_done

    def _summary(self) -> str:
        with self._lock:
            if not self._taken:
                return f"{self._title}: nothing to do"
            now_s = self._monotonic()
            parts = [f"{one.name} {one.seconds(now_s):.1f} s" for one in self._taken]
            told = "; ".join(f"{one.name}: {one.told()}" for one in self._taken if one.told())
            whole = f"{self._title}: done in {now_s - self._taken[0].began_s:.1f} s ({', '.join(parts)})"
        return f"{whole}; {told}" if told else whole

    # ------------------------------------------------------------------ the table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._lock:
            taken = [_Taken(one.name, one.told(), one.began_s, one.ended_s, is_done=one.is_done) for one in self._taken]
            footer = self._footer
        now_s = self._monotonic()
        yield Text.assemble((self._title, "bold"), ("  Ctrl-C ends it", "dim"))
        table = Table.grid(padding=(0, 1))
        table.add_column(width=1)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(overflow="fold")
        for one in taken:
            mark, style = self._mark(one, now_s)
            seconds = Text(f"{one.seconds(now_s):.1f} s", style="dim")
            table.add_row(*map(Text.copy, (Text(mark, style=style), Text(one.name), seconds, Text(one.detail))))
        for name in self._names[len(taken) :]:
            table.add_row(Text(), Text(name, style="dim"))
        yield table
        if footer:
            yield Text(footer, style="dim", overflow="fold")

    def _mark(self, one: _Taken, now_s: float) -> tuple[str, str]:
        """A sign and its colour."""
        if one.ended_s is None:
            return _TURNING[int(now_s * _REFRESHES_PER_SECOND) % len(_TURNING)], "green"
        return ("✓", "green") if one.is_done else ("✗", "red")
