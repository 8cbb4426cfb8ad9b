"""Every message that crosses a process boundary comes out as it went in."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutline.errors import DamagedRecordError
from cutline.model.cut import InFlight
from cutline.model.ids import (
    MOST,
    NAME,
    BatchId,
    Epoch,
    FlowName,
    Generation,
    OperatorId,
    Position,
    SinkId,
    Subtask,
)
from cutline.protocol.link import Envelope
from cutline.protocol.messages import wire
from cutline.transport import codec

#: JSON numbers are exact in msgspec up to 64 bits; times, positions and epochs stay far below.
NUMBERS = st.integers(-(2**63), 2**63 - 1)
#: Ids have limits of their own.
COUNTS = st.integers(0, MOST)
NAMES = st.from_regex(NAME)

for number_type in (Epoch, Generation, Position, Subtask):
    st.register_type_strategy(number_type, COUNTS)
st.register_type_strategy(BatchId, st.integers(-1, MOST))
for name_type in (FlowName, OperatorId, SinkId):
    st.register_type_strategy(name_type, NAMES)
st.register_type_strategy(int, NUMBERS)
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
st.register_type_strategy(Mapping, lambda of: st.dictionaries(*(st.from_type(one) for one in get_args(of)), max_size=3))
st.register_type_strategy(
    InFlight, st.builds(InFlight, first=COUNTS, end=COUNTS, entries=NUMBERS, rows=NUMBERS | st.none())
)

EVERY_MESSAGE = sorted(codec.MESSAGES.values(), key=lambda one: one.__name__)


def envelopes(payloads: st.SearchStrategy[Any]) -> st.SearchStrategy[Envelope[Any]]:
    numbers = st.integers(0, 2**62)
    return st.builds(
        Envelope,
        sender_session=numbers,
        receiver_session=numbers,
        seq=numbers,
        base=numbers,
        received=numbers,
        payload=payloads,
    )


@pytest.mark.parametrize("message_type", EVERY_MESSAGE, ids=lambda one: one.__name__)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_message_comes_out_as_it_went_in(message_type: type[Any], data: st.DataObject) -> None:
    envelope = data.draw(envelopes(st.from_type(message_type)))
    decoded = codec.decode(codec.encode(envelope))
    assert decoded == envelope
    assert type(decoded.payload) is message_type


@pytest.mark.parametrize("message_type", get_args(wire.Credit), ids=lambda one: one.__name__)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_credit_travels_outside_the_numbered_links(message_type: type[Any], data: st.DataObject) -> None:
    message = data.draw(st.from_type(message_type))
    assert codec.decode(codec.encode(message)) == message


def test_an_envelope_that_only_acknowledges_comes_out_as_it_went_in() -> None:
    envelope: Envelope[Any] = Envelope(sender_session=1, receiver_session=2, seq=0, base=4, received=5)
    assert codec.decode(codec.encode(envelope)) == envelope


def test_every_union_of_messages_can_be_encoded() -> None:
    """A message that is added to the wire is known to the codec; one that is defined there is part of a union."""
    unions = [value for value in vars(wire).values() if isinstance(value, UnionType)]
    in_unions = {message for union in unions for message in get_args(union)}
    assert in_unions == set(codec.MESSAGES.values())
    defined = {one for one in vars(wire).values() if isinstance(one, type) and one.__module__ == wire.__name__}
    assert defined <= in_unions, "defined for the wire, and part of no union"


def test_another_object_is_not_a_message() -> None:
    stranger: Any = InFlight(first=Position(0), end=Position(1))
    with pytest.raises(TypeError, match="InFlight"):
        codec.encode(stranger)


def message() -> dict[str, Any]:
    encoded = codec.encode(wire.ConsumptionRequested(channel=OperatorId("a"), consumer=OperatorId("b")))
    decoded: dict[str, Any] = msgspec.json.decode(encoded)
    return decoded


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 2}, "version 2"),
        ({"type": "Unheard"}, "unknown type Unheard"),
        ({"body": {"channel": "a"}}, "consumer"),
        ({"body": {"channel": 7, "consumer": "b"}}, "str"),
        ({"type": None}, "neither"),
        ({"envelope": {"seq": 1}}, "sender_session"),
    ],
)
def test_what_is_not_understood_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(DamagedRecordError, match=why):
        codec.decode(msgspec.json.encode({**message(), **change}))


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{", b"\xff\xfe", b"{}"])
def test_what_is_no_message_at_all_is_refused(data: bytes) -> None:
    with pytest.raises(DamagedRecordError):
        codec.decode(data)
