"""How a record is stored: JSON with a format version and a checksum, both checked on reading.

This is the one place that decodes records, and any of them may come from outside: from a savepoint that was handed
over, from a bucket. A checksum says that nothing was damaged by accident, not that Cutline wrote the record. So beyond
types and limits of the fields (``cutline.model.ids``), a type may say what its records never contain: ``problems``.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cutline.base.decoding import decoder_of
from cutline.base.names import UNTRUSTED, shown
from cutline.base.paths import NotPlainError, TooLargeError, read_plain
from cutline.errors import DamagedRecordError, UnknownFormatError

FORMAT_VERSION = 1
#: No record is larger: one of 100,000 files has about 20 MB.
MOST_BYTES = 256 << 20

#: What msgspec raises for bytes that are not such JSON; invalid UTF-8 and deep nesting have their own errors.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
#: The end of msgspec's messages: where in the record the problem is.
_FIELD = re.compile(r" - at `(?:key` in `)?\$?\.?(.*)`$")

T = TypeVar("T")


class _Envelope(msgspec.Struct, kw_only=True):
    format: int
    kind: str
    sha256: str
    body: msgspec.Raw


def encode(kind: str, body: Any) -> bytes:
    """The stored form of a record."""
    raw = msgspec.json.encode(body, order="deterministic")
    digest = hashlib.sha256(raw).hexdigest()
    return msgspec.json.encode(
        _Envelope(format=FORMAT_VERSION, kind=kind, sha256=digest, body=msgspec.Raw(raw)), order="deterministic"
    )


def decode(kind: str, data: bytes, type_: type[T], *, path: object = None, **where: object) -> T:
    """Decode stored bytes; raises rather than return anything that Cutline cannot have written.

    ``where``: what the caller knows, for the error: flow, epoch, operator.
    """
    place: dict[str, Any] = {**where, "path": path}
    if len(data) > MOST_BYTES:
        raise DamagedRecordError(f"{kind} record has {len(data)} bytes, the limit is {MOST_BYTES}", **place)
    try:
        envelope = decoder_of(_Envelope).decode(data)
    except _UNREADABLE as error:
        raise DamagedRecordError(f"not a readable {kind} record: {error}", **place) from error
    if envelope.format != FORMAT_VERSION:
        raise UnknownFormatError(
            f"{kind} record has format {envelope.format}, this version reads {FORMAT_VERSION}",
            next_step="use the version of Cutline that wrote it, or a newer one",
            **place,
        )
    if envelope.kind != kind:
        found = envelope.kind if envelope.kind.isidentifier() else shown(envelope.kind)
        raise DamagedRecordError(f"expected a {kind} record, found {found[:100]}", **place)
    if hashlib.sha256(envelope.body).hexdigest() != envelope.sha256:
        raise DamagedRecordError(f"{kind} record does not match its checksum", **place)
    try:
        value = decoder_of(type_).decode(envelope.body)
    except _UNREADABLE as error:
        raise _incomplete(kind, error, place) from error
    problems = getattr(value, "problems", None)
    for field, what in problems() if problems is not None else ():
        raise DamagedRecordError(
            f"{kind} record is not valid: {what}", next_step=UNTRUSTED, record=kind, field=field, **place
        )
    return value


def _incomplete(kind: str, error: Exception, place: dict[str, Any]) -> DamagedRecordError:
    """msgspec's message seldom quotes a value, but sometimes; the patterns in it help no reader."""
    text = str(error)
    found = _FIELD.search(text)
    what = text[: found.start()] if found else text
    if " matching regex " in what:
        what = "it has a name that Cutline gives to nothing"
    elif what.startswith("Invalid "):
        what = f"invalid value {shown(what.partition(' value ')[2])}"
    return DamagedRecordError(
        f"{kind} record is incomplete or not valid: {what}",
        next_step=UNTRUSTED,
        record=kind,
        field=found[1] or None if found else None,
        **place,
    )


def check_identity(kind: str, found: object, expected: object, *, path: object = None, **where: object) -> None:
    """Raise unless a record is the one that its place says: a copy under another number would be taken for that one."""
    if found != expected:
        raise DamagedRecordError(
            f"{kind} record is that of {shown(found)}, at the place of {shown(expected)}",
            next_step=UNTRUSTED,
            record=kind,
            path=path,
            **where,
        )


def kind_of(data: bytes) -> str | None:
    """The kind that stored bytes state; None when they are not a record."""
    try:
        return decoder_of(_Envelope).decode(data).kind
    except _UNREADABLE:
        return None


def is_whole(data: bytes) -> bool:
    """Whether stored bytes are a record of any kind that matches its checksum."""
    try:
        envelope = decoder_of(_Envelope).decode(data)
    except _UNREADABLE:
        return False
    return hashlib.sha256(envelope.body).hexdigest() == envelope.sha256


def checksum(data: bytes) -> str:
    """Identifies the stored form of a record."""
    return hashlib.sha256(data).hexdigest()


def load(kind: str, path: Path, type_: type[T], **where: Any) -> T:
    """Read and check a record file; a missing file is damage too, since the caller knows it must be there."""
    return decode(kind, read(kind, path, **where), type_, path=path, **where)


def read(kind: str, path: Path, **where: Any) -> bytes:
    """The bytes of a record file, not checked yet."""
    try:
        return read_plain(path, MOST_BYTES)
    except FileNotFoundError as error:
        raise DamagedRecordError(f"{kind} record is missing", path=path, **where) from error
    except (NotPlainError, TooLargeError, IsADirectoryError) as error:
        raise DamagedRecordError(f"{kind} record cannot be read: {error.strerror}", path=path, **where) from error
