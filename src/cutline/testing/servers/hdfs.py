"""A real HDFS on loopback, one NameNode and one DataNode, which tests may kill, freeze and restart.

Its jars come from ``testing.servers.jars``; a client needs none: Spark brings Hadoop's.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import escape

from cutline.errors import NotDone
from cutline.testing.servers import jars
from cutline.testing.servers.process import ServerProcess, free_ports

_PORTS_FROM = 22_000
_NODES = "org.apache.hadoop.hdfs.server"
_PAUSE_SECONDS = 0.1
_fresh_numbers = itertools.count(1)


class _Node(ServerProcess):
    """One process of Hadoop with its own settings."""

    start_seconds = 120.0
    main_class = ""

    def _settings(self) -> Mapping[str, object]:
        raise NotImplementedError

    def _prepare(self) -> list[str]:
        lines = "".join(
            f"<property><name>{name}</name><value>{escape(str(value))}</value></property>\n"
            for name, value in self._settings().items()
        )
        for file in ("core-site.xml", "hdfs-site.xml"):
            (self._folder / file).write_text(f"<configuration>\n{lines}</configuration>\n")
        for page in ("hdfs", "datanode"):  # Hadoop's distribution has web pages here; without the folders it ends
            (self._folder / "webapps" / page).mkdir(parents=True, exist_ok=True)
        return self._command()

    def _command(self, *words: str) -> list[str]:
        home = os.environ.get("JAVA_HOME")
        program = str(Path(home) / "bin" / "java") if home else "java"
        # It runs for seconds and has little to do: a start matters more than speed.
        options = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Dhadoop.log.dir={self._folder}")
        log = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
        return [program, *options, log, "-cp", f"{self._folder}:{jars.classpath(jars.HDFS)}", self.main_class, *words]


class NameNode(_Node):
    """Formatted on its first start. After a kill it reads its edits again, and leaves safe mode when it may."""

    kind = "NameNode"
    main_class = f"{_NODES}.namenode.NameNode"

    def __init__(self) -> None:
        super().__init__("cutline-namenode-")
        self.port, self._http_port = free_ports(2, _PORTS_FROM)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _settings(self) -> Mapping[str, object]:
        return {
            "fs.defaultFS": f"hdfs://{self.address}",
            "hadoop.tmp.dir": self._folder / "tmp",
            "dfs.namenode.name.dir": (self._folder / "names").as_uri(),
            "dfs.namenode.rpc-bind-host": "127.0.0.1",
            "dfs.namenode.http-address": f"127.0.0.1:{self._http_port}",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.replication": 1,
            # A DataNode that is away, or back, is noticed soon.
            "dfs.namenode.safemode.extension": 0,
            "dfs.namenode.heartbeat.recheck-interval": 1_000,
            "dfs.heartbeat.interval": "1s",
            "dfs.namenode.stale.datanode.interval": 3_000,
        }

    def _prepare(self) -> list[str]:
        command = super()._prepare()
        if not (self._folder / "names" / "current" / "VERSION").exists():
            self._format()
        return command

    def _format(self) -> None:
        words = self._command("-format", "-nonInteractive", "-force")
        done = subprocess.run(words, cwd=self._folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            shutil.rmtree(self._folder / "names", ignore_errors=True)
            raise NotDone(f"the NameNode cannot be formatted:\n{done.stdout[-1_500:]}{done.stderr[-1_500:]}")

    def _is_ready(self) -> bool:
        return _accepts(self.port)

    def has_datanode(self) -> bool:
        """Whether it has a DataNode and has left safe mode, so that files can be written."""
        query = "jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/{query}", timeout=2.0) as answer:
                [state] = json.load(answer)["beans"]
        except (OSError, ValueError, KeyError):  # it is not that far yet
            return False
        return bool(state["FSState"] == "Operational" and state["NumLiveDataNodes"] > 0)


class DataNode(_Node):
    """Holds the blocks."""

    kind = "DataNode"
    main_class = f"{_NODES}.datanode.DataNode"

    def __init__(self, namenode: NameNode) -> None:
        super().__init__("cutline-datanode-")
        self._namenode = namenode
        self._ports = free_ports(3, _PORTS_FROM)

    def _settings(self) -> Mapping[str, object]:
        data, ipc, http = (f"127.0.0.1:{port}" for port in self._ports)
        return {
            "fs.defaultFS": f"hdfs://{self._namenode.address}",
            "hadoop.tmp.dir": self._folder / "tmp",
            "dfs.datanode.data.dir": (self._folder / "blocks").as_uri(),
            "dfs.datanode.hostname": "127.0.0.1",
            "dfs.datanode.address": data,
            "dfs.datanode.ipc.address": ipc,
            "dfs.datanode.http.address": http,
            "dfs.heartbeat.interval": "1s",
            "dfs.blockreport.initialDelay": "0s",
            # A NameNode that was restarted is found again within a second.
            "ipc.client.connect.max.retries": 1,
            "ipc.client.connect.retry.interval": 200,
        }

    def _is_ready(self) -> bool:
        return _accepts(self._ports[0])


class Hdfs:
    """A whole file system, empty at first. Its parts may be killed and frozen on their own."""

    def __init__(self) -> None:
        self.namenode = NameNode()
        self.datanode = DataNode(self.namenode)

    @staticmethod
    def why_not() -> str:
        """What is missing for it; empty: it can run."""
        return jars.why_not(jars.HDFS)

    @property
    def url(self) -> str:
        return f"hdfs://{self.namenode.address}"

    def fresh_url(self) -> str:
        """An unused folder."""
        return f"{self.url}/fresh-{os.getpid()}-{next(_fresh_numbers)}"

    def start(self) -> None:
        """Start what does not run, and return when files can be written."""
        self.namenode.start()
        self.datanode.start()
        deadline = time.monotonic() + self.namenode.start_seconds
        while not self.namenode.has_datanode():
            if time.monotonic() > deadline:
                raise NotDone("the DataNode does not report to the NameNode")
            time.sleep(_PAUSE_SECONDS)

    def remove(self) -> None:
        for node in (self.datanode, self.namenode):
            node.remove()


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
