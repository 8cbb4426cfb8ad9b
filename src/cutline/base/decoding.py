"""JSON into typed values, from any thread.

msgspec analyses a type on first use, and its result is visible to other threads before it is complete: two threads that
use a new type at the same moment crash the process (a segmentation fault, seen with 0.22.0). So each type is analysed
once, under a lock, and code that decodes in a thread gets the decoder from here.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_lock = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decoder_of(type_: type[T]) -> msgspec.json.Decoder[T]:
    """The shared decoder of a type."""
    decoder = _decoders.get(type_)
    if decoder is None:
        with _lock:
            decoder = _decoders.get(type_)
            if decoder is None:
                decoder = _decoders[type_] = msgspec.json.Decoder(type_)
    return decoder
