"""``/metrics`` and ``/healthz`` of the flows of this process, on a port that is closed with them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
from prometheus_client.exposition import choose_encoder

from cutline.base.logs import get_logger
from cutline.base.redaction import without_secrets
from cutline.config.addresses import parse_address
from cutline.errors import ConfigError
from cutline.runtime.process.flows import Flows

log = get_logger(__name__)

#: A client that sends nothing does not hold a thread for longer.
_REQUEST_SECONDS = 10


@contextlib.contextmanager
def serving(flows: Flows, address: str | None) -> Iterator[int | None]:
    """Serve for the length of the block; yields the port. ``address``: None serves nothing."""
    if address is None:
        yield None
        return
    server = _bind(flows, *parse_address(address))
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="cutline-http", daemon=True)
    thread.start()
    try:
        log.info("http_served", address=f"{server.server_name}:{server.server_port}")
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Without the look-up of a name, which may take seconds."""
        # A run that follows another one gets the port; one beside it does not.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("http_request_failed", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _bind(flows: Flows, host: str, port: int) -> ThreadingHTTPServer:
    class Handler(_Handler):
        served = flows

    try:
        return (_Server6 if ":" in host else _Server)((host, port), Handler)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"--http: cannot listen on {host}:{port}: {reason}",
            next_step="choose an address and a port that are free on this machine, or end the process that has them",
        ) from error


class _Handler(BaseHTTPRequestHandler):
    served: Flows
    timeout = _REQUEST_SECONDS
    server_version = "cutline"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(HTTPStatus.OK, content_type, encode(self.served))
        elif path == "/healthz":
            self._answer_health()
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there are /metrics and /healthz\n")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer_health(self) -> None:
        """Every flow with its state; with 503, ``unhealthy`` names those that are not well, and why."""
        health = self.served.health()
        unhealthy = {name: without_secrets(one.reason) for name, one in health.items() if not one.healthy}
        answer = {
            "healthy": not unhealthy,
            "flows": {name: one.state for name, one in health.items()},
            "unhealthy": unhealthy,
        }
        code = HTTPStatus.SERVICE_UNAVAILABLE if unhealthy else HTTPStatus.OK
        self._answer(code, "application/json", msgspec.json.encode(answer) + b"\n")

    def _answer(self, code: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("http_request", request=format % args)
