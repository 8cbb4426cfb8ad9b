"""What a claim in a Delta table says: a table's log holds numbers of claims, and a file beside it the history of each.

Readers and vacuum ignore folders whose name begins with an underscore.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from pathlib import Path

from cutline.base.durable import create, make_dir
from cutline.base.paths import read_plain

#: A claim's number: how many came before it, then random bits that no other claimant has.
_RANDOM_BITS = 32
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ClaimFiles:
    """The folder of one sink's claims."""

    folder: Path

    @classmethod
    def of(cls, table: Path, flow: str, sink: str) -> ClaimFiles:
        """Those of a sink that writes to the table in this folder."""
        return cls(table / "_cutline" / "claims" / flow / sink)

    def create(self, before: int, history: str) -> int:
        """A number above ``before``, whose history is stored, durably, before anything names it."""
        number = (before >> _RANDOM_BITS) + 1 << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
        make_dir(self.folder)
        create(self._file(number), history.encode())
        return number

    def history(self, number: int) -> str:
        """The history of a claim; empty for a claim of a former version, or if the table was copied without it."""
        try:
            return read_plain(self._file(number), _MOST_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def collect(self, number: int) -> None:
        """Remove the files of claims before this one; a claimant that is still to lose finds its own number taken."""
        for path in self.folder.iterdir():
            if path.stem.isdigit() and int(path.stem) < number:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _file(self, number: int) -> Path:
        return self.folder / f"{number}.json"
