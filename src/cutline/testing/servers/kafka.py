"""Real Kafka brokers (KRaft) on loopback, which tests, benchmarks and the demo may kill, freeze and restart.

Their jars come from ``testing.servers.jars``. A cluster has one or three nodes; each is broker and controller.
"""

from __future__ import annotations

import base64
import itertools
import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cutline.connectors.kafka.client import administrator, import_kafka
from cutline.errors import NotDone
from cutline.testing.servers import jars
from cutline.testing.servers.process import ServerProcess, free_ports

_PORTS_FROM = 22_000
_fresh_numbers = itertools.count(1)


class KafkaNode(ServerProcess):
    """One node. It begins as a member of its cluster's quorum, on its own data."""

    kind = "Kafka broker"
    start_seconds = 120.0

    def __init__(self, number: int, cluster: KafkaCluster) -> None:
        super().__init__(f"cutline-kafka-{number}-")
        self.number = number
        self._cluster = cluster
        self.port, self.controller_port = free_ports(2, _PORTS_FROM)
        # An id of the directory, for the quorum.
        self.directory_id = _fresh_id()

    @property
    def server(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def voter(self) -> str:
        return f"{self.number}@127.0.0.1:{self.controller_port}:{self.directory_id}"

    def _prepare(self) -> list[str]:
        config = self._folder / "server.properties"
        config.write_text("".join(f"{name}={value}\n" for name, value in self._settings().items()))
        if not (self._folder / "data").exists():
            voters = ",".join(node.voter for node in self._cluster.nodes)
            self._run(
                "kafka.tools.StorageTool",
                "format",
                f"--cluster-id={self._cluster.id}",
                f"--initial-controllers={voters}",
                f"--config={config}",
            )
        return [*_java(), "kafka.Kafka", str(config)]

    def _settings(self) -> dict[str, Any]:
        nodes = self._cluster.nodes
        copies = len(nodes)
        settings = {
            "process.roles": "broker,controller",
            "node.id": self.number,
            "controller.quorum.bootstrap.servers": ",".join(f"127.0.0.1:{node.controller_port}" for node in nodes),
            "listeners": f"PLAINTEXT://{self.server},CONTROLLER://127.0.0.1:{self.controller_port}",
            "advertised.listeners": f"PLAINTEXT://{self.server}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": self._folder / "data",
            # An acknowledged message is on the disk of every copy, or at least in the page cache: a kill loses none.
            "default.replication.factor": copies,
            "min.insync.replicas": 2 if copies > 1 else 1,
            "offsets.topic.replication.factor": copies,
            "offsets.topic.num.partitions": 1,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": 2 if copies > 1 else 1,
            "transaction.state.log.num.partitions": 3,
            "share.coordinator.state.topic.replication.factor": copies,
            "share.coordinator.state.topic.num.partitions": 1,
            "group.initial.rebalance.delay.ms": 0,
            # Expired records and transactions are noticed soon.
            "log.retention.check.interval.ms": 500,
            "log.initial.task.delay.ms": 500,
            "log.segment.delete.delay.ms": 100,
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": 200,
            # A killed node is noticed soon, also by the node that follows it after a restart.
            "broker.session.timeout.ms": 3_000,
            "broker.heartbeat.interval.ms": 500,
            "controlled.shutdown.enable": "true",
            "auto.create.topics.enable": "false",
        }
        return settings | dict(self._cluster.settings)

    def _run(self, *words: str) -> None:
        done = subprocess.run([*_java(), *words], cwd=self._folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            shutil.rmtree(self._folder / "data", ignore_errors=True)
            raise NotDone(f"{words[0]} failed:\n{done.stdout[-1_500:]}{done.stderr[-1_500:]}")

    def _is_ready(self) -> bool:
        return is_listening(self.server)


class KafkaCluster:
    """One node, or three: then every topic has three copies, and any one node may be lost."""

    def __init__(self, nodes: int = 1, settings: Mapping[str, Any] | None = None) -> None:
        self.id = _fresh_id()
        #: Further settings of every node.
        self.settings = dict(settings or {})
        self.nodes: list[KafkaNode] = []
        self.nodes.extend(KafkaNode(number, self) for number in range(1, nodes + 1))

    @staticmethod
    def why_not() -> str:
        """What is missing for it; empty: it can run."""
        return jars.why_not(jars.KAFKA)

    @property
    def servers(self) -> str:
        return ",".join(node.server for node in self.nodes)

    def start(self) -> None:
        """Start every node that does not run, and return when all are ready: two of three are needed for the first."""
        begun = [node for node in self.nodes if not node.is_running]
        for node in begun:
            node.launch()
        for node in begun:
            node.wait_until_ready()

    def kill(self) -> None:
        """All nodes at once, like a power cut without losing the page cache."""
        for node in self.nodes:
            node.kill()

    def restart(self) -> None:
        self.kill()
        self.start()

    def freeze(self) -> None:
        for node in self.nodes:
            node.freeze()

    def thaw(self) -> None:
        for node in self.nodes:
            node.thaw()

    def remove(self) -> None:
        for node in self.nodes:
            node.remove()

    def fresh_topic(self, *, partitions: int = 1, name: str = "", **config: str) -> str:
        """A new topic. ``config``: its settings, with ``_`` for ``.``."""
        topic = name or f"fresh-{os.getpid()}-{next(_fresh_numbers)}"
        import_kafka()
        from confluent_kafka.cimpl import NewTopic

        settings = {key.replace("_", "."): value for key, value in config.items()}
        made = NewTopic(topic, num_partitions=partitions, replication_factor=len(self.nodes), config=settings)
        admin = administrator(self.servers)  # it must outlive the answer
        admin.create_topics([made], operation_timeout=30.0)[topic].result(60.0)
        return topic


def is_listening(server: str) -> bool:
    """Whether a broker answers at this address, and a controller leads the cluster."""
    kafka = import_kafka()
    try:
        found = administrator(server).list_topics(timeout=2.0)
    except kafka.KafkaException:
        return False
    return bool(found.brokers) and found.controller_id >= 0


def _java() -> Sequence[str]:
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home) / "bin" / "java") if home else "java"
    # It runs for seconds and has little to do: a start matters more than speed.
    options = (
        "-Xmx384m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    )
    return (program, *options, "-cp", jars.classpath(jars.KAFKA))


def _fresh_id() -> str:
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
