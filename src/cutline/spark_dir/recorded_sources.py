"""What Cutline records beside Spark's offsets in a ``spark_checkpoint_dir``, for sources whose offsets say too little.

The offsets of Spark's Kafka source name no brokers, and topics by name only: a topic that was created again looks the
same. The file is part of the query's directory, so every snapshot holds it and every restore puts it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from cutline.base import durable
from cutline.model.plan import RecordedSource

#: In the directory; Spark ignores it.
NAME = "cutline-sources.json"
_DECODER = msgspec.json.Decoder(list[RecordedSource])


def parse_recorded(content: bytes) -> list[RecordedSource]:
    """Damaged: nothing is known, as in directories of former versions."""
    try:
        return _DECODER.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return []


def load_recorded(spark_checkpoint_dir: Path) -> list[RecordedSource]:
    try:
        return parse_recorded((spark_checkpoint_dir / NAME).read_bytes())
    except OSError:
        return []


def store_recorded(spark_checkpoint_dir: Path, sources: Sequence[RecordedSource]) -> None:
    """Replaced, never written into: the file may be a hard link to a held or stored one."""
    durable.replace(spark_checkpoint_dir / NAME, msgspec.json.encode(sources))


def forget_recorded(spark_checkpoint_dir: Path) -> None:
    """The next start records anew."""
    (spark_checkpoint_dir / NAME).unlink(missing_ok=True)
