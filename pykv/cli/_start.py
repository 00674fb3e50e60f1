"""The entry point of the `pykv` command, light enough for an early Ctrl-C."""

import os
import signal
from typing import Any

SIGINT_EXIT = 130  # as a shell reports a program that the signal ended


def _leave(*_: Any) -> None:
    os._exit(SIGINT_EXIT)


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        before = signal.getsignal(signal.SIGINT)
        if before is signal.default_int_handler:
            # nothing is at stake while modules are imported, and a traceback of them helps nobody
            signal.signal(signal.SIGINT, _leave)
        from pykv.cli.app import main as run

        signal.signal(signal.SIGINT, before)
        return run()
    except KeyboardInterrupt:
        return SIGINT_EXIT
