"""Runs a story under strace and reads what it did to the disk: writes, names, truncations and syncs, in order.

strace sees what Python cannot: SQLite, pyarrow and delta-rs write by themselves. A story may consist of several
processes, one after the other, which are read one by one.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_CALLS = (
    "openat,open,creat,close,dup,dup2,dup3,fcntl,lseek,write,pwrite64,writev,pwritev,ftruncate,truncate,fsync,fdatasync,"
    "rename,renameat,renameat2,link,linkat,unlink,unlinkat,mkdir,mkdirat,rmdir,copy_file_range,sendfile,fallocate,"
    "symlink,symlinkat,sync_file_range,chdir"
)
#: What a recorded process says about itself is written to this file; see ``tests.support.power.living``.
NOTES = "/dev/null"


def why_not() -> str:
    """Why nothing can be recorded here; empty if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed (Debian: apt-get install strace)"
    tried = subprocess.run(["strace", "-f", "-o", "/dev/null", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "this system does not let strace trace processes"


def record(command: list[str], trace: Path, *, environment: dict[str, str]) -> list[Path]:
    """Run a story; raises if it fails. Returns the trace of each of its processes."""
    strace = ["strace", "-f", "--seccomp-bpf", "-xx", "-s", "16000000", "-o", str(trace), "-e", f"trace={_CALLS}"]
    done = subprocess.run(
        [*strace, sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"the recorded process failed ({done.returncode}):\n{done.stderr[-3000:]}")
    return _of_each_process(trace)


def _of_each_process(trace: Path) -> list[Path]:
    """Cut the trace where a process begins; what comes before the first is the import of modules."""
    begins = "".join(f"\\x{byte:02x}" for byte in BEGINS)
    parts = [trace]
    with contextlib.ExitStack() as opened, open(trace, errors="replace") as lines:
        part = opened.enter_context(open(os.devnull, "w"))
        for line in lines:
            if begins in line:
                parts.append(trace.with_name(f"{trace.name}-{len(parts)}"))
                part = opened.enter_context(open(parts[-1], "w"))
            part.write(line)
    return parts[1:]


#: What a story writes to the notes before each of its processes begins.
BEGINS = b"<- the next process of the story ->"
#: The status of a recorded process that ended in the middle of something, as if it were killed.
KILLED = 77


class Call(NamedTuple):
    """One system call that succeeded. Its effect came between two moments, which are lines of the trace."""

    begun: int
    done: int
    thread: str
    name: str
    arguments: str
    result: int


_LINE = re.compile(r"^(\d+)\s+(.*)$")
_RESUMED = re.compile(r"^<\.\.\. \w+ resumed>(.*)$")
_END = re.compile(r"\)\s+= (-?\d+)(?:\s.*)?$")
_UNFINISHED = "<unfinished ...>"
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


def calls(trace: Path, first: int = 0) -> Iterator[Call]:
    """``first``: the number of the first line, for the processes of one story to follow one another."""
    waiting: dict[str, tuple[int, str]] = {}
    with open(trace, errors="replace") as lines:
        for number, line in enumerate(lines, first):
            match = _LINE.match(line.rstrip("\n"))
            if not match or match[2].startswith(("+++", "---")):
                continue
            thread, text, begun = match[1], match[2], number
            if text.endswith(_UNFINISHED):
                waiting[thread] = (number, text.removesuffix(_UNFINISHED))
                continue
            if resumed := _RESUMED.match(text):
                begun, head = waiting.pop(thread)
                text = head + resumed[1]
            end = _END.search(text, max(len(text) - 200, 0))
            if end is None or int(end[1]) < 0:
                continue
            name, _, arguments = text[: end.start()].partition("(")
            yield Call(begun, number, thread, name, arguments, int(end[1]))


def texts(arguments: str) -> list[bytes]:
    """The quoted arguments."""
    return [bytes.fromhex(found.replace("\\x", "")) for found in _TEXT.findall(arguments)]


# ---------------------------------------------------------------------- what happened


@dataclass(frozen=True, slots=True)
class Names:
    """Names changed in one atomic step: (folder, name, new entry or None)."""

    at: int
    changes: tuple[tuple[int, str, Entry | None], ...]


@dataclass(frozen=True, slots=True)
class Change:
    """A file's content changed: bytes at an offset, or a new size if ``data`` is None."""

    at: int
    file: int
    offset: int
    data: bytes | None
    thread: str = ""


@dataclass(frozen=True, slots=True)
class Sync:
    """A file or folder was synced: what had happened to it before ``begun`` is durable from ``done`` on."""

    begun: int
    done: int
    node: int
    is_folder: bool
    #: The calls in ``src`` that led to it, innermost last; empty for those of libraries.
    site: tuple[str, ...]
    path: str
    thread: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """What the recorded process said at a moment."""

    at: int
    text: str


class Entry(NamedTuple):
    is_folder: bool
    node: int


@dataclass(slots=True)
class _Open:
    """An open file description."""

    entry: Entry | None
    path: str
    appends: bool = False
    position: int = 0


@dataclass
class Recording:
    """What a story did below ``root``, which was empty at first."""

    root: str
    names: list[Names] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    #: As the process saw them at the end: folder → name → entry; file → content.
    folders: dict[int, dict[str, Entry]] = field(default_factory=lambda: {0: {}})
    contents: dict[int, bytearray] = field(default_factory=dict)
    #: Where a file or folder first got a name, for messages.
    paths: dict[int, str] = field(default_factory=dict)
    end: int = 0

    @classmethod
    def read(cls, root: Path, traces: list[Path]) -> Recording:
        recording = cls(os.path.realpath(root))
        for trace in traces:
            _Reader(recording).read(trace)
        return recording

    def moments(self) -> list[int]:
        """When something changed: a power cut in between leaves what one at the moment before does."""
        names, changes = {one.at for one in self.names}, {one.at for one in self.changes}
        return sorted(names | changes | {one.done for one in self.syncs})

    def new_node(self) -> int:
        return len(self.paths) + 1


class _Reader:
    """Reads one process's trace into a recording."""

    def __init__(self, recording: Recording) -> None:
        self._to = recording
        self._files: dict[int, _Open] = {}
        #: What a thread said about the sync that it does next.
        self._said: dict[str, tuple[str, ...]] = {}

    def read(self, trace: Path) -> None:
        """Calls of several threads overlap, and their order in the trace is not always that of their effects.

        What one thread has made, another may use before the trace shows that the first has returned; so a call takes
        effect when it begins. If it cannot yet, because what it needs is made by a call that began a moment later, it
        takes effect when it returns. A descriptor is used only after the open has returned.
        """
        found = list(calls(trace, self._to.end + 1))
        steps = [(call.begun, False, call) for call in found] + [(call.done, True, call) for call in found]
        postponed: set[int] = set()
        for at, is_return, call in sorted(steps, key=lambda step: step[:2]):
            try:
                if not is_return or call.begun in postponed:
                    self._perform(call, at)
            except LookupError:
                if is_return:
                    raise
                postponed.add(call.begun)
            if is_return:
                self._returned(call)
        self._to.end = max((call.done for call in found), default=self._to.end) + 1

    def _perform(self, call: Call, at: int) -> None:
        handler = getattr(self, f"on_{call.name}", None)
        if handler is not None:
            handler(call._replace(begun=at))

    # ------------------------------------------------------------------ paths

    def _resolve(self, at: str, path: bytes) -> tuple[int, str] | None:
        """The folder and the name in it; None if it is not below the root."""
        text = os.fsdecode(path)
        if not text.startswith("/"):
            holder = None if at.startswith("AT_FDCWD") or not at else self._files.get(int(at))
            if holder is None or holder.entry is None:
                return None
            return (holder.entry.node, text) if "/" not in text.rstrip("/") else None
        text = os.path.normpath(text)
        if not text.startswith(f"{self._to.root}/"):
            return None
        folder = 0
        *parents, name = text[len(self._to.root) + 1 :].split("/")
        for part in parents:
            entry = self._to.folders[folder].get(part)
            if entry is None or not entry.is_folder:
                raise LookupError(f"{part} in {text} is unknown")
            folder = entry.node
        return folder, name

    def _entry(self, at: str, path: bytes) -> Entry | None:
        if os.path.normpath(os.fsdecode(path)) == self._to.root:
            return Entry(True, 0)
        place = self._resolve(at, path)
        return None if place is None else self._to.folders[place[0]].get(place[1])

    def _change_names(self, at: int, *changes: tuple[int, str, Entry | None]) -> None:
        for folder, name, entry in changes:
            if entry is None:
                self._to.folders[folder].pop(name, None)
            else:
                self._to.folders[folder][name] = entry
                self._to.paths.setdefault(entry.node, f"{self._to.paths.get(folder, '')}/{name}")
        self._to.names.append(Names(at, changes))

    def _made(self, at: int, place: tuple[int, str], *, is_folder: bool) -> Entry:
        entry = Entry(is_folder, self._to.new_node())
        if is_folder:
            self._to.folders[entry.node] = {}
        else:
            self._to.contents[entry.node] = bytearray()
        self._change_names(at, (*place, entry))
        return entry

    # ------------------------------------------------------------------ descriptors

    def on_openat(self, call: Call) -> None:
        if not _may_change(call):
            return
        place = self._resolve(*_path(call))
        if place is None:
            return
        entry = self._to.folders[place[0]].get(place[1])
        if entry is None and "O_CREAT" in call.arguments:
            self._made(call.begun, place, is_folder=False)
        elif entry is not None and not entry.is_folder and "O_TRUNC" in call.arguments:
            self._set_size(call.begun, entry.node, 0)

    on_open = on_openat

    def _returned(self, call: Call) -> None:
        if call.name in ("openat", "open"):
            path = _path(call)
            try:
                entry = self._entry(*path)
            except LookupError:
                if _may_change(call):
                    raise
                entry = None  # a reader was faster than the renaming of a folder that began before
            self._files[call.result] = _Open(entry, os.fsdecode(path[1]), "O_APPEND" in call.arguments)
        elif call.name.startswith("dup") or "F_DUPFD" in call.arguments:
            self._files[call.result] = self._files.get(_number(call)) or _Open(None, "")

    def on_close(self, call: Call) -> None:
        self._files.pop(_number(call), None)

    def on_lseek(self, call: Call) -> None:
        if (opened := self._files.get(_number(call))) is not None:
            opened.position = call.result

    # ------------------------------------------------------------------ content

    def on_write(self, call: Call) -> None:
        opened = self._files.get(_number(call))
        if opened is None:
            return
        data = b"".join(texts(call.arguments))[: call.result]
        if opened.path == NOTES and opened.entry is None:
            self._noted(call, data.decode())
        elif opened.entry is not None:
            size = len(self._to.contents[opened.entry.node])
            offset = size if opened.appends else opened.position
            opened.position = offset + len(data)
            self._put(call, opened.entry.node, offset, data)

    on_writev = on_write

    def on_pwrite64(self, call: Call) -> None:
        opened = self._files.get(_number(call))
        if opened is not None and opened.entry is not None:
            offset = int(call.arguments.rsplit(",", 1)[1])
            self._put(call, opened.entry.node, offset, b"".join(texts(call.arguments))[: call.result])

    on_pwritev = on_pwrite64

    def on_sendfile(self, call: Call) -> None:
        out, source, offset, _ = call.arguments.split(", ", 3)
        self._copied(call, source, out, int(re.findall(r"\d+", offset)[0]) if offset != "NULL" else None, None)

    def on_copy_file_range(self, call: Call) -> None:
        source, at, out, to, *_ = call.arguments.split(", ")
        offsets = [None if one == "NULL" else int(re.findall(r"\d+", one)[0]) for one in (at, to)]
        self._copied(call, source, out, *offsets)

    def _copied(self, call: Call, source: str, out: str, at: int | None, to: int | None) -> None:
        one, other = self._files.get(int(source)), self._files.get(int(out))
        if other is None or other.entry is None or not call.result:
            return
        if one is None or one.entry is None:
            raise NotImplementedError(f"{other.path} is copied from outside of the recorded folder")
        begin, target = one.position if at is None else at, other.position if to is None else to
        data = bytes(self._to.contents[one.entry.node][begin : begin + call.result])
        one.position += call.result if at is None else 0
        other.position += call.result if to is None else 0
        self._put(call, other.entry.node, target, data)

    def _put(self, call: Call, file: int, offset: int, data: bytes) -> None:
        change = Change(call.begun, file, offset, data, call.thread)
        self._to.changes.append(change)
        apply(self._to.contents[file], change)

    def _set_size(self, at: int, file: int, size: int) -> None:
        change = Change(at, file, size, None)
        self._to.changes.append(change)
        apply(self._to.contents[file], change)

    def on_ftruncate(self, call: Call) -> None:
        opened = self._files.get(_number(call))
        if opened is not None and opened.entry is not None:
            self._set_size(call.begun, opened.entry.node, int(call.arguments.rsplit(",", 1)[1]))

    def on_truncate(self, call: Call) -> None:
        if (entry := self._entry("", texts(call.arguments)[0])) is not None:
            self._set_size(call.begun, entry.node, int(call.arguments.rsplit(",", 1)[1]))

    def on_fallocate(self, call: Call) -> None:
        opened = self._files.get(_number(call))
        if opened is not None and opened.entry is not None:
            raise NotImplementedError(f"{opened.path} is allocated in advance")

    # ------------------------------------------------------------------ syncs and notes

    def on_fsync(self, call: Call) -> None:
        opened = self._files.get(_number(call))
        site = self._said.pop(call.thread, ())
        if opened is not None and opened.entry is not None:
            entry = opened.entry
            path = self._to.paths.get(entry.node, "")
            self._to.syncs.append(Sync(call.begun, call.done, entry.node, entry.is_folder, site, path, call.thread))

    on_fdatasync = on_fsync

    def _noted(self, call: Call, text: str) -> None:
        if text.startswith(SITE):
            self._said[call.thread] = tuple(text.removeprefix(SITE).split(" "))
        else:
            self._to.notes.append(Note(call.begun, text))

    # ------------------------------------------------------------------ names

    def on_rename(self, call: Call) -> None:
        ats = _folders(call, 2)
        source, target = (self._resolve(at, path) for at, path in zip(ats, texts(call.arguments), strict=True))
        if source is None and target is None:
            return
        if source is None or target is None:
            raise NotImplementedError(f"renamed across the border of the recorded folder: {texts(call.arguments)}")
        entry = self._to.folders[source[0]].get(source[1])
        if entry is None:
            raise LookupError(f"something unknown is renamed: {texts(call.arguments)}: {call}")
        if source != target:
            self._change_names(call.begun, (*source, None), (*target, entry))

    on_renameat = on_renameat2 = on_rename

    def on_link(self, call: Call) -> None:
        ats = _folders(call, 2)
        source, target = texts(call.arguments)
        entry, place = self._entry(ats[0], source), self._resolve(ats[1], target)
        if place is not None:
            if entry is None:
                raise LookupError(f"{os.fsdecode(source)} has a second name, and no first one in the recording: {call}")
            self._change_names(call.begun, (*place, entry))

    on_linkat = on_link

    def on_unlink(self, call: Call) -> None:
        place = self._resolve(*_path(call))
        if place is not None:
            if place[1] not in self._to.folders[place[0]]:
                raise LookupError(f"something unknown is deleted: {call}")
            self._change_names(call.begun, (*place, None))

    on_unlinkat = on_rmdir = on_unlink

    def on_mkdir(self, call: Call) -> None:
        if (place := self._resolve(*_path(call))) is not None:
            self._made(call.begun, place, is_folder=True)

    on_mkdirat = on_mkdir

    def on_symlink(self, call: Call) -> None:
        if self._resolve("", texts(call.arguments)[-1]) is not None:
            raise NotImplementedError("a symbolic link")


#: How a note begins that names the call of the next sync of the same thread.
SITE = "site "


def apply(content: bytearray, change: Change) -> None:
    """Change a file's content."""
    if change.data is None:
        del content[change.offset :]
        content.extend(bytes(change.offset - len(content)))
        return
    content.extend(bytes(max(change.offset - len(content), 0)))
    content[change.offset : change.offset + len(change.data)] = change.data


def _number(call: Call) -> int:
    return int(re.match(r"-?\d+", call.arguments)[0])  # type: ignore[index]


def _may_change(call: Call) -> bool:
    """Whether opening a file may create or empty it."""
    return "O_CREAT" in call.arguments or "O_TRUNC" in call.arguments


def _path(call: Call) -> tuple[str, bytes]:
    return _folders(call, 1)[0], texts(call.arguments)[0]


def _folders(call: Call, count: int) -> list[str]:
    """The folder descriptors before the paths; empty for calls without."""
    found = re.findall(r'(AT_FDCWD|\d+), "', call.arguments)
    return found if len(found) == count else [""] * count


# ---------------------------------------------------------------------- the syncs in the source

#: What syncs a file or folder, and what syncs on the way to something else.
SYNCS = frozenset({"fsync", "fsync_dir", "fsync_file", "sync_tree"})
WRITES = frozenset({"create", "replace", "make_dir", "settle_dir"})


@dataclass(frozen=True, order=True)
class Site:
    """A call in the source."""

    module: str
    line: int
    function: str
    text: str

    @property
    def place(self) -> str:
        """As frames name it."""
        return f"{self.module}:{self.line}"

    @property
    def name(self) -> str:
        """As people name it, whatever line it is on."""
        return f"{self.module} {self.function}: {self.text}"


def sites(source: Path, names: Collection[str] = SYNCS) -> list[Site]:
    """Every call of these functions."""
    found: list[Site] = []
    for path in sorted(source.rglob("*.py")):
        module = path.relative_to(source).as_posix()
        if not module.startswith("testing/"):
            text = path.read_text()
            found += _sites_in(ast.parse(text), text, module, (), names)
    return sorted(found)


def _sites_in(node: ast.AST, text: str, module: str, inside: tuple[str, ...], names: Collection[str]) -> Iterator[Site]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        inside = (*inside, node.name)
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in names:
            yield Site(module, node.lineno, ".".join(inside), ast.get_source_segment(text, node) or "")
    for child in ast.iter_child_nodes(node):
        yield from _sites_in(child, text, module, inside, names)
