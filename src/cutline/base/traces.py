"""Errors in one line, and their whole traces in files.

The line says what went wrong and where in the user's own code; it comes from an exception or from the text of a trace.
Of the files few are kept, each of limited size.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

from cutline.base import durable
from cutline.base.redaction import without_secrets

#: Newest traces that are kept in a folder.
KEPT = 20
#: Of a longer trace the middle is left out: the first and the last lines say what happened.
MOST_BYTES = 256 << 10
#: What differs from one time to the next: the ids of a query's run, addresses of objects, numbers.
_DIFFERING = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?:0x|@)[0-9a-f]+|\d+")


def store_trace(folder: Path, name: str, text: str) -> Path | None:
    """Store a trace; None if that is not possible: an error must be reported on a full disk too.

    ``name``: what failed. The same failure again replaces its trace, so a query that is restarted stores one.
    """
    same = hashlib.sha256(_DIFFERING.sub("", text).encode(errors="replace")).hexdigest()[:8]
    path = folder / f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:80]}-{same}.txt"
    try:
        durable.make_dir(folder)
        durable.replace(path, _limited(without_secrets(text).encode(errors="backslashreplace")), sync=False)
        _collect(folder, keep=path)
    except OSError:
        return None
    return path


def _limited(data: bytes) -> bytes:
    if len(data) <= MOST_BYTES:
        return data
    half = MOST_BYTES // 2
    return data[:half] + f"\n… {len(data) - 2 * half} bytes are left out …\n".encode() + data[-half:]


def _collect(folder: Path, *, keep: Path) -> None:
    aged: list[tuple[int, Path]] = []
    for path in folder.glob("*.txt"):
        with contextlib.suppress(FileNotFoundError):  # another process collects too
            aged.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(aged)[:-KEPT]:
        if path != keep:
            path.unlink(missing_ok=True)


# ------------------------------------------------------------------ the cause

#: A message may hold a whole query plan.
MOST_CHARACTERS = 500

_OURS = str(Path(__file__).parents[1])
_LIBRARIES = tuple({_OURS, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))})
_HEAD = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
#: The last line of a trace: the class of the exception, mostly with a message.
_RAISED = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")
#: How Spark says which call of the user built a failed expression.
_CALLED_FROM = re.compile(r"was called from\s+(?P<file>\S+):(?P<line>\d+)")
_CAUSED_BY = re.compile(r"^Caused by: (?P<kind>[\w.$]+)(?:: (?P<message>.*))?$", re.MULTILINE)
_SQLSTATE = re.compile(r"\s*SQLSTATE: \w+\s*$")


@dataclass(frozen=True, slots=True)
class Cause:
    """The exception that a person has to look at."""

    what: str
    #: File and line in code that is no library's; empty: not known.
    at: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({self.at})" if self.at else self.what


def cause_of(error: BaseException) -> Cause:
    """The cause of an exception as it was raised in this process."""
    if isinstance(error, SyntaxError) and error.filename:
        return Cause(_line(type(error).__name__, error.msg or ""), _at(error.filename, error.lineno or 0, ""))
    frames = [(one.filename, one.lineno or 0, one.name) for one in traceback.extract_tb(error.__traceback__)]
    own = [frame for frame in frames if not _is_library(frame[0])]
    return Cause(_line(type(error).__name__, str(error)), _at(*own[-1]) if own else "")


def cause_in(text: str) -> Cause:
    """The cause that the text of a trace names: its last Python exception, or else the last of Java's causes.

    An exception on an executor reaches the driver only as text, inside of the texts of other exceptions.
    """
    start = text.rfind(_HEAD)
    if start >= 0:
        found = _in_traceback(text[start + len(_HEAD) :].splitlines())
        # The frames of the last exception may all be a library's; those before it led there.
        own = found[1] or _own_frame(text.splitlines())
        if found[0]:
            return Cause(found[0], own)
    causes = list(_CAUSED_BY.finditer(text))
    if causes:
        return Cause(_line(causes[-1]["kind"], causes[-1]["message"] or ""), _own_frame(text.splitlines()))
    first = next((line.strip() for line in text.splitlines() if line.strip()), "an unknown error")
    return Cause(_short(first), _own_frame(text.splitlines()))


def _in_traceback(lines: list[str]) -> tuple[str, str]:
    """The exception at the end of the frames, and the last frame that is no library's."""
    is_in_frames = False
    for number, line in enumerate(lines):
        if _FRAME.match(line):
            is_in_frames = True
        elif is_in_frames and line and not line[0].isspace() and (raised := _RAISED.match(line)):
            own = _own_frame(lines[:number]) or _own_frame(lines[number:])
            return _line(raised["kind"], raised["message"] or ""), own
    return "", ""


def _own_frame(lines: list[str]) -> str:
    found = ""
    for line in lines:
        frame = _FRAME.match(line)
        if frame is not None and not _is_library(frame["file"]):
            found = _at(frame["file"], int(frame["line"]), frame["function"] or "")
    if not found and (called := _CALLED_FROM.search("\n".join(lines))):
        found = _at(called["file"], int(called["line"]), "")
    return found


def _is_library(file: str) -> bool:
    # Executors may have their packages elsewhere than this process.
    return file.startswith(("<", *_LIBRARIES)) or "site-packages" in file or "/pyspark/" in file or "/py4j/" in file


def _at(file: str, line: int, function: str) -> str:
    return f"{file}, line {line}" + (f", in {function}" if function and function != "<module>" else "")


def _line(kind: str, message: str) -> str:
    name = kind.rpartition(".")[2]
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return _short(f"{name}: {_SQLSTATE.sub('', first)}" if first else name)


def _short(text: str) -> str:
    text = without_secrets(text)
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"
