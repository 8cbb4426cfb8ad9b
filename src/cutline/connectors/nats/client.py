"""A connection to NATS JetStream for code without an event loop, and exact reading of a range of a stream.

The source (driver and executors), the sink and the replay guard use it. nats-py is imported when it is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from cutline.base.redaction import has_credentials
from cutline.errors import ConfigError, NotDone, OutcomeUnknown, Refused

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

T = TypeVar("T")

#: How long the server may take to answer one request.
TIMEOUT_S = 5.0
#: Messages and bytes per request of a reader: a server disconnects a client that lets 64 MB accumulate.
PAGE = 1_000
_PAGE_BYTES = 16 << 20
#: The first request, before the size of messages is known, and the factor by which requests grow.
_FIRST_PAGE, _GROWTH = 16, 8
#: Reading continues after a lost connection; this many attempts without a single message in between.
_TRIES = 3
#: The server deletes an abandoned consumer after this long.
_CONSUMER_SECONDS = 60.0

#: The environment variables with credentials: a URL or an option of a source would appear in plans, offsets and logs.
CREDENTIALS_FILE, USER, PASSWORD, TOKEN = (
    "CUTLINE_NATS_CREDENTIALS",
    "CUTLINE_NATS_USER",
    "CUTLINE_NATS_PASSWORD",
    "CUTLINE_NATS_TOKEN",
)


class StreamState(NamedTuple):
    """A stream's identity and content now."""

    name: str
    #: When it was created: distinguishes it from a later stream with the same name.
    created: str
    #: The first sequence it holds, and the next that it will assign.
    first: int
    end: int
    #: How many sequences in [first, end) were deleted; which ones, if requested.
    holes: int
    deleted: tuple[int, ...]
    config: dict[str, Any]

    def messages_between(self, first: int, end: int) -> int:
        """How many messages there are in [first, end); the stream must reach back to ``first``."""
        end = min(end, self.end)
        return max(end - first, 0) - sum(first <= sequence < end for sequence in self.deleted)


class Message(NamedTuple):
    """One message of a stream."""

    sequence: int
    subject: str
    data: bytes
    #: Nanoseconds since 1970, as the server keeps it.
    published_ns: int
    headers: dict[str, str]


def check_url(url: str) -> str:
    """One or several addresses, comma-separated. Refuses addresses that contain secrets."""
    addresses = [one.strip() for one in url.split(",") if one.strip()]
    if not addresses:
        raise ConfigError("no NATS server is named", next_step='write for example "nats://127.0.0.1:4222"')
    if any(map(has_credentials, addresses)):
        raise ConfigError(
            "a NATS address must not hold a user or a password: it is stored in plans and checkpoints",
            next_step=f"set {USER} and {PASSWORD}, {TOKEN} or {CREDENTIALS_FILE} in the environment",
        )
    return ",".join(addresses)


def import_nats() -> Any:
    """The package nats-py."""
    try:
        import nats
    except ImportError as error:
        raise ConfigError("NATS needs the package nats-py", next_step="pip install 'cutline[nats]'") from error
    return nats


