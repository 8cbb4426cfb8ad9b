"""Object stores over a network, and one in memory, built on obstore.

How often a request is sent determines what its failure means. obstore can repeat requests by itself: a conditional
create whose first reply was lost would find its own object and report "already exists", so the winner would believe it
lost. Comparing bytes afterwards does not help, as two racing creators may write the same bytes. So a request that
changes something is sent once, and repeated here only if the attempt before certainly had no effect. Reads are repeated
freely. Multipart uploads let obstore repeat the parts; the effect of such an upload is unknown whenever it fails.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore import exceptions
from obstore.store import MemoryStore, from_url

from cutline.base.backoff import Backoff
from cutline.base.retry import Retry
from cutline.errors import ConfigError, MissingObject, NotDone, OutcomeUnknown, Refused, StoreError
from cutline.objects.failures import RAISED, Failure, status_of, understand
from cutline.objects.names import checked, checked_folder
from cutline.objects.staging import put_in_place
from cutline.ports.objects import ObjectInfo

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta
    from obstore.store import ObjectStore as Client

_T = TypeVar("_T")

#: Bytes per request. S3 requires parts of at least 5 MiB; with the timeout this requires about 1 MiB/s.
_PIECE_BYTES = 5 << 20
#: S3 accepts 10 000 parts.
_MOST_PARTS = 9_000
_PARTS_AT_ONCE = 4
#: How many objects one request may delete on S3.
_DELETE_LIMIT = 1_000
#: Parts are uploaded in parallel and share the network, so each has more time than a single request.
_PARTS_TIMEOUT_FACTOR = 4
#: A download restarts when its object was replaced meanwhile.
_DOWNLOADS = Retry(limit=5)
_BACKOFF = Backoff(first_s=0.05, limit_s=1.0, jitter=0.5)

_DEFAULT_REQUEST_TIMEOUT_S = 5.0
_DEFAULT_RETRY_FOR_S = 3.0

#: The processes (this one and its ancestors before a fork) in which obstore has used the network.
_network_users: set[int] = set()

_memory_stores: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


class _ReplacedMeanwhileError(Exception):
    """The object was replaced after its first part was downloaded."""


class ObstoreStore:
    """``once`` sends every request at most once; ``bulk`` repeats requests by itself and has longer timeouts."""

    def __init__(self, url: str, once: Client, bulk: Client, *, retry_for_s: float, network: bool) -> None:
        self._url = url
        self._once = once
        self._bulk = bulk
        self._retry = Retry(deadline_s=retry_for_s, backoff=_BACKOFF)
        self._network = network

    def __repr__(self) -> str:
        return f"ObstoreStore({self._url})"

    @property
    def url(self) -> str:
        return self._url

    def read(self, path: str, limit_bytes: int | None = None) -> bytes:
        def get() -> bytes | None:
            result = obstore.get(self._once, checked(path))
            if limit_bytes is not None and result.meta["size"] > limit_bytes:
                why = f"it has {result.meta['size']} bytes, the limit is {limit_bytes}"
                raise Refused("the object is too large to be read", store=self._url, path=path, why=why)
            # A request has a short timeout, so a large object is downloaded piece by piece.
            return bytes(result.bytes()) if result.meta["size"] <= _PIECE_BYTES else None

        small = self._ask(get, path)
        return small if small is not None else self._fetch(path, b"".join)

    def create(self, path: str, data: bytes) -> bool:
        def put() -> bool:
            try:
                obstore.put(self._once, checked(path), data, mode="create", use_multipart=False)
            except exceptions.AlreadyExistsError as error:
                # S3 also answers 409 while another write or delete of this object is under way, which does not tell
                # whether the object will exist. Azure answers 409 when it exists.
                if status_of(error) == 409 and not self._is_there(path):
                    raise
                return False
            return True

        return self._change(put, path)

    def replace(self, path: str, data: bytes) -> None:
        if len(data) > _PIECE_BYTES:
            self._put_in_parts(path, data, len(data))
        else:
            self._change(lambda: obstore.put(self._once, checked(path), data, use_multipart=False), path)

    def upload(self, path: str, source: Path) -> None:
        try:
            size = source.stat().st_size
            data = source.read_bytes() if size <= _PIECE_BYTES else None
        except OSError as error:
            raise NotDone("the file cannot be read", store=self._url, source=source, why=error.strerror) from error
        if data is not None:
            self.replace(path, data)
        else:
            self._put_in_parts(path, source, size)

    def download(self, path: str, target: Path) -> None:
        def put(pieces: Iterable[bytes]) -> None:
            try:
                put_in_place(target, pieces)
            except OSError as error:
                raise NotDone(
                    "the file cannot be written", store=self._url, target=target, why=error.strerror
                ) from error

        self._fetch(path, put)

    def find(self, path: str) -> ObjectInfo | None:
        try:
            return _info(self._head(path))
        except MissingObject:
            return None

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = checked_folder(prefix)
        self._check_process()
        pages = obstore.list(self._bulk, folder or None)
        while True:
            page = self._next_page(pages)
            if isinstance(page, Failure):
                kind = Refused if page.is_refusal else NotDone
                raise kind("the objects cannot be listed", store=self._url, path=prefix, why=page.why)
            if page is None:
                return
            yield from (_info(meta) for meta in page if not folder or meta["path"].startswith(folder + "/"))

    def delete(self, paths: Iterable[str]) -> None:
        rest = iter([checked(path) for path in paths])
        removed = False
        while some := list(islice(rest, _DELETE_LIMIT)):
            try:
                self._change(lambda some=some: self._remove(some), some[0])  # type: ignore[misc]
            except NotDone as error:
                # A refusal for one object does not apply to the others.
                if removed or len(some) > 1:
                    raise OutcomeUnknown(
                        "some objects may not be deleted", store=self._url, why=error.where.get("why")
                    ) from None
                raise
            removed = True

    def leftovers(self, older_than_ms: int) -> list[ObjectInfo]:
        return []

    def collect_leftovers(self, older_than_ms: int) -> int:
        """Always 0. Unfinished multipart uploads can stay behind on S3, but obstore cannot list them: let a lifecycle
        rule of the bucket delete them (docs/storage.md). Stores in memory have no leftovers.
        """
        return 0

    def _check_process(self) -> None:
        # A forked process inherits the sockets and wakers of obstore's threads, but not the threads: a request there
        # would hang forever, past all timeouts, and can make the parent hang as well.
        if self._network and _network_users - {os.getpid()}:
            raise Refused(
                "an object store was used before this process was forked",
                next_step="start a new process instead of a forked one",
                store=self._url,
            )
        if self._network:
            _network_users.add(os.getpid())

    def _next_page(self, pages: ListStream[Sequence[ObjectMeta]]) -> Sequence[ObjectMeta] | Failure | None:
        try:
            return next(pages, None)
        except RAISED as error:
            return understand(error)

    def _is_there(self, path: str) -> bool:
        try:
            obstore.head(self._once, path)
        except FileNotFoundError:
            return False
        return True

    def _head(self, path: str) -> ObjectMeta:
        return self._ask(lambda: obstore.head(self._once, checked(path)), path)

    def _fetch(self, path: str, use: Callable[[Iterable[bytes]], _T]) -> _T:
        """Pass the pieces of one version of the object to ``use``."""
        try:
            return _DOWNLOADS.call(lambda: use(self._pieces(path, self._head(path))), on=_ReplacedMeanwhileError)
        except _ReplacedMeanwhileError:
            raise NotDone("the object is replaced faster than it can be read", store=self._url, path=path) from None

    def _pieces(self, path: str, meta: ObjectMeta) -> Iterator[bytes]:
        for start in range(0, meta["size"], _PIECE_BYTES):
            end = min(start + _PIECE_BYTES, meta["size"])
            yield self._ask(lambda start=start, end=end: self._piece(path, meta, start, end), path)  # type: ignore[misc]

    def _piece(self, path: str, meta: ObjectMeta, start: int, end: int) -> bytes:
        try:
            result = obstore.get(self._once, path, options={"range": (start, end), "if_match": meta["e_tag"]})
        except exceptions.PreconditionError:
            raise _ReplacedMeanwhileError from None
        return bytes(result.bytes())

    def _remove(self, paths: list[str]) -> None:
        try:
            obstore.delete(self._once, paths)
        except FileNotFoundError:
            # Some kinds of store stop at the first missing object.
            for path in paths:
                try:
                    obstore.delete(self._once, path)
                except FileNotFoundError as error:
                    if not understand(error).is_missing:
                        raise

    def _put_in_parts(self, path: str, content: bytes | Path, size: int) -> None:
        self._check_process()
        part = max(_PIECE_BYTES, -(-size // _MOST_PARTS))
        failure: Failure | None = None
        try:
            obstore.put(
                self._bulk,
                checked(path),
                content,
                use_multipart=True,
                chunk_size=part,
                max_concurrency=_PARTS_AT_ONCE,
            )
        except RAISED as error:
            failure = understand(error)
        if failure is not None:
            # Even a refusal: it may answer the repetition of a last step that had succeeded.
            raise OutcomeUnknown("a multipart upload failed", store=self._url, path=path, why=failure.why)

    def _ask(self, request: Callable[[], _T], path: str) -> _T:
        """Send a request that changes nothing."""
        answer = self._send(request, path, changes=False)
        if isinstance(answer, Failure):
            if answer.is_missing:
                raise MissingObject("there is no such object", store=self._url, path=path)
            kind = Refused if answer.is_refusal else NotDone
            raise kind("the object cannot be read", store=self._url, path=path, why=answer.why)
        return answer

    def _change(self, request: Callable[[], _T], path: str) -> _T:
        """Send a request that changes something."""
        answer = self._send(request, path, changes=True)
        if isinstance(answer, Failure):
            certain = Refused if answer.is_refusal else NotDone
            kind: type[StoreError] = certain if answer.had_no_effect else OutcomeUnknown
            raise kind("the change failed", store=self._url, path=path, why=answer.why)
        return answer

    def _send(self, request: Callable[[], _T], path: str, *, changes: bool) -> _T | Failure:
        # Failures are returned, not raised, so that none of our errors has obstore's error as its cause: the text of
        # that error may hold secrets.
        self._check_process()
        failures: list[Failure] = []
        for _ in self._retry.attempts():
            try:
                return request()
            except RAISED as error:
                failures.append(understand(error))
            if not failures[-1].may_pass or (changes and not failures[-1].had_no_effect):
                break
        return failures[-1]


def open_memory(url: str) -> ObstoreStore:
    """The store with this name in this process."""
    with _memory_lock:
        client = _memory_stores.setdefault(url, MemoryStore())
    return ObstoreStore(url, client, client, retry_for_s=0, network=False)


def open_remote(url: str, options: Mapping[str, str]) -> ObstoreStore:
    """Prepare the clients for a bucket; nothing is sent yet."""
    config = dict(options)
    timeout_s = _seconds(config, "request_timeout_s", _DEFAULT_REQUEST_TIMEOUT_S)
    retry_for_s = _seconds(config, "retry_for_s", _DEFAULT_RETRY_FOR_S)
    once = _client(url, config, timeout_s=timeout_s, retry_for_s=retry_for_s, retries=0)
    bulk = _client(url, config, timeout_s=timeout_s * _PARTS_TIMEOUT_FACTOR, retry_for_s=retry_for_s, retries=10)
    return ObstoreStore(url, once, bulk, retry_for_s=retry_for_s, network=True)


def _client(url: str, config: dict[str, str], *, timeout_s: float, retry_for_s: float, retries: int) -> Client:
    limits: Any = {
        "config": config,
        "client_options": {
            "timeout": timedelta(seconds=timeout_s),
            "connect_timeout": timedelta(seconds=min(timeout_s, _DEFAULT_REQUEST_TIMEOUT_S)),
            "allow_http": _is_plain_http(config),
        },
        "retry_config": {
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=retry_for_s),
            "backoff": {
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(seconds=1),
                "base": 2,
            },
        },
    }
    try:
        return from_url(url, **limits)
    except exceptions.UnknownConfigurationKeyError:
        problem = f"one of these options is unknown: {', '.join(sorted(config))}"
    except RAISED as error:
        problem = f"the object store cannot be opened: {type(error).__name__}"
    raise ConfigError(problem, next_step="see docs/storage.md for the options", store=url)


def _is_plain_http(config: Mapping[str, str]) -> bool:
    """Whether the options name an endpoint without TLS, which obstore otherwise refuses."""
    given = [value for key, value in config.items() if "endpoint" in key.lower()]
    by_environment = [os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")]
    return any(value.startswith("http://") for value in given or by_environment)


def _seconds(config: dict[str, str], name: str, default: float) -> float:
    """Remove one of our own options from those meant for obstore and return it."""
    text = config.pop(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 3_600:
        raise ConfigError(f"{name} must be a number of seconds above 0", given=text)
    return value


def _info(meta: ObjectMeta) -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], int(meta["last_modified"].timestamp() * 1_000))
