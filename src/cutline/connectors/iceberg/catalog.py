"""Catalogs of Iceberg tables: how they are reached, what their failures mean, and that errors never show a secret."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, quote_plus

from cutline.base.redaction import HIDDEN, address_without_secrets, is_secret_name, without_secrets
from cutline.connectors.staged_files import local_path
from cutline.errors import ConfigError, NotDone, Refused, SinkError

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

_SQLITE = "sqlite"
_POSTGRES = ("postgresql", "postgres", "postgresql+psycopg")
_REST = ("http", "https")
#: Parameters for libpq that the address may leave out: a dead host must be noticed.
_POSTGRES_DEFAULTS = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
    "application_name": "cutline",
}
#: What a server says that runs and does not accept the client, now or later.
_REFUSED = re.compile(
    r"password authentication failed|no password supplied|no pg_hba\.conf entry|permission denied"
    r"|(?:role|database) \".*\" does not exist|is not permitted to log in|UnauthorizedError|ForbiddenError|OAuthError"
)


def check_installed() -> None:
    if find_spec("pyiceberg") is None:
        raise ConfigError("the Iceberg sink needs the package pyiceberg", next_step="pip install cutline[iceberg]")


def catalog_errors() -> tuple[type[Exception], ...]:
    """What a catalog raises if it, or a file that it names, cannot be reached or refuses a request."""
    from pyiceberg import exceptions
    from sqlalchemy.exc import SQLAlchemyError

    return (
        OSError,  # also what requests raises
        SQLAlchemyError,
        exceptions.RESTError,
        exceptions.CommitFailedException,
        exceptions.NoSuchTableError,
        exceptions.NoSuchNamespaceError,
        exceptions.NamespaceAlreadyExistsError,
        exceptions.TableAlreadyExistsError,
        # pyiceberg's own checks of the metadata that a commit would make, e.g. of sequence numbers.
        ValueError,
    )


class CatalogAddress:
    """Where a catalog is, with credentials. Its ``repr`` never shows the credentials."""

    def __init__(self, uri: str, name: str, warehouse: str | os.PathLike[str] | None, extra: Mapping[str, str]) -> None:
        """``name``: under which a database keeps the tables of this catalog. ``extra``: properties for pyiceberg."""
        self._uri = uri
        self._name = name
        self._extra = dict(extra)
        scheme = uri.partition("://")[0]
        if "://" not in uri or scheme not in (_SQLITE, *_POSTGRES, *_REST):
            raise ConfigError(
                "the catalog's address is of no kind that the Iceberg sink knows",
                next_step="write sqlite:////data/catalog.sqlite, postgresql://user@host/database, "
                "or the https:// address of a REST catalog",
            )
        if scheme != _SQLITE and _is_ambiguous(uri):
            raise ConfigError(
                "the catalog's address cannot be read", next_step="write @ : / % of a password as %40 %3A %2F %25"
            )
        self.is_rest = scheme in _REST
        # A REST catalog gives names to its warehouses; a database knows nothing of them.
        self._warehouse = None if warehouse is None else os.fspath(warehouse)
        if warehouse is not None and not self.is_rest:
            self._warehouse = str(local_path(warehouse, sink="Iceberg"))
        if scheme in _POSTGRES and find_spec("psycopg") is None:
            raise ConfigError(
                "a catalog in PostgreSQL needs the package psycopg", next_step="pip install cutline[iceberg,postgres]"
            )

    def __repr__(self) -> str:
        return address_without_secrets(self._uri)

    def load(self) -> Catalog:
        """A client of the catalog. A database gets the catalog's tables if it has none."""
        from pyiceberg.catalog import load_catalog

        try:
            return load_catalog(self._name, **self._properties())
        except catalog_errors() as error:
            raise self.unreachable(error) from None

    def _properties(self) -> dict[str, str]:
        from cutline.connectors.iceberg.file_io import IMPLEMENTATION

        uri = self._uri
        properties = {**self._extra, "py-io-impl": IMPLEMENTATION, "type": "rest" if self.is_rest else "sql"}
        if not self.is_rest:
            uri = self._database()
            properties["pool_pre_ping"] = "true"
        if self._warehouse is not None:
            properties["warehouse"] = self._warehouse
        return {**properties, "uri": uri}

    def _database(self) -> str:
        """The address for SQLAlchemy."""
        from sqlalchemy import make_url

        url = make_url(self._uri)
        if url.get_backend_name() != _SQLITE:
            url = url.set(drivername="postgresql+psycopg")
            url = url.update_query_dict(
                {name: one for name, one in _POSTGRES_DEFAULTS.items() if name not in url.query}
            )
        return url.render_as_string(hide_password=False)

    def describe(self, error: BaseException) -> str:
        """The error's text, in one line and without secrets."""
        told = getattr(error, "orig", None) or error  # what the database said, without the statement
        text = " ".join(str(told).split()) or type(told).__name__
        for secret in self._secrets():
            text = text.replace(secret, HIDDEN)
        return without_secrets(text)

    def _secrets(self) -> list[str]:
        found = [value for name, value in self._extra.items() if is_secret_name(name)]
        user = self._uri.partition("://")[2].rpartition("@")[0]
        if ":" in user:
            from urllib.parse import unquote

            password = user.partition(":")[2]
            found += [password, unquote(password), quote(unquote(password)), quote_plus(unquote(password))]
        if given := os.environ.get("PGPASSWORD"):
            found.append(given)
        return sorted(filter(None, found), key=len, reverse=True)

    def unreachable(self, error: BaseException, **where: object) -> NotDone:
        """The catalog, or a file that it names, cannot be read."""
        place: dict[str, Any] = {"catalog": self, **where}
        text = self.describe(error)
        if _REFUSED.search(f"{type(error).__name__}: {text}"):
            return Refused(
                f"the catalog refuses the connection: {text}",
                next_step="correct the address, the user or the credentials, or let the catalog accept them",
                **place,
            )
        return NotDone(
            f"the catalog cannot be reached: {text}",
            next_step="check that the catalog runs and that the table's folder is mounted; Cutline retries",
            **place,
        )

    def load_table(self, catalog: Catalog, identifier: tuple[str, ...]) -> Table | None:
        """None: there is no such table. Raises NotDone if the catalog cannot tell."""
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        try:
            return catalog.load_table(identifier)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None
        except catalog_errors() as error:
            raise self.unreachable(error, table=".".join(identifier)) from None


