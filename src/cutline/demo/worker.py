"""The process that runs the demo's flow: the one that gets killed."""

from __future__ import annotations

import logging
import sys

import msgspec
import structlog

from cutline.demo.pipeline import payments_flow
from cutline.demo.settings import DemoSettings


def main() -> None:
    """Run until everything is published; the settings come as one argument of JSON."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    settings = msgspec.json.decode(sys.argv[1], type=DemoSettings)
    run = payments_flow(settings).start(
        storage=str(settings.storage), checkpoint_interval=settings.interval, mode=settings.mode
    )
    run.process_all_available()
    run.stop()


if __name__ == "__main__":
    main()
