"""Where options come from: defaults < ``cutline.toml`` < environment < flags."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cutline.base.storage_errors import in_words
from cutline.config.options import Options, build_options, declarations
from cutline.errors import ConfigError

CONFIG_FILE = Path("cutline.toml")


def load_options(settings: Mapping[str, Any], *, config_file: Path | None = None) -> Options:
    """The options of a run: ``settings`` win over the environment, which wins over the file. None means "not set here".

    Without ``config_file``, ``cutline.toml`` in the working directory is read if it exists.
    """
    path = config_file or CONFIG_FILE
    from_file = file_layer(path) if config_file or os.path.lexists(path) else {}
    from_environment = environment_layer(os.environ)
    for name, value in from_environment.items():
        _check({name: value}, variable=declarations()[name].environment_name)
    return build_options(from_file, from_environment, settings)


def environment_layer(environment: Mapping[str, str]) -> dict[str, str]:
    """The options set as CUTLINE_… variables."""
    names = {option.environment_name: option.name for option in declarations().values()}
    return {names[key]: value for key, value in environment.items() if key in names}


def file_layer(path: Path) -> dict[str, Any]:
    """The options in a ``cutline.toml``: top-level ones, and those of single operators in ``[operators.<name>]``."""
    with in_words(path=path):
        if path.is_dir():
            raise ConfigError(f"{path.name} is a folder", next_step="name a file, or remove the folder", path=path)
        try:
            text = path.read_bytes().decode()
        except FileNotFoundError as error:
            raise ConfigError(f"{path.name} does not exist", next_step="check the path", path=path) from error
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            raise ConfigError(
                f"{path.name} is not UTF-8", next_step="save the file as UTF-8", path=path, line=line
            ) from error
    try:
        loaded = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path.name} is not valid TOML: {error}", next_step="correct the file", path=path) from error
    _check_lines(loaded, text, path)
    return loaded


def _check_lines(loaded: Mapping[str, Any], text: str, path: Path) -> None:
    """Check each setting by itself, so that an error names its line."""
    for name, value in loaded.items():
        operators = value if name == "operators" and isinstance(value, Mapping) else {}
        for operator, own in operators.items():
            for key, one in own.items() if isinstance(own, Mapping) else ():
                _check({"operators": {operator: {key: one}}}, path=path, line=_line_of(key, text, operator))
        _check({name: value}, path=path, line=_line_of(name, text))


def _check(layer: Mapping[str, Any], **where: object) -> None:
    try:
        build_options(layer)
    except ConfigError as error:
        error.add_where(**where)
        raise


def _line_of(key: str, text: str, operator: str | None = None) -> int | None:
    """The first line that sets the key, or begins its table; of an operator: in or after the table of that operator."""
    quoted = rf"[\"']?{re.escape(key)}[\"']?"
    is_begun = operator is None
    for number, line in enumerate(text.splitlines(), start=1):
        is_begun = is_begun or str(operator) in line
        if is_begun and re.match(rf"\s*(\[+\s*)?([\w.\"'-]+\.)?{quoted}\s*[=.\]]|.*[{{,]\s*{quoted}\s*=", line):
            return number
    return None
