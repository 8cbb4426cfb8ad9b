"""The object port: a flat store of named byte strings, on a disk, on S3 and the like, or in memory.

The error of a failed operation says which of two cases holds: the operation certainly *did not happen*, or it *may have
happened*. Callers that need certainty read the object back, or repeat the operation: all operations are idempotent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol


class ObjectInfo(NamedTuple):
    """One stored object, as a listing returns it."""

    #: Relative to the store's own root, with slashes: "checkpoints/000000000007/manifest.json".
    path: str
    size_bytes: int
    #: When it was last written, by the store's own clock, in ms since 1970.
    modified_ms: int


class ObjectStore(Protocol):
    """Paths are relative to the place at which the store was opened. All methods may be called from any thread.

    Raises MissingObject (the object certainly does not exist), NotDone (the operation did not happen) or OutcomeUnknown
    (it may have happened), all of them StoreError.
    """

    @property
    def url(self) -> str:
        """The place of the store, human-readable and without secrets."""
        ...

    def read(self, path: str, limit_bytes: int | None = None) -> bytes:
        """The content of an object. Raises NotDone for one that is larger than ``limit_bytes``, before it is read."""
        ...

    def create(self, path: str, data: bytes) -> bool:
        """Create an object; False if the path exists, with any content. Of two racing creators exactly one wins."""
        ...

    def replace(self, path: str, data: bytes) -> None:
        """Store an object, replacing any that exists."""
        ...

    def upload(self, path: str, source: Path) -> None:
        """Store the content of a file, in parts if it is large; readers see all of it or nothing."""
        ...

    def download(self, path: str, target: Path) -> None:
        """Download an object into a new file, which appears with its whole content, synced."""
        ...

    def find(self, path: str) -> ObjectInfo | None:
        """The listing entry of an object; None if there is none."""
        ...

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose path begins with the folder ``prefix`` ("" or ending without a slash), in any order."""
        ...

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects; an object that does not exist counts as deleted."""
        ...

    def leftovers(self, older_than_ms: int) -> list[ObjectInfo]:
        """What ``collect_leftovers`` would delete, as far as the store can list it."""
        ...

    def collect_leftovers(self, older_than_ms: int) -> int:
        """Delete what interrupted writes have left (temporary files, unfinished multipart uploads) if it is older than
        the given age; returns how many. A store that collects them by itself returns 0.
        """
        ...
