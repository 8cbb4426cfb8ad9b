"""The event that time has passed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Time has passed; nothing else has happened."""
