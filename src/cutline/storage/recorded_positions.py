"""The source positions of a stored snapshot."""

from __future__ import annotations

from cutline.base import records
from cutline.base.paths import read_plain
from cutline.errors import DamagedRecordError
from cutline.model.checkpoint import OperatorRecord
from cutline.model.layout import Layout
from cutline.spark_dir.offsets import parse_offsets


def recorded_positions(record: OperatorRecord, layout: Layout) -> dict[str, bytes | None]:
    """The offset of every source at the snapshot, as JSON. Raises DamagedRecordError."""
    name = f"offsets/{record.batch}"
    offsets = next((file for file in record.files() if file.path == name), None)
    if offsets is None:
        return {}
    try:
        content = (
            offsets.content
            if offsets.content is not None
            else read_plain(layout.blob(offsets.sha256), records.MOST_BYTES)
        )
    except OSError as error:
        raise DamagedRecordError(f"the recorded offsets cannot be read: {error}", path=name) from error
    return parse_offsets(content, name, record.batch).positions
