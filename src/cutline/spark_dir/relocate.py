"""Makes a copied ``spark_checkpoint_dir`` independent of the place it was copied from."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from cutline.base import durable
from cutline.base.names import are_relative
from cutline.errors import DamagedRecordError

_SCHEMA_FOLDER = "/_stateSchema/"


def relocate(spark_checkpoint_dir: Path, url: str | None = None) -> list[str]:
    """Point the operator metadata at the state schemas of this directory; returns the changed files.

    ``url``: where Spark will use the directory, if elsewhere.

    The metadata of transformWithState (``state/<operator>/_metadata/v2/<batch>``) holds the absolute paths of its
    schema files. In a directory restored elsewhere, Spark would read them at the old place, and fail once that is gone.
    A changed file is replaced, never written into: it may be a hard link to a stored one.
    """
    changed: list[str] = []
    for path in sorted(spark_checkpoint_dir.glob("state/*/_metadata/v2/*")):
        name = path.relative_to(spark_checkpoint_dir)
        state = f"{url or f'file:{spark_checkpoint_dir.absolute()}'}/{name.parents[2].as_posix()}"
        if path.name.isdigit() and _point_at(path, f"{state}{_SCHEMA_FOLDER}"):
            changed.append(str(name))
    return changed


def _point_at(path: Path, here: str) -> bool:
    version, _, body = path.read_bytes().partition(b"\n")
    is_changed = False
    try:
        record = msgspec.json.decode(body)
        for store in record["stateStoreInfo"]:
            old = store.get("stateSchemaFilePaths", [])
            names = [name.rpartition(_SCHEMA_FOLDER)[2] for name in old]
            if not are_relative(names):
                raise DamagedRecordError("operator metadata of Spark names a schema outside of its folder", path=path)
            new = [here + name for name in names]
            if new != old:
                store["stateSchemaFilePaths"] = new
                is_changed = True
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise DamagedRecordError("operator metadata of Spark cannot be read", path=path) from error
    if not is_changed:
        return False
    # The old checksum first: a checksum that contradicts its file stops Hadoop, a missing one does not.
    with contextlib.suppress(FileNotFoundError):
        path.with_name(f".{path.name}.crc").unlink()
    durable.replace(path, version + b"\n" + msgspec.json.encode(record))
    return True
