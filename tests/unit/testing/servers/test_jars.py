"""Java archives are there as a whole or not at all, and what is missing is said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.errors import ConfigError
from cutline.testing.servers.jars import CACHE_VARIABLE, JarSet, classpath, fetch, folder_of, jars, why_not

SMALL = JarSet("small", ("org.example:one:1.0", "org.example:two:2.0"), excluded=("org.example:three",))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


def maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A program named mvn: how the real one fails cannot be arranged."""
    program = tmp_path / "bin" / "mvn"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


def test_what_is_missing_is_said_in_one_line(cache: Path) -> None:
    assert "\n" not in why_not(SMALL)
    assert "make jars" in why_not(SMALL)
    with pytest.raises(ConfigError, match="make jars"):
        jars(SMALL)


def test_without_maven_the_next_step_is_to_install_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install maven"):
        fetch(SMALL)


def test_a_set_is_fetched_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = "grep -q '<artifactId>three</artifactId>' pom.xml && mkdir -p target/dependency"
    maven(tmp_path, monkeypatch, f"{copied} && touch target/dependency/one-1.0.jar && echo run >> {tmp_path}/runs")
    fetch(SMALL)
    fetch(SMALL)
    assert why_not(SMALL) == ""
    assert [path.name for path in jars(SMALL)] == ["one-1.0.jar"]
    assert classpath(SMALL) == f"{cache / 'small-1.0-2.0'}/*"
    assert (tmp_path / "runs").read_text() == "run\n"


def test_a_failed_fetch_leaves_nothing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = "mkdir -p target/dependency && touch target/dependency/one-1.0.jar"
    maven(tmp_path, monkeypatch, f"{half}; echo '[ERROR] Unknown host'; exit 1")
    with pytest.raises(ConfigError, match="Unknown host"):
        fetch(SMALL)
    assert not folder_of(SMALL).exists()
    assert list(cache.iterdir()) == []


def test_other_versions_are_another_set(cache: Path) -> None:
    assert folder_of(SMALL) != folder_of(SMALL._replace(artifacts=("org.example:one:1.1", "org.example:two:2.0")))
