"""What a record may say beyond the types of its fields. Pure.

Records come from other machines: in savepoints, in exported folders, in buckets. What they name becomes a path, what
they count becomes a loop. So what no checkpoint of ours holds is refused when the record is decoded, before any other
code sees it: ``cutline.base.records`` calls these rules through a record's ``problems``.
"""

from __future__ import annotations

import binascii
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cutline.base.names import are_relative, is_name, is_relative, shown

if TYPE_CHECKING:
    from cutline.model.checkpoint import SnapshotFile
    from cutline.model.generation import Spans
    from cutline.model.ids import Epoch, OperatorId, Position, SinkId

_HEX = b"0123456789abcdef"
_HASH_CHARS = 64
#: Entries between the readers' positions and the barriers, over all channels: each is a file of its own.
MOST_IN_FLIGHT = 100_000_000
#: Of JSON that only a sink understands. A deeper one could be decoded here and fail elsewhere, on a fuller stack.
_MOST_DEPTH = 32
_MOST_DIGITS = 18


class Problem(NamedTuple):
    """What is wrong with a record, and in which field."""

    field: str
    what: str


def of_files(files: Sequence[SnapshotFile]) -> Iterator[Problem]:
    """Files of one directory: each stays in it, none is in the way of another, each is named by a hash."""
    paths = [file.path for file in files]
    yield from of_paths("files", paths)
    hashes = [file.sha256 for file in files]
    if not _are_hashes(hashes):
        found = next(one for one in hashes if not _are_hashes([one]))
        yield Problem("files.sha256", f"{shown(found)} is not a SHA-256 hash")
    for file in files:
        if (content := file.content) is not None and len(content) != file.size_bytes:
            yield Problem("files.size_bytes", f"{shown(file.path)} has {len(content)} bytes, not {file.size_bytes}")


def _are_hashes(texts: Sequence[str]) -> bool:
    joined = "".join(texts)
    return set(map(len, texts)) <= {_HASH_CHARS} and joined.isascii() and not joined.encode().translate(None, _HEX)


def of_published(published: Mapping[SinkId, Epoch], epoch: Epoch) -> Iterator[Problem]:
    """How far sinks had published when an epoch was completed: no sink publishes it, or a later one, before that."""
    for sink, reached in published.items():
        if reached >= epoch:
            yield Problem(f"published.{sink}", f"epoch {reached} does not come before epoch {epoch}")


def of_paths(field: str, paths: Sequence[str]) -> Iterator[Problem]:
    """Relative paths: none leads out of its folder, none occurs twice, none is a folder of another."""
    if not are_relative(paths):
        found = next((path for path in paths if not is_relative(path)), "")
        yield Problem(field, f"{shown(found)} is not a relative path without tricks")
        return
    distinct = set(paths)
    if len(distinct) != len(paths):
        yield Problem(field, "a path occurs twice")
        return
    folders, deeper = set[str](), {path.rpartition("/")[0] for path in distinct}
    while deeper:
        folders |= deeper
        deeper = {folder.rpartition("/")[0] for folder in deeper} - folders
    if both := distinct & folders:
        yield Problem(field, f"{shown(min(both))} is both a file and a folder")


def of_names(field: str, names: Sequence[str]) -> Iterator[Problem]:
    """Names of files in one folder, each once."""
    if not are_relative(names) or "/" in "".join(names):
        found = next((name for name in names if not is_name(name)), "")
        yield Problem(field, f"{shown(found)} is not the name of a file")
        return
    yield from of_unique(field, names)


def of_unique(field: str, values: Sequence[object]) -> Iterator[Problem]:
    if len(set(values)) != len(values):
        yield Problem(field, "a value occurs twice")


def of_spans(field: str, spans: Spans) -> Iterator[Problem]:
    """The spans of a lineage: at least one, with strictly ascending generations and starts that never decrease."""
    if not spans:
        yield Problem(field, "the lineage is empty")
        return
    for (generation, start), (later, later_start) in itertools.pairwise(spans):
        if later <= generation or later_start < start:
            yield Problem(field, f"the spans do not ascend at generation {later}")
            return


def of_channels(
    cuts: Mapping[OperatorId, tuple[Position, Mapping[OperatorId, Position]]],
    channels: Mapping[OperatorId, tuple[Position, Spans]],
) -> Iterator[Problem]:
    """The logs of a checkpoint: which entries a restore reads follows from them.

    ``cuts``: per operator, the barrier in its own log and how far it has read others'. ``channels``: barrier and
    lineage of each log.
    """
    first = {name: barrier for name, (barrier, _) in cuts.items()}
    for _, read in cuts.values():
        for name, position in read.items():
            first[name] = min(position, first.get(name, position))
    in_flight = 0
    for name, (barrier, spans) in channels.items():
        field = f"channels.{name}"
        if name not in cuts:
            yield Problem(field, "no operator of the checkpoint writes it")
            return
        if cuts[name][0] != barrier:
            yield Problem(field, f"its barrier is at {barrier}, the operator's at {cuts[name][0]}")
            return
        yield from of_spans(f"{field}.lineage", spans)
        if spans and spans[0][1] > first[name]:
            yield Problem(f"{field}.lineage", f"it begins after position {first[name]}, which a restore reads")
        in_flight += barrier - first[name]
    if in_flight > MOST_IN_FLIGHT:
        yield Problem("channels", f"{in_flight} entries are in flight, the limit is {MOST_IN_FLIGHT}")
    for name, (_, read) in cuts.items():
        for channel, position in read.items():
            if channel in cuts and position > cuts[channel][0]:
                yield Problem(f"operators.{name}.positions", f"it has read {channel} past the barrier")


def of_numbers(field: str, texts: Iterable[str]) -> Iterator[Problem]:
    """Keys that are numbers, as text."""
    for text in texts:
        if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
            yield Problem(field, f"{shown(text)} is not a number")


def of_base64(field: str, encoded: str) -> Iterator[Problem]:
    try:
        binascii.a2b_base64(encoded, strict_mode=True)
    except ValueError:
        yield Problem(field, "it is not base64")


def of_json(field: str, value: Any) -> Iterator[Problem]:
    """JSON whose meaning only a sink knows."""
    if _is_deeper(value, _MOST_DEPTH):
        yield Problem(field, f"it is nested more than {_MOST_DEPTH} levels deep")


def _is_deeper(value: Any, levels: int) -> bool:
    if isinstance(value, dict):
        inner: Any = value.values()
    elif isinstance(value, list):
        inner = value
    else:
        return False
    return levels == 0 or any(_is_deeper(one, levels - 1) for one in inner if isinstance(one, dict | list))
