"""Reads the ancestry in the header of a format-2 changelog of RocksDB.

Layout, after decompression (``DataOutputStream.writeUTF`` twice): ``v3`` or ``v4``, then a JSON list of
``{"version", "checkpointUniqueId"}`` from the newest snapshot that Spark knew when it opened the file up to the
version before it. The first bytes identify the codec (``spark.sql.streaming.stateStore.compression.codec``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from cutline.base.names import is_name

_LZ4_MAGIC = b"LZ4Block"
#: After the magic: token (its high half: the method), compressed size, original size, checksum.
_LZ4_HEAD = struct.Struct("<8sBIII")
_LZ4_STORED = 0x10
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SNAPPY_MAGIC = b"\x82SNAPPY\x00"
_SNAPPY_HEAD_BYTES = 16
#: Two strings of the maximum length that ``writeUTF`` can write.
_HEADER_LIMIT_BYTES = 2 * (2 + 0xFFFF)
#: Far more than the header needs under any compression.
_READ_LIMIT_BYTES = 4 * _HEADER_LIMIT_BYTES

#: The largest block that either codec writes. A larger one is damage, and would only waste memory.
_BLOCK_LIMIT_BYTES = 32 * 1024 * 1024


class _Ancestor(msgspec.Struct, frozen=True, rename="camel"):
    version: int
    checkpoint_unique_id: str


_ANCESTORS = msgspec.json.Decoder(list[_Ancestor])


def read_lineage(path: str) -> dict[int, str] | None:
    """Unique id by version of the changelog's ancestors. None: it contains none, or its codec is not supported."""
    try:
        with open(path, "rb", buffering=0) as file:
            version, rest = _utf(_head(file.read(_READ_LIMIT_BYTES)))
        if version not in (b"v3", b"v4"):
            return None
        ancestors = {item.version: item.checkpoint_unique_id for item in _ANCESTORS.decode(_utf(rest)[0])}
        return ancestors if all(map(is_name, ancestors.values())) else None
    except (ValueError, OSError, struct.error, msgspec.MsgspecError, RecursionError):
        # Not an error yet: the caller has an alternative, and raises if that fails too.
        return None


def _utf(data: bytes) -> tuple[bytes, bytes]:
    """What ``DataInputStream.readUTF`` reads, and the rest."""
    (size,) = struct.unpack_from(">H", data)
    if len(data) < 2 + size:
        raise ValueError("cut short")
    return data[2 : 2 + size], data[2 + size :]


def _head(data: bytes) -> bytes:
    """The first bytes of the decompressed file: at least the header, if the file has one."""
    if data.startswith(_LZ4_MAGIC):
        blocks = _lz4_blocks(data)
    elif data.startswith(_SNAPPY_MAGIC):
        blocks = _snappy_blocks(data)
    elif data.startswith(_ZSTD_MAGIC):
        return _zstd(data)
    else:
        raise ValueError("unknown codec")
    head = b""
    for block in blocks:
        head += block
        if len(head) >= _HEADER_LIMIT_BYTES:
            break
    return head


def _lz4_blocks(data: bytes) -> Iterator[bytes]:
    """The blocks of lz4-java's ``LZ4BlockOutputStream``; ends where the bytes end."""
    import pyarrow as pa

    start = 0
    while start + _LZ4_HEAD.size <= len(data):
        magic, token, packed, size, _ = _LZ4_HEAD.unpack_from(data, start)
        start += _LZ4_HEAD.size
        block = data[start : start + packed]
        if magic != _LZ4_MAGIC or not 0 < size <= _BLOCK_LIMIT_BYTES or len(block) < packed:
            return
        start += packed
        stored = token & 0xF0 == _LZ4_STORED
        yield block if stored else pa.decompress(block, size, codec="lz4_raw", asbytes=True)


def _snappy_blocks(data: bytes) -> Iterator[bytes]:
    """The blocks of snappy-java's ``SnappyOutputStream``; ends where the bytes end."""
    import pyarrow as pa

    start = _SNAPPY_HEAD_BYTES
    while start + 4 <= len(data):
        (packed,) = struct.unpack_from(">I", data, start)
        block = data[start + 4 : start + 4 + packed]
        if len(block) < packed:
            return
        start += 4 + packed
        size, shift = 0, 0
        for byte in block:  # its length comes first, seven bits per byte
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if size > _BLOCK_LIMIT_BYTES:
            return
        yield pa.decompress(block, size, codec="snappy", asbytes=True)


def _zstd(data: bytes) -> bytes:
    import pyarrow as pa

    head: bytes = pa.CompressedInputStream(pa.BufferReader(data), "zstd").read(_HEADER_LIMIT_BYTES)
    return head