def table_identifier(table: str) -> tuple[str, ...]:
    """``namespace.name``; the namespace may have several parts."""
    parts = tuple(table.split("."))
    if len(parts) < 2 or not all(parts):
        raise ConfigError("a table is named namespace.name", next_step="correct the table's name", table=table)
    return parts


def create_namespace(catalog: Catalog, identifier: tuple[str, ...]) -> None:
    """Create the table's namespace unless it exists, possibly by another process at this moment."""
    from pyiceberg.exceptions import NamespaceAlreadyExistsError
    from sqlalchemy.exc import IntegrityError

    try:
        catalog.create_namespace_if_not_exists(identifier[:-1])
    except (NamespaceAlreadyExistsError, IntegrityError):
        if not catalog.namespace_exists(identifier[:-1]):
            raise


def _is_ambiguous(uri: str) -> bool:
    """Whether a client may cut the address in the middle of a password, and show what it takes for the host."""
    place = re.split(r"[?#]", uri.partition("://")[2], maxsplit=1)[0]
    user, at, server = place.partition("@")
    _, colon, port = (server if at else user).partition("/")[0].rpartition(":")
    is_cut = "@" in server or (bool(at) and "/" in user)
    return is_cut or (bool(colon) and "]" not in port and not (port.isascii() and port.isdigit())) or " " in uri


def gone(table: str, **where: object) -> SinkError:
    return SinkError(
        "the table is not in the catalog any more",
        next_step="find out what dropped it; restart the flow to create it again",
        table=table,
        **where,
    )
