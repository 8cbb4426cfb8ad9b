"""JSON into typed values, from any thread.

msgspec learns a type when it is first used, and its notes are visible to other threads before they are complete: two
threads that use a new type at the same moment crash the process (a segmentation fault, seen with 0.22.0). So a type is
learnt under a lock, once, and whoever decodes in a thread gets the decoder from here.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_lock = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decoder_of(type_: type[T]) -> msgspec.json.Decoder[T]:
    """The one decoder of a type."""
    decoder = _decoders.get(type_)
    if decoder is None:
        with _lock:
            decoder = _decoders.get(type_)
            if decoder is None:
                decoder = _decoders[type_] = msgspec.json.Decoder(type_)
    return decoder
