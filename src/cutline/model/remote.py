"""Records of the remote tier beside checkpoints and generations."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cutline.model import validation
from cutline.model.ids import NO_EPOCH, Epoch, SinkId
from cutline.model.validation import Problem


class SinkProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far sinks were when a checkpoint was sealed.

    Sinks do not record epochs without rows, and a host that restores the flow must know that none of these is missing;
    nor do sinks record that they were rewound since.
    """

    #: Every sink has published up to here.
    everywhere: Epoch = NO_EPOCH
    #: The newest epoch with rows that each was told to publish.
    seen: dict[SinkId, Epoch] = {}


class EarlyUploadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one generation has uploaded, or is about to upload, for checkpoints to come."""

    names: list[str]

    def problems(self) -> Iterator[Problem]:
        """Names that no flow of ours uploads; see ``cutline.model.validation``."""
        yield from validation.of_paths("names", self.names)
