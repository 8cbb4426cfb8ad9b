"""Which URLs name a store, and that none of them gives a secret away."""

from __future__ import annotations

import pytest

from cutline.errors import ConfigError
from cutline.objects import open_store

_OPTIONS = {
    "endpoint": "http://127.0.0.1:1",
    "region": "us-east-1",
    "access_key_id": "the-access-key",
    "secret_access_key": "the-secret-key",
}


def test_the_same_name_in_memory_is_the_same_store() -> None:
    open_store("memory://shared").replace("one", b"1")
    assert open_store("memory://shared/").read("one") == b"1"
    assert open_store("memory://other").find("one") is None


@pytest.mark.parametrize("url", ["http://host/x", "ftp://host/x", "s3://", "memory://", "file://host/x", "file:x://"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        open_store(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hidden-word@bucket/x",
        "s3://bucket/x?secret=hidden-word",
        "s3://b/#hidden-word",
        "s3://key:p@hidden-word@bucket/x",
        "s3://key:p/hidden-word@bucket/x",
        "s3://key:p:hidden-word/d@bucket/x",
        "s3://key:p#hidden-word@bucket/x",
        "s3://key:%zzhidden-word@bucket/x",
        "s3://[hidden-word/x",
        "file://u:hidden-word@host/x",
    ],
)
def test_a_url_with_more_than_a_place_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_store(url)
    assert "hidden-word" not in str(refused.value)


@pytest.mark.parametrize("url", ["/tmp", "memory://name"])
def test_options_are_for_remote_stores(url: str) -> None:
    with pytest.raises(ConfigError):
        open_store(url, {"region": "us-east-1"})


@pytest.mark.parametrize(
    "wrong", [{"no_such_option": "hidden-word"}, {"request_timeout_s": "soon"}, {"retry_for_s": "-1"}]
)
def test_wrong_options_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as refused:
        open_store("s3://bucket/prefix", _OPTIONS | wrong)
    assert "hidden-word" not in str(refused.value)


def test_a_store_shows_its_place_and_no_secret() -> None:
    store = open_store("s3://bucket/prefix/", _OPTIONS)
    assert store.url == "s3://bucket/prefix"
    for shown in (repr(store), str(store), store.url):
        assert "the-" not in shown


@pytest.mark.parametrize("url", ["gs://bucket/prefix", "az://container/prefix"])
def test_the_other_clouds_can_be_opened(url: str) -> None:
    options = {"account_name": "somebody"} if url.startswith("az") else {}
    assert open_store(url, options).url == url
