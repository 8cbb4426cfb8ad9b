"""Whether rows may be added to, or replaced in, an existing Delta table by naming files in its log; if not, why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from cutline.errors import SinkError

if TYPE_CHECKING:
    from pathlib import Path

#: Properties that make Delta's writers compute or check something that naming finished files cannot.
_REFUSED_PROPERTIES = {
    "delta.columnMapping.mode": ("none", "files would need the physical column names"),
    "delta.enableRowTracking": ("false", "added files would need row ids"),
}
#: What replacing files would break, beside that.
_REFUSED_WHEN_REPLACING = {
    "delta.appendOnly": ("false", "nothing in it may be replaced"),
    "delta.enableChangeDataFeed": ("false", "rows that only move to another file would show as changes"),
    "delta.enableDeletionVectors": ("false", "rows that were deleted so would come back"),
}
#: What a table may ask of writers that this one knows how to honour, or that the checks above exclude in use.
_KNOWN_FEATURES = frozenset(
    {
        "appendOnly",
        "invariants",
        "checkConstraints",
        "generatedColumns",
        "changeDataFeed",
        "columnMapping",
        "identityColumns",
        "timestampNtz",
        "domainMetadata",
        "vacuumProtocolCheck",
    }
)
_LAST_VERSION_WITHOUT_FEATURES = 6
_REFUSED_COLUMN_METADATA = {
    "delta.invariants": "has a constraint, which would not be checked",
    "delta.generationExpression": "is generated, which would not be computed",
    "delta.identity.start": "is an identity column, which would not be computed",
}


def property_problems(configuration: Mapping[str, str | None], *, replaces: bool = False) -> list[str]:
    """What in the table's properties stands against it. ``replaces``: not only adding, but replacing files."""
    refused = _REFUSED_PROPERTIES | (_REFUSED_WHEN_REPLACING if replaces else {})
    problems = [
        f"{key} is {configuration[key]}: {reason}"
        for key, (harmless, reason) in refused.items()
        if (configuration.get(key) or harmless).lower() != harmless
    ]
    problems += [f"{key} would not be checked" for key in configuration if key.startswith("delta.constraints.")]
    return problems


def check_removable(configuration: Mapping[str, str | None], path: Path) -> None:
    """Refuse to take back anything from a table in which nothing may be taken back."""
    if (configuration.get("delta.appendOnly") or "false").lower() == "true":
        raise SinkError(
            "the table is append-only, so nothing can be taken back",
            next_step="restore the flow without rewinding this sink, or unset delta.appendOnly",
            path=path,
        )


def feature_problems(writer_version: int, writer_features: Sequence[str] | None) -> list[str]:
    """What the table asks of those who write its log themselves, and this writer does not know."""
    if writer_version <= _LAST_VERSION_WITHOUT_FEATURES:
        return []
    unknown = sorted(set(writer_features or ()) - _KNOWN_FEATURES)
    return [f"it asks writers for {', '.join(unknown)}"] if unknown else []


def schema_problems(rows: str, table: str) -> list[str]:
    """What in the schemas (both as Delta's JSON) stands against it. The order of columns does not matter."""
    row_type, table_type = msgspec.json.decode(rows), msgspec.json.decode(table)
    problems = _type_problems("", row_type, table_type)
    for column in table_type["fields"]:
        for key, problem in _REFUSED_COLUMN_METADATA.items():
            if key in column.get("metadata", {}):
                problems.append(f"column {column['name']} {problem}")
    return problems


def _type_problems(path: str, rows: Any, table: Any) -> list[str]:
    if isinstance(rows, str) or isinstance(table, str) or rows["type"] != table["type"]:
        return [] if rows == table else [f"{path} is {_name(rows)} in the rows but {_name(table)} in the table"]
    match rows["type"]:
        case "struct":
            return _struct_problems(path, rows["fields"], table["fields"])
        case "array":
            problems = _type_problems(f"{path}.element", rows["elementType"], table["elementType"])
            return problems + _null_problems(f"{path}.element", rows["containsNull"], table["containsNull"])
        case "map":
            problems = _type_problems(f"{path}.key", rows["keyType"], table["keyType"])
            problems += _type_problems(f"{path}.value", rows["valueType"], table["valueType"])
            return problems + _null_problems(f"{path}.value", rows["valueContainsNull"], table["valueContainsNull"])
        case other:
            return [f"{path} has the unknown type {other}"]


def _struct_problems(path: str, rows: list[Any], table: list[Any]) -> list[str]:
    problems: list[str] = []
    targets = {column["name"]: column for column in table}
    for column in rows:
        name = f"{path}.{column['name']}".lstrip(".")
        target = targets.pop(column["name"], None)
        if target is None:
            problems.append(f"{name} ({_name(column['type'])}) is not in the table")
            continue
        problems += _type_problems(name, column["type"], target["type"])
        problems += _null_problems(name, column["nullable"], target["nullable"])
    # Delta reads a column that a file lacks as null, which only a nullable column may be.
    problems += [
        f"{path}.{column['name']}".lstrip(".") + " is not in the rows and may not be null in the table"
        for column in targets.values()
        if not column["nullable"]
    ]
    return problems


def _null_problems(path: str, rows: bool, table: bool) -> list[str]:
    return [f"{path} may be null in the rows but not in the table"] if rows and not table else []


def _name(kind: Any) -> str:
    return kind if isinstance(kind, str) else str(kind["type"])
