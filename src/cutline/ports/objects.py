"""The object port: a flat store of named byte strings, on a disk, on S3 and the like, or in memory.

An operation that fails says which of two things is so: it certainly *did not happen*, or it *may have happened*. Who
cannot live with the second must look, or do it again: every operation here may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol


class ObjectInfo(NamedTuple):
    """One stored object, as a listing tells it."""

    #: Relative to the store's own root, with slashes: "checkpoints/000000000007/manifest.json".
    path: str
    size_bytes: int
    #: When it was last written, by the store's own clock, in ms since 1970.
    modified_ms: int


class ObjectStore(Protocol):
    """Paths are relative to the place that the store was opened at. All methods may be called from any thread.

    Raises MissingObject (there is none, which is known), NotDone (it did not happen) or OutcomeUnknown (it may have
    happened), all of them StoreError.
    """

    @property
    def url(self) -> str:
        """Where it is, for people; without secrets."""
        ...

    def read(self, path: str) -> bytes: ...

    def create(self, path: str, data: bytes) -> bool:
        """Store what was not there; False if something is there, whatever it is. Of two at once exactly one wins."""
        ...

    def replace(self, path: str, data: bytes) -> None:
        """Store, whatever was there."""
        ...

    def upload(self, path: str, source: Path) -> None:
        """Store the content of a file, in parts if it is large; readers see all of it or nothing."""
        ...

    def download(self, path: str, target: Path) -> None:
        """Fetch an object into a new file, which appears with its whole content, synced."""
        ...

    def find(self, path: str) -> ObjectInfo | None:
        """What is known of an object; None if there is none."""
        ...

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose path begins with the folder ``prefix`` ("" or ending without a slash), in any order."""
        ...

    def delete(self, paths: Iterable[str]) -> None:
        """Remove objects; one that is not there is as good as removed."""
        ...

    def leftovers(self, older_than_ms: int) -> list[ObjectInfo]:
        """What ``drop_leftovers`` would remove, as far as the store can tell."""
        ...

    def drop_leftovers(self, older_than_ms: int) -> int:
        """Remove what interrupted writes have left (temporary files, unfinished multipart uploads) if it is older than
        the given age; returns how many. A store that cleans up by itself returns 0.
        """
        ...
