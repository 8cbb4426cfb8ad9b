"""Addresses to listen on, as people write them. Pure."""

from __future__ import annotations

from cutline.errors import ConfigError

_LOOPBACK = "127.0.0.1"
_MOST = 65_535


def parse_address(text: str, *, option: str = "--http") -> tuple[str, int]:
    """``HOST:PORT``, ``:PORT`` or ``PORT``; without a host, loopback only. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdigit()):
        raise ConfigError(f"{option} {text}: there is no port", next_step="write HOST:PORT, for example 127.0.0.1:7441")
    if len(port) > len(str(_MOST)) or int(port) > _MOST:
        raise ConfigError(f"{option} {text}: {port} is not a port", next_step=f"use a port from 0 to {_MOST}")
    return host or _LOOPBACK, int(port)
