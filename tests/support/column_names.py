"""Names that a column may have, and that something on its way could take for something else."""

from __future__ import annotations

#: Every sink takes them, in every role.
GOOD = (
    "a.b",  # beside a struct ``a`` with a field ``b``
    "a..b",
    "x.",
    "`ticked`",
    "a`b",
    'quo"ted',
    "it's",
    "two words",
    " led by a space",
    " ",
    "",
    "ünï¢ødé",
    "日本",
    "select",
    "group",
    "*",
    "[0]",
    "$1",
    "#",
    "%2F",
    "a/b",
    "a\\b",
    "a,b;(c)",
    "{}",
    "a=b",
    "a\nb\tc",
    "a+b&c@d",
    "min.value",
    "partition",
    "partition.value",
    "row",
    "key0",
    "c0",
    "_c0",
    "_cutline",
    "_cutline_row",
    "__index_level_0__",
    "rowid",
)
#: Readers of a folder skip what begins with a dot, so no folder may.
DOTTED = (".x", "..", ".")
#: Too long for the name of a folder.
LONG = "x" * 300
#: Taken by sinks that add columns or folders of their own.
OWN = ("cutline_epoch", "CUTLINE_EPOCH", "cutline_was_there")
#: No sink takes it: files end a name there.
WITH_NUL = "a\0b"
