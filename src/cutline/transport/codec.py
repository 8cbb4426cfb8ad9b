"""Messages as bytes: versioned JSON in which every message names its type.

The decoder rejects what it does not know: a newer version, an unknown type, a missing field.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from cutline.base.decoding import decoder_of
from cutline.errors import DamagedRecordError
from cutline.protocol.link import Envelope
from cutline.protocol.messages import wire

VERSION = 1

#: Every message that crosses a process boundary, by its name on the wire.
MESSAGES: dict[str, type[Any]] = {
    message.__name__: message
    for union in (wire.ToOperator, wire.ToCoordinator, wire.Credit)
    for message in get_args(union)
}


class _Numbers(msgspec.Struct, frozen=True):
    """An envelope without its payload."""

    sender_session: int
    receiver_session: int
    seq: int
    base: int
    received: int


class _Frame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    version: int
    #: None: a message outside the numbered links.
    envelope: _Numbers | None = None
    #: None: an envelope that only acknowledges.
    type: str | None = None
    body: msgspec.Raw = msgspec.Raw(b"null")


def encode(content: Envelope[Any] | wire.Credit) -> bytes:
    """An envelope with its payload, or a message outside the numbered links."""
    if not isinstance(content, Envelope):
        return msgspec.json.encode(_framed(content, None))
    numbers = _Numbers(
        sender_session=content.sender_session,
        receiver_session=content.receiver_session,
        seq=content.seq,
        base=content.base,
        received=content.received,
    )
    return msgspec.json.encode(_framed(content.payload, numbers))


def _framed(message: object | None, envelope: _Numbers | None) -> _Frame:
    if message is None:
        return _Frame(version=VERSION, envelope=envelope)
    name = type(message).__name__
    if MESSAGES.get(name) is not type(message):
        raise TypeError(f"{name} is not a message that crosses a process boundary")
    return _Frame(version=VERSION, envelope=envelope, type=name, body=msgspec.Raw(msgspec.json.encode(message)))


def decode(data: bytes) -> Any:
    """The content that ``encode`` was given. Raises DamagedRecordError for anything else."""
    try:
        frame = decoder_of(_Frame).decode(data)
        if frame.version != VERSION:
            raise DamagedRecordError(f"the message has version {frame.version}; this side reads version {VERSION}")
        if frame.type is not None and frame.type not in MESSAGES:
            raise DamagedRecordError(f"the message has the unknown type {frame.type}")
        message = decoder_of(MESSAGES[frame.type]).decode(frame.body) if frame.type is not None else None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedRecordError(f"not a message: {error}") from error
    if frame.envelope is None:
        if message is None:
            raise DamagedRecordError("neither an envelope nor a message")
        return message
    numbers = frame.envelope
    return Envelope(
        sender_session=numbers.sender_session,
        receiver_session=numbers.receiver_session,
        seq=numbers.seq,
        base=numbers.base,
        received=numbers.received,
        payload=message,
    )
