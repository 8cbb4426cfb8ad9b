"""How a record is stored: JSON with a format version and a checksum, both checked on reading."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cutline.base.decoding import decoder_of
from cutline.errors import DamagedRecordError, UnknownFormatError

FORMAT_VERSION = 1

#: What msgspec raises for bytes that are not such JSON; invalid UTF-8 has its own error.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError)

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


def decode(kind: str, data: bytes, type_: type[T], *, path: object = None) -> T:
    """Decode stored bytes; raises rather than return anything that is not exactly what was written."""
    try:
        envelope = decoder_of(_Envelope).decode(data)
    except _UNREADABLE as error:
        raise DamagedRecordError(f"not a readable {kind} record: {error}", path=path) from error
    if envelope.format != FORMAT_VERSION:
        raise UnknownFormatError(
            f"{kind} record has format {envelope.format}, this version reads {FORMAT_VERSION}",
            next_step="use the version of Cutline that wrote it, or a newer one",
            path=path,
        )
    if envelope.kind != kind:
        raise DamagedRecordError(f"expected a {kind} record, found {envelope.kind}", path=path)
    if hashlib.sha256(envelope.body).hexdigest() != envelope.sha256:
        raise DamagedRecordError(f"{kind} record does not match its checksum", path=path)
    try:
        return decoder_of(type_).decode(envelope.body)
    except _UNREADABLE as error:
        raise DamagedRecordError(f"{kind} record is incomplete: {error}", path=path) from error


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


def load(kind: str, path: Path, type_: type[T]) -> T:
    """Read and check a record file; a missing file is damage too, since the caller knows it must be there."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise DamagedRecordError(f"{kind} record is missing", path=path) from error
    return decode(kind, data, type_, path=path)
