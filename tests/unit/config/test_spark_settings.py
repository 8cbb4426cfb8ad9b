"""Which setting of Spark wins, and what is read from the places where users write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.config.spark_settings import (
    effective,
    file_settings,
    flag_settings,
    is_local,
    outside_settings,
    submit_settings,
)
from cutline.errors import ConfigError

DRIVER = "spark.driver.extraJavaOptions"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A Spark whose spark-defaults.conf names a master."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text("spark.master spark://file:7077\nspark.x file\n")
    return tmp_path


def test_the_command_wins_over_submitted_arguments_over_the_environment_over_the_file(home: Path) -> None:
    environment: dict[str, str] = {"MASTER": "local[7]"}
    assert outside_settings(environment, home)["spark.master"] == "spark://file:7077"
    environment["SPARK_MASTER"] = "spark://environment:7077"
    assert outside_settings(environment, home)["spark.master"] == "spark://environment:7077"
    environment["PYSPARK_SUBMIT_ARGS"] = "--master spark://submitted:7077 pyspark-shell"
    outside = outside_settings(environment, home)
    assert outside == {"spark.master": "spark://submitted:7077", "spark.x": "file"}
    given = flag_settings("spark://flag:7077", ["spark.x=flag", "spark.y=a=b"])
    own = {"spark.x": "ours", "spark.z": "ours"}
    assert effective(own, outside, given, default_master="local[*]") == {
        "spark.master": "spark://flag:7077",
        "spark.x": "flag",
        "spark.y": "a=b",
        "spark.z": "ours",
    }


def test_without_any_setting_the_master_is_the_default(tmp_path: Path) -> None:
    assert outside_settings({}, tmp_path) == {}
    assert effective({}, {}, {}, default_master="local[*]") == {"spark.master": "local[*]"}


def test_another_folder_of_settings_replaces_that_of_the_installation(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    assert outside_settings({"SPARK_CONF_DIR": str(other)}, home) == {}
    (other / "spark-defaults.conf").write_text("spark.x other\n")
    assert outside_settings({"SPARK_CONF_DIR": str(other)}, home) == {"spark.x": "other"}
    (other / "mine.conf").write_text("spark.x mine\n")
    environment = {"SPARK_CONF_DIR": str(other), "PYSPARK_SUBMIT_ARGS": f"--properties-file {other / 'mine.conf'}"}
    assert outside_settings(environment, home) == {"spark.x": "mine"}


def test_options_of_the_jvm_are_added_to_those_of_the_user() -> None:
    own = {DRIVER: "-Dours=1 -Dshared=1"}
    outside = {DRIVER: "-Dtheirs=1 -Dshared=1"}
    assert effective(own, outside, {}, default_master="local")[DRIVER] == "-Dours=1 -Dtheirs=1 -Dshared=1"
    given = {DRIVER: "-Dflag=1"}
    assert effective(own, outside, given, default_master="local")[DRIVER] == "-Dours=1 -Dshared=1 -Dflag=1"
    assert effective(own, {}, {}, default_master="local")[DRIVER] == own[DRIVER]


def test_a_file_is_read_as_java_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "spark-defaults.conf"
    path.write_text(
        "# comment\n! too\n\n spark.a   one two \nspark.b=three\nspark.c: four=4\n"
        "spark.d  -Da=1 \\\n    -Db=2\nspark.e\n"
    )
    assert file_settings(path) == {
        "spark.a": "one two",
        "spark.b": "three",
        "spark.c": "four=4",
        "spark.d": "-Da=1 -Db=2",
        "spark.e": "",
    }
    assert file_settings(tmp_path / "missing.conf") == {}


def test_submitted_arguments_are_read_in_both_spellings() -> None:
    found, file = submit_settings(
        "--master=local[3] --conf spark.a=1 -c 'spark.b=x y' --driver-memory 3g --jars a.jar --properties-file p.conf x"
    )
    assert found == {"spark.master": "local[3]", "spark.a": "1", "spark.b": "x y", "spark.driver.memory": "3g"}
    assert file == "p.conf"


@pytest.mark.parametrize(
    ("item", "what"),
    [("spark.a", "there is no value"), ("=1", "there is no key"), ("checkpoint_interval=5s", "not a setting of Spark")],
)
def test_a_setting_that_is_none_of_sparks_is_refused(item: str, what: str) -> None:
    with pytest.raises(ConfigError, match=f"--conf .*{what}"):
        flag_settings(None, [item])


@pytest.mark.parametrize(
    ("master", "expected"),
    [("local", True), ("local[*]", True), ("local[2,3]", True), ("local-cluster[1,1,512]", False), ("yarn", False)],
)
def test_a_local_master_is_one_process(master: str, expected: bool) -> None:
    assert is_local(master) is expected
