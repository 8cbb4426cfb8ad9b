"""Where options come from: defaults < ``cutline.toml`` < environment < flags."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cutline.config.options import Options, build_options, declarations
from cutline.errors import ConfigError

CONFIG_FILE = Path("cutline.toml")


def load_options(settings: Mapping[str, Any], *, config_file: Path | None = None) -> Options:
    """The options of a run: ``settings`` win over the environment, which wins over the file. None means "not set here".

    Without ``config_file``, ``cutline.toml`` in the working directory is read if it exists.
    """
    path = config_file or CONFIG_FILE
    from_file = file_layer(path) if config_file or path.exists() else {}
    return build_options(from_file, environment_layer(os.environ), settings)


def environment_layer(environment: Mapping[str, str]) -> dict[str, str]:
    """The options set as CUTLINE_… variables."""
    names = {option.environment_name: option.name for option in declarations().values()}
    return {names[key]: value for key, value in environment.items() if key in names}


def file_layer(path: Path) -> dict[str, Any]:
    """The options in a ``cutline.toml``: top-level ones, and those of single operators in ``[operators.<name>]``."""
    try:
        loaded = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{path.name} does not exist", path=path) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} is not valid TOML: {error}", path=path) from error
    return loaded
