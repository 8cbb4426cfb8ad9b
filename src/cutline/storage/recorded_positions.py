"""The source positions of a stored snapshot, and what is recorded beside them."""

from __future__ import annotations

from cutline.base import records
from cutline.base.paths import read_plain
from cutline.errors import DamagedRecordError
from cutline.model.checkpoint import OperatorRecord
from cutline.model.layout import Layout
from cutline.model.plan import RecordedSource
from cutline.spark_dir.offsets import parse_offsets
from cutline.spark_dir.recorded_sources import NAME, parse_recorded


def recorded_positions(record: OperatorRecord, layout: Layout) -> dict[str, bytes | None]:
    """The offset of every source at the snapshot, as JSON. Raises DamagedRecordError."""
    name = f"offsets/{record.batch}"
    try:
        content = _content(record, layout, name)
    except OSError as error:
        raise DamagedRecordError(f"the recorded offsets cannot be read: {error}", path=name) from error
    return {} if content is None else parse_offsets(content, name, record.batch).positions


def recorded_sources(record: OperatorRecord, layout: Layout) -> list[RecordedSource]:
    """What was recorded beside them; empty: nothing, or it cannot be read."""
    try:
        content = _content(record, layout, NAME)
    except OSError:
        return []
    return [] if content is None else parse_recorded(content)


def _content(record: OperatorRecord, layout: Layout, name: str) -> bytes | None:
    file = next((one for one in record.files() if one.path == name), None)
    if file is None or file.content is not None:
        return None if file is None else file.content
    return read_plain(layout.blob(file.sha256), records.MOST_BYTES)
