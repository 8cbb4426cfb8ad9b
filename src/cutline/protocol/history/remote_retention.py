"""What the remote tier keeps: checkpoints first, then the objects that they and early uploads need."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cutline.model.ids import NO_EPOCH, Epoch, Generation, SinkId
from cutline.model.remote import SinkProgress


def kept_while_running(
    there: Sequence[Epoch], *, uploaded: Epoch, published: Epoch, pins: Iterable[Epoch], retain: int
) -> set[Epoch]:
    """The epochs that stay while the flow runs, of those ``there`` in ascending order.

    ``uploaded``: the newest that this process has uploaded; NO_EPOCH: none yet, so that nothing replaces the old ones.
    ``published``: every sink has published up to here. Only the records of later epochs hold what a sink has yet to
    publish.
    """
    newest = [epoch for epoch in there if epoch <= uploaded][-retain:] if uploaded != NO_EPOCH else there
    return {*newest, *pins, *(epoch for epoch in there if published <= epoch)}


def kept_when_stopped(
    there: Sequence[Epoch], *, here: Collection[Epoch], pins: Iterable[Epoch], retain: int
) -> set[Epoch]:
    """The epochs that stay of a stopped flow: as many of the newest as it retains or has ``here``, and those it has."""
    return {*there[-max(retain, len(here), 1) :], *here, *pins}


def progress_when_stopped(published: Mapping[SinkId, Epoch], seen: Mapping[SinkId, Epoch]) -> SinkProgress:
    """The progress of a stopped flow's sinks, by the coordinator's records; these may also name former sinks."""
    return SinkProgress(everywhere=min(published.values(), default=NO_EPOCH), seen=dict(seen))


def progress_of_kept(epoch: Epoch, noted: SinkProgress, now: SinkProgress) -> SinkProgress:
    """What a kept checkpoint must say about sinks before others are removed, so that a new host learns it.

    ``noted``: what it says. ``now``: the present progress, which shows that the others were published. For a host that
    restores the checkpoint, epochs after it do not count as told to a sink: they must not replace one that counts. Nor
    does it matter that they were published, so a checkpoint that every sink has published needs no further note.
    """
    seen = {
        sink: max(counting)
        for sink in {**noted.seen, **now.seen}
        if (counting := [one.seen[sink] for one in (noted, now) if sink in one.seen and one.seen[sink] <= epoch])
    }
    return SinkProgress(everywhere=max(noted.everywhere, min(now.everywhere, epoch)), seen=seen)


class ObjectKind(enum.Enum):
    """Objects of the remote tier, as far as retention tells them apart."""

    #: The manifest of a checkpoint; collected only with the checkpoint, before its other objects.
    MANIFEST = "manifest"
    #: Records, content, log entries and the progress of sinks: needed by name.
    NEEDED_BY_NAME = "needed by name"
    #: Names what one generation has uploaded for checkpoints to come.
    EARLY_UPLOADS = "early uploads"
    #: Identity, generations, claims, and objects of other programs.
    PERMANENT = "permanent"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteObject:
    """One object of a listing."""

    path: str
    #: Its name in checkpoints: without the compression suffix.
    name: str
    kind: ObjectKind
    modified_ms: int
    #: The generation of an early upload record; None for any other object.
    generation: Generation | None = None


def unreferenced(
    objects: Iterable[RemoteObject], *, needed: Collection[str], newest: Generation, now_ms: int, grace_ms: int
) -> list[RemoteObject]:
    """The objects that no kept checkpoint and no early upload of the newest generation needs.

    Objects younger than ``grace_ms`` may belong to a checkpoint that another process is uploading, and stay.
    """
    old = (one for one in objects if now_ms - one.modified_ms >= grace_ms)
    return [one for one in old if _is_unreferenced(one, needed, newest)]


def _is_unreferenced(one: RemoteObject, needed: Collection[str], newest: Generation) -> bool:
    if one.kind is ObjectKind.NEEDED_BY_NAME:
        return one.name not in needed
    # The process that wrote the record of an older generation no longer uploads.
    return one.kind is ObjectKind.EARLY_UPLOADS and one.generation is not None and one.generation < newest
