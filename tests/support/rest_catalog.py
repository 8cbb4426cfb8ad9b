"""A REST catalog of Iceberg tables on loopback, which loses answers when it is told to.

It speaks the part of the protocol that readers and writers of tables need. Requirements are checked, and updates
applied, by pyiceberg's own code, on tables that a database keeps: one commit is one conditional update there.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest, Table

TOKEN = "rest-secret-token-5512"
_STATUS = {
    NoSuchTableError: 404,
    NoSuchNamespaceError: 404,
    TableAlreadyExistsError: 409,
    NamespaceAlreadyExistsError: 409,
    CommitFailedException: 409,
}
_TABLE = re.compile(r"/v1/namespaces/([^/]+)/tables/([^/?]+)")
_TABLES = re.compile(r"/v1/namespaces/([^/]+)/tables")
_NAMESPACE = re.compile(r"/v1/namespaces/([^/?]+)")


class RestCatalogServer:
    """The server, and what it is told to do wrong."""

    def __init__(self, folder: Path) -> None:
        self.tables = SqlCatalog(
            "server", uri=f"sqlite:///{folder}/server.sqlite", warehouse=str(folder / "warehouse"), pool_pre_ping="true"
        )
        #: So many commits happen without an answer, and so many answers are 500 although nothing happened.
        self.lost_answers = 0
        self.failures = 0
        self.commits = 0
        handler = type("Handler", (_Handler,), {"catalog": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="rest-catalog")
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.tables.close()


@contextmanager
def rest_catalog(folder: Path) -> Iterator[RestCatalogServer]:
    server = RestCatalogServer(folder)
    try:
        yield server
    finally:
        server.close()


class _Handler(BaseHTTPRequestHandler):
    catalog: ClassVar[RestCatalogServer]

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, act: Any) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, {"error": {"message": "who are you?", "type": "NotAuthorizedException", "code": 401}})
            return
        try:
            found = act()
        except tuple(_STATUS) as error:
            status = _STATUS[type(error)]
            self._send(status, {"error": {"message": str(error), "type": type(error).__name__, "code": status}})
        except ConnectionAbortedError:
            self.close_connection = True  # without a word
        except OSError as error:
            self._send(500, {"error": {"message": str(error), "type": "ServerError", "code": 500}})
        else:
            self._send(200, found)

    def _get(self) -> Any:
        tables = self.catalog.tables
        if self.path.startswith("/v1/config"):
            return {"defaults": {}, "overrides": {}}
        if match := _TABLE.match(self.path):
            return _loaded(tables.load_table((match[1], match[2])))
        if match := _NAMESPACE.match(self.path):
            return {"namespace": [match[1]], "properties": dict(tables.load_namespace_properties(match[1]))}
        raise NoSuchTableError(self.path)

    def _post(self) -> Any:
        tables = self.catalog.tables
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if match := _TABLE.match(self.path):
            return self._commit((match[1], match[2]), CommitTableRequest.model_validate_json(body))
        if match := _TABLES.match(self.path):
            wanted = json.loads(body)
            created = tables.create_table(
                (match[1], wanted["name"]),
                Schema.model_validate(wanted["schema"]),
                partition_spec=PartitionSpec.model_validate(wanted["partition-spec"]),
                properties=wanted["properties"],
            )
            return _loaded(created)
        request = json.loads(body)
        tables.create_namespace(tuple(request["namespace"]))
        return request

    def _commit(self, identifier: tuple[str, ...], request: CommitTableRequest) -> Any:
        server = self.catalog
        if server.failures:
            server.failures -= 1
            raise OSError("no room")
        done = server.tables.commit_table(server.tables.load_table(identifier), request.requirements, request.updates)
        server.commits += 1
        if server.lost_answers:
            server.lost_answers -= 1
            raise ConnectionAbortedError
        return json.loads(done.model_dump_json(by_alias=True))

    def _send(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _loaded(table: Table) -> dict[str, Any]:
    metadata = json.loads(table.metadata.model_dump_json(by_alias=True))
    return {"metadata-location": table.metadata_location, "metadata": metadata, "config": {}}
