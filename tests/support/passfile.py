"""A database address without its password, for sources: their options end up in plans and checkpoints."""

from __future__ import annotations

from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo


def with_passfile(dsn: str, folder: Path) -> str:
    """The password goes into a file that the address names; executors read it too."""
    parts = conninfo_to_dict(dsn)
    file = folder / "pgpass"
    file.write_text(f"*:*:*:*:{parts.pop('password')}\n")
    file.chmod(0o600)
    given = {name: str(value) for name, value in parts.items() if value is not None}
    return make_conninfo("", **given, passfile=str(file))
