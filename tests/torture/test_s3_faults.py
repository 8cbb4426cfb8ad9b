"""What a store on S3 says when its server is dead, frozen, or does not know us."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cutline.errors import MissingObject, NotDone, OutcomeUnknown, Refused
from cutline.objects import open_store
from cutline.ports.objects import ObjectStore
from cutline.testing.servers.s3 import SECRET_KEY, S3Server

_IMPATIENT = {"request_timeout_s": "1", "retry_for_s": "0.3"}
_LARGE = 12_000_000


def impatient(server: S3Server) -> ObjectStore:
    return open_store(server.fresh_url(), server.options | _IMPATIENT)


def reads(store: ObjectStore, tmp_path: Path) -> list[Callable[[], object]]:
    return [
        lambda: store.read("one"),
        lambda: store.find("one"),
        lambda: list(store.walk()),
        lambda: store.download("one", tmp_path / "target"),
    ]


def writes(store: ObjectStore) -> list[Callable[[], object]]:
    return [
        lambda: store.create("new", b"1"),
        lambda: store.replace("one", b"2"),
        lambda: store.delete(["one"]),
    ]


class TestDeadServer:
    """One test, as this server sometimes needs long to come back."""

    @pytest.fixture
    def store(self, s3_server: S3Server) -> Iterator[ObjectStore]:
        store = impatient(s3_server)
        store.create("one", b"1")
        yield store
        s3_server.start()

    def test_a_write_it_dies_over_is_uncertain_and_later_ones_are_not_done(
        self, store: ObjectStore, s3_server: S3Server, tmp_path: Path
    ) -> None:
        s3_server.freeze()
        with ThreadPoolExecutor(1) as pool:
            creating = pool.submit(store.create, "perhaps", b"1")
            time.sleep(0.3)
            s3_server.kill()
            with pytest.raises(OutcomeUnknown):
                creating.result()
        for operation in reads(store, tmp_path) + writes(store):
            with pytest.raises(NotDone) as failed:
                operation()
            assert not isinstance(failed.value, MissingObject)
        assert not (tmp_path / "target").exists()
        s3_server.start()
        assert store.read("one") == b"1"
        assert store.find("new") is None


class TestFrozenServer:
    @pytest.fixture
    def store(self, s3_server: S3Server) -> Iterator[ObjectStore]:
        store = impatient(s3_server)
        store.create("one", b"1")
        s3_server.freeze()
        yield store
        s3_server.thaw()

    def test_reads_are_not_done_and_writes_uncertain_both_in_bounded_time(
        self, store: ObjectStore, s3_server: S3Server, tmp_path: Path
    ) -> None:
        begun = time.monotonic()
        with pytest.raises(NotDone):
            store.read("one")
        for write in writes(store):
            with pytest.raises(OutcomeUnknown):
                write()
        assert time.monotonic() - begun < 8

    def test_a_repeated_create_and_what_is_read_agree(self, store: ObjectStore, s3_server: S3Server) -> None:
        with pytest.raises(OutcomeUnknown):
            store.create("new", b"content")
        s3_server.thaw()
        # Whether the first one arrived or the second one won, the object is there with these bytes, once and for all.
        store.create("new", b"content")
        assert store.read("new") == b"content"
        assert not store.create("new", b"other")
        assert store.read("new") == b"content"

    def test_an_upload_in_parts_is_uncertain_in_bounded_time(
        self, store: ObjectStore, s3_server: S3Server, tmp_path: Path
    ) -> None:
        (tmp_path / "source").write_bytes(b"x" * _LARGE)
        begun = time.monotonic()
        with pytest.raises(OutcomeUnknown):
            store.upload("large", tmp_path / "source")
        assert time.monotonic() - begun < 12
        s3_server.thaw()
        store.upload("large", tmp_path / "source")
        assert store.read("large") == b"x" * _LARGE


class TestWrongCredentials:
    def test_all_is_refused_and_no_secret_is_told(self, s3_server: S3Server, tmp_path: Path) -> None:
        url = s3_server.fresh_url()
        right = open_store(url, s3_server.options)
        right.create("one", b"1")
        wrong = open_store(url, s3_server.options | {"secret_access_key": f"not-{SECRET_KEY}"})
        for operation in reads(wrong, tmp_path) + writes(wrong):
            with pytest.raises(Refused) as refused:
                operation()
            everything = "".join(traceback.format_exception(refused.value))
            assert SECRET_KEY not in everything
            assert "status 403" in str(refused.value)
        assert right.read("one") == b"1"
        assert right.find("new") is None


class TestEnvironment:
    def test_credentials_and_address_come_from_it_and_options_win(
        self, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.options["access_key_id"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.options["endpoint"])
        url = s3_server.fresh_url()
        assert open_store(url).create("one", b"1")
        with pytest.raises(NotDone):
            open_store(url, {"secret_access_key": "wrong"}).read("one")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        assert open_store(url, {"secret_access_key": SECRET_KEY}).read("one") == b"1"


class TestOddAnswers:
    """Answers that no server gives on demand: a small HTTP server says them, obstore really hears them."""

    @pytest.mark.parametrize(
        ("status", "meaning"),
        [
            (301, Refused),
            (400, Refused),
            (403, Refused),
            (404, Refused),
            (408, OutcomeUnknown),
            (500, OutcomeUnknown),
            (503, OutcomeUnknown),
        ],
    )
    def test_a_write_is_sent_once_and_its_status_decides(self, status: int, meaning: type[Exception]) -> None:
        with AnsweringServer([status]) as server:
            with pytest.raises(meaning):
                server.store.create("one", b"1")
            with pytest.raises(meaning):
                server.store.replace("one", b"1")
            assert server.asked == ["PUT", "PUT"]

    def test_a_forked_process_is_told_at_once_and_its_parent_goes_on(self) -> None:
        with AnsweringServer([200]) as server:
            server.store.replace("one", b"1")
            child = os.fork()
            if child == 0:
                signal.alarm(5)
                try:
                    server.store.replace("one", b"2")
                except NotDone:
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            server.store.replace("one", b"3")
            assert server.asked == ["PUT", "PUT"]

    def test_a_short_absence_is_waited_for(self) -> None:
        server = AnsweringServer([200])
        with ThreadPoolExecutor(2) as pool:
            creating, finding = pool.submit(server.store.create, "one", b"1"), pool.submit(server.store.find, "one")
            time.sleep(0.3)
            assert server.asked == []
            with server:
                assert creating.result() and finding.result()

    def test_a_create_that_meets_another_write_under_way_tries_again(self) -> None:
        # 409 to the PUT, 404 to the look whether it is there, 200 to the second PUT.
        with AnsweringServer([409, 404, 200]) as server:
            assert server.store.create("one", b"1")
            assert server.asked == ["PUT", "HEAD", "PUT"]

    def test_a_create_that_is_told_to_slow_down_tries_again(self) -> None:
        with AnsweringServer([429, 412]) as server:
            assert not server.store.create("one", b"1")
            assert server.asked == ["PUT", "PUT"]

    def test_a_read_is_repeated_after_an_error_of_the_server(self) -> None:
        with AnsweringServer([500, 503, 200]) as server:
            assert server.store.read("one") == b""
            assert server.asked == ["GET", "GET", "GET"]

    def test_every_object_of_a_missing_bucket_is_not_just_a_missing_object(self) -> None:
        with AnsweringServer([404], body=b"<Error><Code>NoSuchBucket</Code></Error>") as server:
            with pytest.raises(Refused):
                server.store.read("one")
            with pytest.raises(Refused):
                list(server.store.walk())


class AnsweringServer:
    """Answers each request with the next status of a list, the last one for ever. Not there until entered."""

    def __init__(self, statuses: list[int], body: bytes = b"") -> None:
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.asked.append(self.command)
                self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
                self.send_header("ETag", '"tag"')
                self.send_header("Last-Modified", "Mon, 16 Nov 2026 06:00:00 GMT")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_HEAD = do_PUT = do_POST = answer  # noqa: N815 (http.server's names)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        # Bound without listening: the port is ours, and connections are refused.
        self._server.server_bind()
        self._server.daemon_threads = True
        options = {
            "endpoint": f"http://127.0.0.1:{self._server.server_address[1]}",
            "access_key_id": "key",
            "secret_access_key": "secret",
        }
        self.store = open_store("s3://bucket/prefix", options | {"request_timeout_s": "2", "retry_for_s": "2"})

    def __enter__(self) -> AnsweringServer:
        self._server.server_activate()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
