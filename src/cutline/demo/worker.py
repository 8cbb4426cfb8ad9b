"""The process that runs the demo's flow and is killed."""

from __future__ import annotations

import logging
import sys

import msgspec

from cutline.base.logs import configure_logging
from cutline.demo.pipeline import payments_flow
from cutline.demo.settings import DemoSettings


def main() -> None:
    """Run until everything is published; the settings come as one argument of JSON."""
    configure_logging(as_json=False, level=logging.INFO)
    settings = msgspec.json.decode(sys.argv[1], type=DemoSettings)
    run = payments_flow(settings).start(
        storage=str(settings.storage),
        checkpoint_interval=settings.interval,
        mode=settings.mode,
        remote=settings.remote,
        remote_options=settings.remote_options,
    )
    run.process_all_available()
    run.stop()


if __name__ == "__main__":
    main()
