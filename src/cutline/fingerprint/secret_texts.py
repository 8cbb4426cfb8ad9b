"""Which texts of code are secrets, and are left out of hashes.

Hashes are stored beside checkpoints, perhaps in a bucket that others read. A long random token cannot be guessed from
one, but a password that a person chose can; and to rotate either is not to change code. Columns are named like secrets,
too, and what a query does with them is code: so a text is taken for a secret only where a value is set by its name.
"""

from __future__ import annotations

import re

from cutline.base.redaction import HIDDEN, is_secret_name, without_named_secrets

#: Functions that take the name of a setting and its value.
SETTERS = frozenset({"config", "option", "options", "set", "setdefault", "setIfMissing", "setenv", "putenv"})

#: The last word of a name tells what it is: "token_column" is no token, "tokens" are counted.
_VALUE_NAME = re.compile(
    r"(?:^|[_.-])(?:pass(?:word|wd|phrase)?|pwd|secret|token|credentials?|(?:access|account|api|private|secret)_?key)$"
)
#: Never the name of a column that a query would compute with.
_PASSWORD_NAME = re.compile(
    r"(?:^|[_.-])(?:pass(?:word|wd|phrase)|pwd|client_?secret|(?:access|account|api|private|secret)_?key)$"
)
_NEW_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SCHEME = r"[A-Za-z][A-Za-z0-9+.:-]*://"
_ADDRESS = re.compile(rf"\s*{_SCHEME}")
_CREDENTIALS = re.compile(rf"({_SCHEME})\S*@")
_KEY = re.compile(r"\s*[A-Za-z][\w .-]*")
#: As libpq takes them, one after the other.
_PAIR = re.compile(r"\s*[A-Za-z][\w.-]*\s*=\s*(?:'(?:[^'\\]|\\.)*'|[^\s']*)(?=\s|$)")
_PLACE_NAME = re.compile(
    r"(?:^|[\s;])(?:host(?:addr)?|server|servers|dbname|database|data source|endpoint|account_?name|service)\s*=",
    re.IGNORECASE,
)


def is_value_name(name: str) -> bool:
    """Whether a text that is assigned to this name is likely to be a secret."""
    return _VALUE_NAME.search(_words(name)) is not None


def is_password_name(name: str) -> bool:
    """Whether a text under this key of a mapping is a secret, wherever the mapping is used."""
    return _PASSWORD_NAME.search(_words(name)) is not None


def is_setting_name(name: str) -> bool:
    """Whether the value of a setting of this name is likely to be a secret."""
    return is_secret_name(name)


def without_secrets_of_addresses(text: str) -> str:
    """An address, or settings that say where something is, without secrets. Any other text, such as SQL, as it is."""
    if _ADDRESS.match(text) or (_PLACE_NAME.search(text) and _is_settings(text)):
        return without_named_secrets(text)
    return _CREDENTIALS.sub(rf"\1{HIDDEN}@", text) if "@" in text else text


def _is_settings(text: str) -> bool:
    """Whether a text is nothing but settings: ``host=a password=b``, ``Server=a;Password=b``."""
    if ";" in text:
        pairs = [one.partition("=") for one in text.split(";") if one.strip()]
        return len(pairs) > 1 and all(sign and _KEY.fullmatch(key) for key, sign, _ in pairs)
    at = count = 0
    while (pair := _PAIR.match(text, at)) is not None:
        at, count = pair.end(), count + 1
    return count > 1 and not text[at:].strip()


def _words(name: str) -> str:
    return _NEW_WORD.sub("_", name).lower()
