"""Commits that put an epoch into a Delta table's log.

deltalake does the appends; it accepts commits of other writers in between. Replacing files is implemented here: it is
valid only on top of the version it was computed from, and deltalake would accept another writer's append in between.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from cutline.base.durable import create
from cutline.connectors.delta.log import MARK_KEY, DeltaLog, Mark

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable, Transaction
    from deltalake.transaction import PostCommitHookProperties

    from cutline.model.staging import Piece


@dataclass(slots=True)
class Replacement:
    """Files removed from the table and files added to it, both in one version."""

    #: As the log spells them.
    removed: list[str] = field(default_factory=list)
    added: list[Piece] = field(default_factory=list)
    #: Those of ``added`` that were written for this change only, and are deleted if it fails.
    written: list[Piece] = field(default_factory=list)


def properties(mark: Mark, versions: Mapping[str, int]) -> CommitProperties:
    """What a commit through deltalake carries besides its files. ``versions``: of further applications.

    Of two concurrent commits that carry the same application, deltalake accepts only one.
    """
    from deltalake import CommitProperties

    return CommitProperties(
        custom_metadata={MARK_KEY: msgspec.to_builtins(mark)},
        app_transactions=_transactions({mark.app: mark.after, **versions}),
    )


def _transactions(versions: Mapping[str, int]) -> list[Transaction]:
    from deltalake import Transaction

    # Without lastUpdated a transaction never expires (delta.setTransactionRetentionDuration).
    return [Transaction(app, version) for app, version in versions.items()]


def store_versions(table: DeltaTable, partition_by: Sequence[str], versions: Mapping[str, int]) -> None:
    """A commit that changes no rows."""
    from deltalake import CommitProperties

    table.create_write_transaction(
        [],
        mode="append",
        schema=table.schema(),
        partition_by=list(partition_by),
        commit_properties=CommitProperties(app_transactions=_transactions(versions)),
        post_commithook_properties=no_hooks(),
    )


def no_hooks() -> PostCommitHookProperties:
    """The log's checkpoint is written separately, so that its failure is not mistaken for one of the commit."""
    from deltalake.transaction import PostCommitHookProperties

    return PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


def append_files(
    table: DeltaTable,
    pieces: Sequence[Piece],
    partition_by: Sequence[str],
    mark: Mark,
    versions: Mapping[str, int],
) -> None:
    """Add the files on top of the version that ``table`` shows, or after harmless commits of others."""
    from deltalake.transaction import AddAction

    adds = [
        AddAction(
            path=piece["path"],  # deltalake does the percent-encoding
            size=piece["size_bytes"],
            partition_values=piece["partition"],
            modification_time=piece["modified_ms"],
            data_change=True,
            stats=piece["stats"],
        )
        for piece in pieces
    ]
    table.create_write_transaction(
        list(adds),
        mode="append",
        schema=table.schema(),
        partition_by=list(partition_by),
        commit_properties=properties(mark, versions),
        post_commithook_properties=no_hooks(),
    )


#: Beside alphanumerics and ``_.-~``, what deltalake leaves as it is. A file that is spelled otherwise could not be
#: removed by deltalake, which compares what it spells itself.
_LEFT_AS_IT_IS = "/=!$&'()+,:;@"


def logged_path(path: str) -> str:
    """A path relative to the table's folder as the log spells it."""
    return quote(path, safe=_LEFT_AS_IT_IS)


def replace_files(log: DeltaLog, version: int, change: Replacement, mark: Mark, *, operation: str) -> bool:
    """Make the change as exactly this version, durably. False: another writer made that version."""
    now_ms = time.time_ns() // 1_000_000
    info = {
        "timestamp": now_ms,
        "operation": operation,
        "operationParameters": {"epoch": str(mark.after)},
        "engineInfo": "cutline",
        MARK_KEY: msgspec.to_builtins(mark),
    }
    actions: list[dict[str, Any]] = [
        {"commitInfo": info},
        {"txn": {"appId": mark.app, "version": mark.after}},
        *({"remove": {"path": path, "deletionTimestamp": now_ms, "dataChange": True}} for path in change.removed),
        *(
            {
                "add": {
                    "path": logged_path(piece["path"]),
                    "partitionValues": piece["partition"],
                    "size": piece["size_bytes"],
                    "modificationTime": piece["modified_ms"],
                    "dataChange": True,
                    "stats": piece["stats"],
                }
            }
            for piece in change.added
        ),
    ]
    return create(log.file_of(version), b"\n".join(map(msgspec.json.encode, actions)) + b"\n")
