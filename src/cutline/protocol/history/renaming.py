"""Renames operators in the keys of records, in positions, and in Spark's own offsets."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from cutline.errors import ConfigError
from cutline.model.checkpoint import OperatorRecord, SnapshotFile
from cutline.model.graph import check_name
from cutline.model.ids import OperatorId

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Renaming:
    """The new name of each operator; operators without one are dropped."""

    new_names: Mapping[OperatorId, OperatorId]

    @classmethod
    def checked(
        cls,
        inputs: Mapping[OperatorId, Collection[OperatorId]],
        rename: Mapping[str, str],
        drop: Collection[str],
    ) -> Renaming:
        """For a clone. ``inputs``: of every operator of the savepoint. Raises ConfigError if it is contradictory."""
        known = ", ".join(inputs)
        for name in [*rename, *drop]:
            if name not in inputs:
                raise ConfigError(f"the savepoint has no operator {name!r}", next_step=f"it has: {known}")
        new_names = {name: OperatorId(rename.get(name, name)) for name in inputs if name not in drop}
        taken = list(new_names.values())
        for name in taken:
            check_name("an operator", name)
            if taken.count(name) > 1:
                raise ConfigError(f"two operators would be called {name!r}", next_step="give each a name of its own")
        for name in new_names:
            for channel in inputs[name]:
                if channel not in new_names:
                    raise ConfigError(
                        f"{channel!r} cannot be dropped: {name!r} reads it", next_step=f"drop {name!r} too"
                    )
        return cls(new_names)

    def keys(self, values: Mapping[OperatorId, V]) -> dict[OperatorId, V]:
        return {self.new_names[name]: value for name, value in values.items() if name in self.new_names}

    def names(self, values: Iterable[OperatorId]) -> list[OperatorId]:
        return [self.new_names[name] for name in values if name in self.new_names]

    def offsets(self, content: bytes) -> bytes:
        """Spark's own record of how far it has read each channel names the channel."""

        def renamed(found: re.Match[bytes]) -> bytes:
            old = OperatorId(found[2].decode(errors="replace"))
            if old not in self.new_names:
                return found[0]
            return found[1] + self.new_names[old].encode() + found[3]

        return re.sub(rb'(\{"channel"\s*:\s*")([^"]+)("\s*,\s*"position"\s*:\s*\d+\s*\})', renamed, content)

    def record(self, record: OperatorRecord, read: Callable[[SnapshotFile], bytes]) -> OperatorRecord:
        """An operator's record under the new names; ``read`` returns the content of a file that is a blob."""
        return msgspec.structs.replace(
            record,
            operator=self.new_names[record.operator],
            positions=self.keys(record.positions),
            shared=[self._shared(file, read) for file in record.shared],
        )

    def _shared(self, file: SnapshotFile, read: Callable[[SnapshotFile], bytes]) -> SnapshotFile:
        if not file.path.startswith("offsets/"):
            return file
        before = file.content if file.content is not None else read(file)
        content = self.offsets(before)
        if content == before:
            return file
        digest = hashlib.sha256(content).hexdigest()
        return SnapshotFile(path=file.path, sha256=digest, size_bytes=len(content), content=content)
