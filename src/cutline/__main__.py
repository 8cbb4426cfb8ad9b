"""The ``cutline`` command, ``python -m cutline``, and what ``spark-submit`` can run: it knows Python by its suffix."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main() -> None:
    """Run the command line. Ctrl-C ends it cleanly while its modules are still being imported, too."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    from cutline.cli.main import main as run

    run()


def _end(number: int, _: object) -> None:
    if number == signal.SIGINT:
        os.write(2, b"error: interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    # As a script, this file has put its own folder first: the modules in there belong to the package only.
    if sys.path and Path(sys.path[0] or ".").resolve() == Path(__file__).resolve().parent:
        del sys.path[0]
    main()
