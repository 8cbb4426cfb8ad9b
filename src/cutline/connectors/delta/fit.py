"""Why rows cannot be added to, or replaced in, an existing Delta table by naming files in its log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from cutline.errors import SinkError

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
    from deltalake import DeltaTable

#: Properties that make Delta's writers compute or check something that naming finished files cannot.
_REFUSED_PROPERTIES = {
    "delta.columnMapping.mode": ("none", "files would need the physical column names"),
    "delta.enableRowTracking": ("false", "added files would need row ids"),
}
#: Further properties that replacing files would violate.
_REFUSED_WHEN_REPLACING = {
    "delta.appendOnly": ("false", "nothing in it may be replaced"),
    "delta.enableChangeDataFeed": ("false", "rows that only move to another file would show as changes"),
    "delta.enableDeletionVectors": ("false", "rows deleted that way would reappear"),
}
#: Writer features that this writer supports, or whose use the checks above exclude.
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


def fit_problems(
    table: DeltaTable, rows: pa.Schema, files: pa.Schema, partition_by: tuple[str, ...], *, replaces: bool
) -> list[str]:
    """Why files of this schema cannot become part of the table. ``replaces``: and replace others."""
    import pyarrow as pa
    from deltalake import Schema

    # The files' schema allows nulls everywhere; only the schema of the rows says where nulls can occur.
    strict = pa.schema([field.with_nullable(rows.field(field.name).nullable) for field in files])
    problems = property_problems(table.metadata().configuration, replaces=replaces)
    if replaces:
        protocol = table.protocol()
        problems += feature_problems(protocol.min_writer_version, protocol.writer_features)
    problems += schema_problems(Schema.from_arrow(strict).to_json(), table.schema().to_json())
    if (found := tuple(table.metadata().partition_columns)) != partition_by:
        problems.append(f"it is partitioned by {found or 'nothing'}, the sink by {partition_by or 'nothing'}")
    return problems


def property_problems(configuration: Mapping[str, str | None], *, replaces: bool = False) -> list[str]:
    """Why the table's properties forbid it. ``replaces``: not only adding, but replacing files."""
    refused = _REFUSED_PROPERTIES | (_REFUSED_WHEN_REPLACING if replaces else {})
    problems = [
        f"{key} is {configuration[key]}: {reason}"
        for key, (harmless, reason) in refused.items()
        if (configuration.get(key) or harmless).lower() != harmless
    ]
    problems += [f"{key} would not be checked" for key in configuration if key.startswith("delta.constraints.")]
    return problems


def check_removable(configuration: Mapping[str, str | None], path: Path) -> None:
    """Refuse to rewind a table from which nothing may be removed."""
    if (configuration.get("delta.appendOnly") or "false").lower() == "true":
        raise SinkError(
            "the table is append-only and cannot be rewound",
            next_step="restore the flow without rewinding this sink, or unset delta.appendOnly",
            path=path,
        )


def feature_problems(writer_version: int, writer_features: Sequence[str] | None) -> list[str]:
    """Features that the table requires of writers of its log and that this writer lacks."""
    if writer_version <= _LAST_VERSION_WITHOUT_FEATURES:
        return []
    unknown = sorted(set(writer_features or ()) - _KNOWN_FEATURES)
    return [f"it requires writers to support {', '.join(unknown)}"] if unknown else []


def schema_problems(rows: str, table: str) -> list[str]:
    """Why the schemas (both as Delta's JSON) do not fit. The order of columns does not matter."""
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
    # Delta reads a column that a file lacks as null, so the column must be nullable.
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
