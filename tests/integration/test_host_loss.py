"""A host is lost for good: kill -9, and all it had stored is gone. The flow comes back from a real S3 server.

Meanwhile the server itself is away, answers nothing, or dies in the middle of an upload.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cutline.demo.run import run_demo
from cutline.demo.settings import DemoSettings

if TYPE_CHECKING:
    from cutline.testing.servers.s3 import S3Server

pytestmark = [pytest.mark.spark, pytest.mark.kill]


class BadDays:
    """Freezes and kills the server in turn, for as long as the test runs."""

    def __init__(self, server: S3Server) -> None:
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.times = 0

    def __enter__(self) -> BadDays:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._server.start()

    def _run(self) -> None:
        while not self._over.wait(4):
            if self.times % 2:
                self._server.kill()
                self._over.wait(1.5)
                self._server.start()
            else:
                self._server.freeze()
                self._over.wait(1.5)
                self._server.thaw()
            self.times += 1


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_lost_host_comes_back_from_a_server_that_has_bad_days(tmp_path: Path, s3_server: S3Server) -> None:
    settings = DemoSettings(
        folder=str(tmp_path),
        rows=60_000,
        keys=500,
        seed=7,
        interval="500ms",
        mode="auto",
        seconds=25.0,
        remote=s3_server.fresh_url(),
        remote_options=s3_server.options,
    )
    with BadDays(s3_server) as days:
        report = run_demo(settings, 1, lambda *_: None, loses_host=True)
    assert days.times >= 4
    assert (report["lost"], report["duplicated"], report["wrong_amounts"]) == (0, 0, 0), report
    assert [recovery["path"] for recovery in report["recoveries"]] == ["remote"]
