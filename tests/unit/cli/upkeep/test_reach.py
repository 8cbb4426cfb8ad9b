"""Stores and servers that the configuration names: reached, refused, silent."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutline.cli.upkeep.reach import check_places
from cutline.config.options import build_options


def checked(**settings: object) -> list[tuple[str, str]]:
    return [(one.check, one.verdict) for one in check_places(build_options(settings), seconds=1.0)]


def test_nothing_named_is_nothing_checked() -> None:
    assert checked() == []


def test_a_folder_as_remote_tier_is_tried(tmp_path: Path) -> None:
    assert checked(remote=str(tmp_path / "remote")) == [("remote", "ok"), ("clock", "ok")]
    (tmp_path / "file").touch()
    assert checked(remote=str(tmp_path / "file")) == [("remote", "fail")]
    assert checked(channel_store=f"file://{tmp_path}") == [("channel_store", "ok"), ("clock", "ok")]


@pytest.fixture
def silent() -> Iterator[int]:
    """A port at which connections are taken and never answered."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_store_that_does_not_answer_is_not_waited_for(silent: int) -> None:
    options = {"endpoint": f"http://127.0.0.1:{silent}", "region": "x", "access_key_id": "x"}
    options |= {"secret_access_key": "hunter2"}
    (found,) = check_places(build_options({"remote": "s3://bucket/x", "remote_options": options}), seconds=1.0)
    assert found.verdict == "fail" and "has not answered within 1 s" in found.text
    assert "endpoint" in found.next_step


def test_servers_are_connected_to_and_what_only_spark_can_open_is_left(silent: int, tmp_path: Path) -> None:
    assert checked(spark_dirs=f"hdfs://127.0.0.1:{silent}/x") == [("spark_dirs", "ok")]
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    assert checked(spark_dirs=f"hdfs://127.0.0.1:{free}/x") == [("spark_dirs", "fail")]
    assert checked(spark_dirs="s3a://bucket/x") == [("spark_dirs", "ok")]
    assert checked(spark_dirs=str(tmp_path)) == [("spark_dirs", "ok"), ("clock", "ok")]
