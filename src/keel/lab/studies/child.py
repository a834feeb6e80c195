"""The process of one run of a study. It exits when the study's process exits."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from keel.base.watchdog import exit_with_parent


def stop(number: int, frame: Any) -> None:
    """Handle SIGTERM from the study like Ctrl-C: training finishes its step and saves."""
    raise KeyboardInterrupt


def main() -> int:
    """Run one job; the thread that watches the parent starts before the slow imports.

    The study sends SIGTERM, because background processes of a shell and their children ignore SIGINT.
    """
    threading.Thread(target=exit_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, stop)
    try:
        from keel.lab.studies.point import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