class Connection:
    """Connects when it is first used, and again after a failure. One thread uses it at a time."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self.url = check_url(url)
        self.timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: Client | None = None
        #: Set when the server has closed the connection.
        self._lost = asyncio.Event()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next use makes a new one."""
        loop, client = self._loop, self._client
        self._loop = self._client = None
        if loop is None:
            return
        if client is not None:
            with contextlib.suppress(Exception):
                loop.run_until_complete(asyncio.wait_for(client.close(), self.timeout_s))
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    def ask(self, question: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        """Run an idempotent request. Raises NotDone if the server cannot be reached."""
        is_new = self._client is None
        try:
            return self._do(question)
        except _transport_errors() as error:
            self.close()
            if is_new:
                raise self._unreachable(error) from error
        # The connection may have been idle for long, or the server restarted since.
        return self.ask(question)

    def tell(self, order: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        """Run a request that changes the stream. Raises OutcomeUnknown if the server may have executed it."""
        self.ask(_nothing)  # so that a connection lost long ago does not make the outcome unknown
        try:
            return self._do(order)
        except _transport_errors() as error:
            self.close()
            raise OutcomeUnknown(
                f"the NATS server has not answered ({_text(error)}): it may have executed the request", url=self.url
            ) from error

    def _do(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        if self._client is None:
            self._client = self._loop.run_until_complete(self._connect())
        return self._loop.run_until_complete(self._unless_lost(work(self._client)))

    async def _unless_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """nats-py lets a request wait for its timeout although the connection is lost."""
        working, losing = asyncio.create_task(work), asyncio.create_task(self._lost.wait())
        try:
            await asyncio.wait((working, losing), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ConnectionResetError("the connection is lost")
            return working.result()
        finally:
            for task in (working, losing):
                task.cancel()
            await asyncio.gather(working, losing, return_exceptions=True)

    async def _connect(self) -> Client:
        lost = self._lost = asyncio.Event()

        async def on_closed() -> None:
            lost.set()

        client: Client = import_nats().NATS()
        connecting = client.connect(
            self.url.split(","),
            name="cutline",
            allow_reconnect=False,
            connect_timeout=max(round(self.timeout_s), 1),
            error_cb=_ignore_error,
            closed_cb=on_closed,
            **_credentials(),
        )
        try:
            # A frozen server accepts the connection and sends nothing, which nats-py's own timeout does not cover.
            await asyncio.wait_for(connecting, self.timeout_s)
        except BaseException:
            if client._transport is not None:  # nats-py leaves it open
                client._transport.close()  # type: ignore[no-untyped-call]
                await asyncio.sleep(0)
            raise
        return client

    def _unreachable(self, error: BaseException) -> NotDone:
        return NotDone(
            f"the NATS server cannot be reached: {_text(error)}",
            next_step="check that it runs and is reachable from here, then retry",
            url=self.url,
        )


async def _nothing(client: Client) -> None:
    await client.flush(timeout=TIMEOUT_S)  # type: ignore[arg-type]


async def _ignore_error(_: Exception) -> None:
    """The caller that waits for the answer gets the error."""


def _transport_errors() -> tuple[type[BaseException], ...]:
    import_nats()
    from nats import errors

    return (
        errors.TimeoutError,
        errors.ConnectionClosedError,
        errors.NoServersError,
        errors.StaleConnectionError,
        errors.UnexpectedEOF,
        errors.OutboundBufferLimitError,
        errors.NoRespondersError,
        _no_stream_answers(),
        TimeoutError,
        OSError,
        EOFError,
    )


def _no_stream_answers() -> type[BaseException]:
    """JetStream is starting, or has no leader at the moment."""
    from nats.js import errors

    unavailable: type[BaseException] = errors.ServiceUnavailableError
    return unavailable


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _credentials() -> dict[str, Any]:
    names = {CREDENTIALS_FILE: "user_credentials", USER: "user", PASSWORD: "password", TOKEN: "token"}
    return {names[name]: os.environ[name] for name in names if os.environ.get(name)}


# ------------------------------------------------------------------------------------------------- streams


def is_refusal(error: Mapping[str, Any]) -> bool:
    """Of an error of JetStream's API, whose codes are HTTP's: the server will answer the same again."""
    return 400 <= int(error.get("code", 500)) < 500


def stream_state(connection: Connection, stream: str, *, with_deleted: bool = False) -> StreamState | None:
    """None: there is no such stream."""

    async def look(client: Client) -> Any:
        request = json.dumps({"deleted_details": with_deleted}).encode()
        answer = await client.request(f"$JS.API.STREAM.INFO.{stream}", request, timeout=connection.timeout_s)
        return json.loads(answer.data)

    answer = connection.ask(look)
    if "error" in answer:
        if answer["error"].get("code") == 404:
            return None
        kind = Refused if is_refusal(answer["error"]) else NotDone
        raise kind(f"the NATS server does not describe stream {stream}: {answer['error']}", url=connection.url)
    state = answer["state"]
    # An empty stream has no first message: the next message becomes the first.
    end = int(state["last_seq"]) + 1
    first = int(state["first_seq"]) if state["messages"] else max(end, int(state["first_seq"]))
    deleted = tuple(int(one) for one in state.get("deleted") or ())
    holes = int(state.get("num_deleted", 0))
    return StreamState(stream, str(answer["created"]), first, max(end, first), holes, deleted, answer["config"])


def read_range(
    connection: Connection, stream: str, first: int, end: int, subjects: tuple[str, ...] = ()
) -> Iterator[list[Message]]:
    """The messages that the stream holds in [first, end), in their order, in pages.

    Dropped messages are not reported: callers that need all messages compare with ``stream_state``.
    """
    tries = 0
    while first < end:
        try:
            for page in _pages(connection, stream, first, end, subjects):
                yield page
                first, tries = page[-1].sequence + 1, 0
            return
        except _transport_errors() as error:
            connection.close()
            tries += 1
            if tries >= _TRIES:
                raise connection._unreachable(error) from error


def _pages(
    connection: Connection, stream: str, first: int, end: int, subjects: tuple[str, ...]
) -> Iterator[list[Message]]:
    from nats.js import api

    config = api.ConsumerConfig(
        deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=max(first, 1),
        ack_policy=api.AckPolicy.NONE,
        replay_policy=api.ReplayPolicy.INSTANT,
        filter_subjects=list(subjects) or None,
        inactive_threshold=_CONSUMER_SECONDS,
        mem_storage=True,
    )

    async def begin(client: Client) -> tuple[JetStreamContext, Any, Any]:
        context = client.jetstream(timeout=connection.timeout_s)
        consumer = await context.add_consumer(stream, config)
        if not consumer.num_pending:
            return context, consumer, None
        return context, consumer, await context.pull_subscribe_bind(stream=stream, consumer=consumer.name)

    context, consumer, subscription = connection._do(begin)
    pending = consumer.num_pending
    most = _FIRST_PAGE
    while pending:
        found: list[Msg] = connection._do(_fetching(subscription, min(most, pending), connection.timeout_s))
        largest = max(len(one.data) for one in found)
        most = max(min(PAGE, most * _GROWTH, _PAGE_BYTES // max(largest, 1)), 1)
        messages = [_message(one) for one in found]
        pending = messages[-1][1]
        page = [message for message, _ in messages if message.sequence < end]
        if page:
            yield page
        if len(page) < len(messages) or page[-1].sequence >= end - 1:
            break
    with contextlib.suppress(Exception):
        connection._do(lambda _: context.delete_consumer(stream, consumer.name))


def _fetching(subscription: Any, most: int, timeout_s: float) -> Callable[[Client], Coroutine[Any, Any, Any]]:
    async def fetch(_: Client) -> Any:
        waiting: Awaitable[Any] = subscription.fetch(most, timeout=timeout_s)
        return await waiting

    return fetch


def _message(found: Msg) -> tuple[Message, int]:
    """The message, and how many follow it. The reply subject holds: [domain and account,] …, sequence, …, pending.

    nats-py's own parser creates objects for all of it, which takes longer than everything else.
    """
    tokens = found.reply.split(".")
    # $JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<of consumer>.<time>.<pending>, or with two more in front.
    offset = 0 if len(tokens) == 9 else 2
    sequence, published_ns, pending = (int(tokens[index + offset]) for index in (5, 7, 8))
    message = Message(sequence, found.subject, found.data, published_ns, dict(found.headers or {}))
    return message, pending
