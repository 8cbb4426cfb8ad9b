"""Hadoop's checksum files: its local file system keeps ``.name.crc`` beside ``name``.

Layout: ``crc\\0``, bytes per checksum, then one CRC32 per chunk of the file; each number 4 bytes, big-endian.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterator
from sys import byteorder

_HEAD = struct.Struct(">4sI")
_MAGIC = b"crc\x00"
_SUM_BYTES = 4
#: Bytes read from a file per step, approximately.
_STEP_BYTES = 1024 * 1024


def compare(path: str, size: int, *, content: bool) -> Iterator[str]:
    """How the file of this size contradicts its checksum file; nothing if they agree or there is none.

    Without ``content``, only the number of chunks is compared.
    """
    folder, _, name = path.rpartition("/")
    try:
        with open(f"{folder}/.{name}.crc", "rb", buffering=0) as file:
            twin = file.read()
    except FileNotFoundError:
        return
    if len(twin) < _HEAD.size:
        yield "has a damaged checksum file"
        return
    magic, chunk_bytes = _HEAD.unpack_from(twin)
    if magic != _MAGIC or chunk_bytes == 0 or (len(twin) - _HEAD.size) % _SUM_BYTES:
        yield "has a damaged checksum file"
        return
    recorded = (len(twin) - _HEAD.size) // _SUM_BYTES
    chunks = -(-size // chunk_bytes)
    if chunks != recorded:
        yield f"has {size} bytes, which do not fit its {recorded} checksums of {chunk_bytes} bytes each"
    elif content:
        sums = array("I", twin[_HEAD.size :])
        if byteorder == "little":
            sums.byteswap()
        yield from _compare_content(path, chunk_bytes, sums)


def _compare_content(path: str, chunk_bytes: int, sums: array[int]) -> Iterator[str]:
    step = max(1, _STEP_BYTES // chunk_bytes) * chunk_bytes
    number = 0
    with open(path, "rb", buffering=0) as file:
        while data := memoryview(file.read(step)):
            for start in range(0, len(data), chunk_bytes):
                if number >= len(sums) or zlib.crc32(data[start : start + chunk_bytes]) != sums[number]:
                    yield f"does not match its checksum at byte {number * chunk_bytes}"
                    return
                number += 1
