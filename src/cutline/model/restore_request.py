"""Where a person wants the flow taken back to: said to the start itself, or written down before for the next one."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cutline.base import durable, records
from cutline.errors import ConfigError
from cutline.model.ids import Epoch, FlowName
from cutline.model.layout import Layout
from cutline.protocol.history.evolution import Changes
from cutline.savepoints.store import Savepoints

_KIND = "restore"


class RestoreWish(msgspec.Struct, frozen=True, kw_only=True):
    """The next start carries it out, and only when it has may it be forgotten."""

    #: An epoch, or the name of a savepoint.
    to: str
    #: Operators that have other names now: old → new.
    rename: dict[str, str] = {}
    allow_dropped: bool = False

    @property
    def changes(self) -> Changes:
        return Changes(rename=self.rename, allow_dropped=self.allow_dropped)


def store_wish(layout: Layout, wish: RestoreWish) -> None:
    durable.replace(layout.restore_wish, records.encode(_KIND, wish))


def current_wish(
    layout: Layout,
    restore_to: int | str | None,
    rename: Mapping[str, str] | None,
    *,
    allow_dropped: bool,
    flow: FlowName,
) -> RestoreWish | None:
    """What is asked for now, else what was written down; None if the flow is just to go on."""
    if restore_to is not None:
        return RestoreWish(to=str(restore_to), rename=dict(rename or {}), allow_dropped=allow_dropped)
    if rename or allow_dropped:
        raise ConfigError(
            "operators are renamed and dropped only on the way back to a checkpoint or savepoint",
            next_step="say which with restore_to (--restore-to); a flow that just goes on keeps its operators",
            flow=flow,
        )
    if layout.restore_wish.exists():
        return records.load(_KIND, layout.restore_wish, RestoreWish)
    return None


def restore_target(wish: RestoreWish, savepoints: Savepoints) -> Epoch:
    """The epoch to go back to.

    What a savepoint holds is put into the flow's folder, in case the checkpoint itself was let go of since.
    """
    if wish.to.isdigit():
        return Epoch(int(wish.to))
    return savepoints.fetch(wish.to).epoch


def parse_renames(items: list[str]) -> dict[str, str]:
    """Of ``old=new``, as people type it."""
    pairs = [item.partition("=") for item in items]
    for old, separator, new in pairs:
        if not (old and separator and new):
            raise ConfigError(f"--rename {old}{separator}{new}: not a pair", next_step="write old=new")
    return {old: new for old, _, new in pairs}
