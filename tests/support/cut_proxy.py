"""Stands between a client of PostgreSQL or Kafka and its server, and cuts the line at the worst moment."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

#: How PostgreSQL's protocol says COMMIT: a simple query of this text.
_COMMIT = b"COMMIT\x00"
#: Kafka's number for the request that ends a transaction.
_END_TXN = b"\x00\x1a"


def is_postgres_commit(data: bytes) -> bool:
    return _COMMIT in data


def is_kafka_commit(data: bytes) -> bool:
    """Requests begin with their length and their kind; the client sends this one by itself."""
    at = 0
    while at + 6 <= len(data):
        if data[at + 4 : at + 6] == _END_TXN:
            return True
        at += 4 + int.from_bytes(data[at : at + 4], "big")
    return False


class CutProxy:
    """Passes everything on. Of the next ``cut_answers`` COMMITs nobody hears the answer: the line is cut instead."""

    def __init__(self, server_port: int, is_commit: Callable[[bytes], bool] = is_postgres_commit) -> None:
        self._server_port = server_port
        self._is_commit = is_commit
        #: Nobody gets through after the next cut.
        self.shut_after_cut = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        #: How many COMMITs are still to go unanswered, and how many have.
        self.cut_answers = 0
        self.cut = 0
        #: Nobody gets through any more.
        self.is_shut = False
        self._threads = [threading.Thread(target=self._accept, name="cut-proxy")]
        self._open: list[socket.socket] = []
        self._threads[0].start()

    def close(self) -> None:
        self.is_shut = True
        for line in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()
        for thread in self._threads:
            thread.join()

    def shut(self) -> None:
        """Cut all lines, and let nobody through until ``is_shut`` is False again."""
        self.is_shut = True
        for line in self._open:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.is_shut:
                    client.close()
                    continue
                try:
                    server = socket.create_connection(("127.0.0.1", self._server_port))
                except ConnectionRefusedError:
                    client.close()
                    continue
                self._open += [client, server]
                line = _Line()
                for source, target, is_client in ((client, server, True), (server, client, False)):
                    thread = threading.Thread(target=self._pass_on, args=(source, target, line, is_client))
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket, line: _Line, is_client: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_client and self.cut_answers and self._is_commit(data):
                    self.cut_answers -= 1
                    line.is_doomed = True
                elif not is_client and line.is_doomed:
                    self.cut += 1
                    if self.shut_after_cut:
                        self.shut()
                    break  # the server has answered, so it has committed; nobody will hear of it
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class _Line:
    is_doomed = False


@contextlib.contextmanager
def cut_proxy(server_port: int, is_commit: Callable[[bytes], bool] = is_postgres_commit) -> Iterator[CutProxy]:
    proxy = CutProxy(server_port, is_commit)
    try:
        yield proxy
    finally:
        proxy.close()
