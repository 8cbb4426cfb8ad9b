"""Whether the stores and servers that the configuration names can be reached."""

from __future__ import annotations

import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cutline.base.redaction import address_without_secrets, without_secrets
from cutline.cli.upkeep.checks import Finding, check_folder, compared_clocks, ok
from cutline.config.compatibility import BUCKET_SCHEMES
from cutline.config.options import Options
from cutline.errors import CutlineError

#: A store that does not answer is retried for longer than a person waits.
ANSWER_SECONDS = 20.0
_CONNECT_SECONDS = 5.0
_SERVER = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?:[^/@]*@)?(?P<host>[^/:]+)(?::(?P<port>\d+))?(?:/|$)")
_PORTS = {"hdfs": 8020, "http": 80, "https": 443}


def check_places(options: Options, seconds: float = ANSWER_SECONDS) -> Iterator[Finding]:
    """Every place that the options name beside the storage."""
    for name in ("remote", "channel_store"):
        place = str(getattr(options, name))
        if place.startswith(BUCKET_SCHEMES):
            yield from _check_bucket(name, place, options.remote_options, seconds)
        elif place:
            yield from check_folder(Path(place.removeprefix("file://")).resolve(), name)
    if options.spark_dirs:
        yield from _check_spark_dirs(options.spark_dirs)


def _check_bucket(name: str, place: str, remote_options: dict[str, str], seconds: float) -> Iterator[Finding]:
    shown = address_without_secrets(place)
    try:
        difference_ms = _within(seconds, lambda: _try_store(place, remote_options))
    except ImportError:
        yield Finding(
            check=name,
            verdict="fail",
            text=f"{shown}: the client of object stores is not installed",
            next_step="run: python -m pip install 'cutline[objectstore]'",
        )
    except TimeoutError:
        yield Finding(
            check=name,
            verdict="fail",
            text=f"{shown} has not answered within {seconds:.0f} s",
            next_step="check the endpoint in remote_options, the network and its proxies",
        )
    except (CutlineError, OSError) as error:
        yield Finding(
            check=name,
            verdict="fail",
            text=without_secrets(f"{shown}: {error.what if isinstance(error, CutlineError) else error}"),
            next_step=without_secrets(getattr(error, "next_step", ""))
            or "check the bucket, the credentials in the environment, and the endpoint in remote_options",
        )
    else:
        yield ok(name, f"{shown}: objects can be created, read and deleted")
        yield compared_clocks("clock", difference_ms, f"the store {shown}")


def _try_store(place: str, remote_options: dict[str, str]) -> float:
    """Create, read, find and delete an object; how far the store's clock is ahead of this one."""
    from cutline.runtime.stores import store_at

    store, path = store_at(place, remote_options), f"cutline-doctor-{secrets.token_hex(4)}"
    before_ms = time.time() * 1000
    try:
        store.create(path, b"cutline doctor")
        after_ms = time.time() * 1000
        store.read(path)
        found = store.find(path)
    finally:
        store.delete([path])
    written_ms = found.modified_ms if found is not None else before_ms
    # Anything between the two moments agrees; and stores tell whole seconds.
    return min(written_ms + 999 - before_ms, 0) if written_ms < before_ms else max(written_ms - after_ms, 0)


def _within(seconds: float, act: Callable[[], float]) -> float:
    """The result, or the error; TimeoutError if it takes longer. What does not end, ends with the command."""
    results: list[float] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(act())
        except Exception as error:  # noqa: BLE001 (handed to the caller's thread)
            errors.append(error)

    thread = threading.Thread(target=run, name="cutline-doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


def _check_spark_dirs(place: str) -> Iterator[Finding]:
    shown, found = address_without_secrets(place), _SERVER.match(place)
    if "://" not in place or place.startswith("file://"):
        yield from check_folder(Path(place.removeprefix("file://")).resolve(), "spark_dirs")
        return
    port = int(found["port"] or _PORTS.get(found["scheme"], 0)) if found is not None else 0
    if found is None or not port:
        yield ok("spark_dirs", f"{shown}: not checked, because only Spark can open it")
        return
    try:
        socket.create_connection((found["host"], port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        yield Finding(
            check="spark_dirs",
            verdict="fail",
            text=f"{shown}: {found['host']} does not answer at port {port}: {error.strerror or error}",
            next_step="check the address, the server, the network and its firewalls",
        )
    else:
        yield ok("spark_dirs", f"{shown}: the server answers at port {port}")
