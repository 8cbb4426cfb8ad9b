"""Addresses and messages without their secrets, as errors, logs, status and records may show them.

Nothing here parses an address: a password with an ``@``, a slash or a space in it makes parsers cut in the wrong place,
and just then an error shows the wrong piece.
"""

from __future__ import annotations

import re

HIDDEN = "***"

_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*://"
_ADDRESS = re.compile(rf"({_SCHEME})(.*)", re.DOTALL)
#: Up to the last "@" of a word: whatever is before it may be a part of a password.
_CREDENTIALS = re.compile(rf"({_SCHEME})\S*@")
_SECRET_NAME = (
    r"[\w.-]*(?:pass(?:word|wd)?|pwd|secret|token|credential|access_?key|account_?key|sas|sig(?:nature)?)[\w.-]*"
)
_SETTING = re.compile(rf"\b({_SECRET_NAME}\s*=\s*)('(?:[^'\\]|\\.)*'|\"[^\"]*\"|[^\s&;,]+)", re.IGNORECASE)


#: Whole words only, unlike above: "passengers" and "design" are names of columns.
_SECRET_WORD = re.compile(
    r"(?:^|[_.-])(?:pass(?:word|wd|phrase)?|pwd|secrets?|tokens?|credentials?|sas|sig(?:nature)?"
    r"|(?:access|account|api|private)_?key)(?:$|[_.-])"
)
_NEW_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_ASSIGNED = re.compile(r"""([\w.-]+)(\s*=\s*)('(?:[^'\\]|\\.)*'|"[^"]*"|[^\s&;,]+)""")


def is_secret_name(name: str) -> bool:
    """Whether the value of a setting of this name is likely to be a secret."""
    return _SECRET_WORD.search(_NEW_WORD.sub("_", name).lower()) is not None


def without_named_secrets(text: str) -> str:
    """Like ``without_secrets``, for text that is code: nothing that may be SQL is hidden."""
    if "@" not in text and "=" not in text:
        return text

    def hidden(found: re.Match[str]) -> str:
        return f"{found[1]}{found[2]}{HIDDEN}" if is_secret_name(found[1]) else found[0]

    return _ASSIGNED.sub(hidden, _CREDENTIALS.sub(rf"\1{HIDDEN}@", text))


def without_secrets(text: str) -> str:
    """A message with everything hidden that looks like the credentials of an address or the value of a secret."""
    if "@" not in text and "=" not in text:
        return text
    return _SETTING.sub(rf"\1{HIDDEN}", _CREDENTIALS.sub(rf"\1{HIDDEN}@", text))


def address_without_secrets(address: str) -> str:
    """An address, or several with commas in between, without user, password and query; of a DSN without its secrets."""
    found = _ADDRESS.match(address.strip())
    if found is None:
        return without_secrets(address)
    scheme, rest = found[1], found[2]
    credentials, at, place = rest.rpartition("@")
    place = re.split(r"[?#]", place if at else rest, maxsplit=1)[0]
    # A space ends no address, but a password may contain one.
    return f"{scheme}{f'{HIDDEN}@' if at or credentials else ''}{place}"


def has_credentials(address: str) -> bool:
    """Whether an address holds anything but a place: a user, a password, a query; or may do so, read in another way."""
    found = _ADDRESS.match(address.strip())
    rest = found[2] if found else address
    return any(mark in rest for mark in "@?#") or any(one.isspace() for one in rest)
