"""Damages a stored checkpoint as a bad disk would."""

from __future__ import annotations

from cutline.model.ids import Epoch, OperatorId
from cutline.model.layout import Layout
from cutline.storage.local import LocalStore


def flip_a_byte(layout: Layout, operator: OperatorId) -> Epoch:
    """In a file that of all checkpoints only the newest one has; returns its epoch."""
    checkpoints = LocalStore.reading(layout).checkpoints
    files: dict[Epoch, set[str]] = {}
    for epoch in checkpoints.epochs():
        record = checkpoints.load_record(checkpoints.load_manifest(epoch), operator)
        files[epoch] = {file.sha256 for file in record.files() if file.size_bytes and file.content is None}
    newest = max(files)
    own = files[newest].difference(*(files[epoch] for epoch in files if epoch != newest))
    path = layout.blob(min(own))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    return newest
