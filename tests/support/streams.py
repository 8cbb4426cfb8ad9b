"""Streams of a NATS server, for tests that have no event loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cutline.connectors.nats.client import Connection, Message, read_range, stream_state


class Stream:
    """One stream, made when it is not there; its subjects begin with its name."""

    def __init__(self, url: str, name: str, **config: Any) -> None:
        self.url = url
        self.name = name
        self._connection = Connection(url)
        self._config = {"subjects": [f"{name}.>"], **config}
        if self._config["subjects"]:  # None: it is there already
            self.make()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def make(self) -> None:
        self._do(lambda js: js.add_stream(name=self.name, **self._config))

    def remove(self) -> None:
        self._do(lambda js: js.delete_stream(self.name))

    def publish(self, *payloads: Any, subject: str = "a") -> int:
        """Returns the last sequence."""
        last = 0
        for payload in payloads:
            content = str(payload).encode()
            last = self._do(lambda js, data=content: js.publish(f"{self.name}.{subject}", data)).seq
        return last

    def publish_many(self, payloads: Iterable[bytes], subject: str = "") -> None:
        async def send(client: Any) -> None:
            js = client.jetstream(timeout=30)
            for future in [await js.publish_async(subject or f"{self.name}.a", one) for one in payloads]:
                await future

        self._connection.ask(send)

    def purge(self, below: int) -> None:
        self._do(lambda js: js.purge_stream(self.name, seq=below))

    def delete(self, sequence: int) -> None:
        self._do(lambda js: js.delete_msg(self.name, sequence))

    def messages(self) -> list[Message]:
        state = stream_state(self._connection, self.name)
        assert state is not None
        return [one for page in read_range(self._connection, self.name, state.first, state.end) for one in page]

    def _do(self, work: Any) -> Any:
        async def run(client: Any) -> Any:
            return await work(client.jetstream(timeout=10))

        return self._connection.ask(run)
