"""``cutline doctor``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import typer

from cutline.base.redaction import without_secrets
from cutline.cli.failures import ExitCode
from cutline.cli.options import Config, Json, Storage
from cutline.cli.upkeep.checks import (
    Finding,
    check_disk,
    check_folder,
    check_java,
    check_memory,
    check_pyspark,
    check_python,
    ok,
)
from cutline.cli.words import counted
from cutline.config.loading import load_options
from cutline.config.options import Options
from cutline.errors import ConfigError

_COLOURS = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}


def doctor(storage: Storage = None, config: Config = None, as_json: Json = False) -> None:
    """Check what Cutline needs on this machine, and say what to do about what is missing.

    Writes a small file to the storage folder and to each store that the configuration names, and removes it again.
    Exit code 1: something fails.
    """
    found = []
    for one in examine(storage, config):
        found.append(one)
        if not as_json:
            _print(one)
    failures, warnings = (sum(one.verdict == verdict for one in found) for verdict in ("fail", "warn"))
    if as_json:
        import msgspec

        answer = {"is_ok": not failures, "checks": msgspec.to_builtins(found)}
        typer.echo(json.dumps(answer))
    else:
        typer.echo(f"{counted(len(found), 'check')}: {counted(failures, 'failure')}, {counted(warnings, 'warning')}")
    if failures:
        raise typer.Exit(ExitCode.FAILED)


def examine(storage: str | None, config: Path | None) -> Iterator[Finding]:
    """All checks, one after the other: some take seconds."""
    yield check_python()
    yield check_pyspark()
    yield check_java()
    yield check_memory()
    try:
        options = load_options({"storage": storage}, config_file=config)
    except ConfigError as error:
        yield Finding(
            check="configuration", verdict="fail", text=without_secrets(error.what), next_step=error.next_step
        )
        options = Options(storage=storage) if storage else Options()
    else:
        yield ok("configuration", "is valid")
    folder = Path(options.storage).resolve()
    yield from check_disk(folder)
    yield from check_folder(folder)
    if options.remote or options.channel_store or options.spark_dirs:
        from cutline.cli.upkeep.reach import check_places

        yield from check_places(options)


def _print(one: Finding) -> None:
    verdict = typer.style(f"{one.verdict:<4}", fg=_COLOURS[one.verdict], bold=one.verdict != "ok")
    typer.echo(f"{verdict}  {one.check}: {_printable(one.text)}")
    if one.next_step:
        typer.echo(f"      Next: {_printable(one.next_step)}")


def _printable(text: str) -> str:
    """A path or an address may hold what moves the cursor."""
    return "".join(one if one.isprintable() else "?" for one in text)
