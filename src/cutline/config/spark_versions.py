"""Which versions of Spark a flow runs on. Changed together with the requirement in ``pyproject.toml``."""

from __future__ import annotations

import re

Version = tuple[int, int]

OLDEST: Version = (4, 1)
NEWEST: Version = (4, 3)
REQUIREMENT = "pyspark>=4.1,<4.4"

#: By looking at its jars: the class that writes the checkpoint files, and the loggers, stand in other packages there.
_WHY_NOT_4_0 = "4.0 has the streaming classes that Cutline names under other names, and no test of Cutline runs on it"
_VERSION = re.compile(r"(\d+)\.(\d+)")


def parse_version(text: str) -> Version:
    """Major and minor number; (0, 0) if the text names none. A vendor's suffix does not matter."""
    found = _VERSION.match(text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def why_unsupported(text: str) -> str | None:
    """Why flows do not run on this version of Spark; None: they do."""
    version = parse_version(text)
    if version > NEWEST:
        return "it is newer than this version of Cutline knows; Cutline depends on Spark's file formats"
    if version == (4, 0):
        return _WHY_NOT_4_0
    if version < OLDEST:
        return "it has no streaming sources in Python that return Arrow data"
    return None
