"""Stands between a PostgreSQL client and its server, and cuts the line at the worst moment."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

#: How the protocol says COMMIT: a simple query of this text.
_COMMIT = b"COMMIT\x00"


class CutProxy:
    """Passes everything on. Of the next ``cut_answers`` COMMITs nobody hears the answer: the line is cut instead."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
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

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.is_shut:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._open += [client, server]
                line = _Line()
                for source, target, is_client in ((client, server, True), (server, client, False)):
                    thread = threading.Thread(target=self._pass_on, args=(source, target, line, is_client))
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket, line: _Line, is_client: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_client and self.cut_answers and _COMMIT in data:
                    self.cut_answers -= 1
                    line.is_doomed = True
                elif not is_client and line.is_doomed:
                    self.cut += 1
                    break  # the server has answered, so it has committed; nobody will hear of it
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class _Line:
    is_doomed = False


@contextlib.contextmanager
def cut_proxy(server_port: int) -> Iterator[CutProxy]:
    proxy = CutProxy(server_port)
    try:
        yield proxy
    finally:
        proxy.close()
