"""The command line as real processes, without the second that each would take to import it.

One process imports the command line; for each command it forks a process that runs ``main`` with its own arguments,
folder, environment and output, as a shell would start it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SERVER = """
import ctypes, importlib, io, json, os, struct, sys, tempfile
from contextlib import redirect_stdout
from cutline.cli.failures import run_command
from cutline.cli.main import app, main
import typer

CAPABILITIES = 0x20080522

# Commands import what they need when they run; here they have it already.
for name in ("runtime.launch", "runtime.stores", "savepoints.store", "cli.history.past", "cli.upkeep.reach"):
    importlib.import_module("cutline." + name)
top = typer.main.get_command(app)
for name in top.declared:
    top.get_command(None, name)
with redirect_stdout(io.StringIO()):
    run_command(app, ["status", "nosuch", "--json"])

def give_up_capabilities():
    header = struct.pack("Ii", CAPABILITIES, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, bytes(24)):
        raise OSError(ctypes.get_errno(), "capset")

for line in sys.stdin:
    job = json.loads(line)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            try:
                os.chdir(job["folder"])
                os.environ.update(job["environment"])
                tempfile.tempdir = None
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                if job["without_capabilities"]:
                    give_up_capabilities()
                sys.argv = ["cutline", *(os.fsdecode(bytes.fromhex(one)) for one in job["arguments"])]
                try:
                    main()
                    code = 0
                except SystemExit as error:
                    code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
                except BaseException:
                    import traceback
                    traceback.print_exc()
                    code = 99
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        err.seek(0)
        told = {"code": os.waitstatus_to_exitcode(status), "out": out.read().hex(), "err": err.read().hex()}
    print(json.dumps(told), flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a command has printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def has_traceback(self) -> bool:
        return "Traceback" in self.out + self.err


class CommandLine:
    """Runs commands; ``close`` ends the process that imported them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self,
        *arguments: str | bytes,
        folder: Path | None = None,
        without_capabilities: bool = False,
        **environment: str,
    ) -> Told:
        """``without_capabilities``: permissions hold for the command, also if root runs the tests."""
        assert self._server.stdin is not None and self._server.stdout is not None
        job = {
            "arguments": [(one if isinstance(one, bytes) else os.fsencode(one)).hex() for one in arguments],
            "folder": str(folder or self.folder),
            "environment": environment,
            "without_capabilities": without_capabilities,
        }
        print(json.dumps(job), file=self._server.stdin, flush=True)
        told = json.loads(self._server.stdout.readline())
        texts = {name: bytes.fromhex(told[name]).decode(errors="replace") for name in ("out", "err")}
        return Told(code=told["code"], **texts)

    def close(self) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(timeout=30)
        self._server.stdout.close()
