"""The names an object may have: those that mean the same in every store."""

from __future__ import annotations

from cutline.base.durable import is_temporary
from cutline.errors import Refused


def checked(path: str) -> str:
    """The path itself, if every store accepts it unchanged; raises Refused otherwise.

    Stores disagree on other names: some strip a trailing slash, some read a backslash as a slash, and a folder cannot
    hold ".." or a name that looks like its own temporary files.
    """
    for part in path.split("/"):
        if part in ("", ".", "..") or is_temporary(part) or "\\" in part or not part.isprintable():
            raise Refused("an object cannot have this name", path=repr(path))
    return path


def checked_folder(prefix: str) -> str:
    """The same for the prefix of a listing, which may be empty."""
    return checked(prefix) if prefix else prefix
