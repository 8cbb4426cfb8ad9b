"""``cutline doctor`` asks a real S3 server: with the right key, and with a wrong one."""

from __future__ import annotations

from cutline.cli.upkeep.reach import check_places
from cutline.config.options import build_options
from cutline.runtime.stores import store_at
from cutline.testing.servers.s3 import S3Server


def test_a_bucket_is_tried_and_left_as_it_was(s3_server: S3Server) -> None:
    place = s3_server.fresh_url()

    def checked(**more: str) -> list[tuple[str, str, str]]:
        options = build_options({"remote": place, "remote_options": {**s3_server.options, **more}})
        return [(one.check, one.verdict, one.text) for one in check_places(options, seconds=10.0)]

    reached, clock = checked()
    assert reached[:2] == ("remote", "ok"), reached
    assert clock[:2] == ("clock", "ok"), clock
    assert list(store_at(place, s3_server.options).walk()) == []
    (refused,) = checked(secret_access_key="wrong-hunter2")
    assert refused[:2] == ("remote", "fail") and "hunter2" not in refused[2]
