"""The process of one run of a study: it ends when the study does, from its first moment on."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from keel.base.watchdog import exit_with_parent


def stop(number: int, frame: Any) -> None:
    """SIGTERM from the study: training finishes its step and saves, anything else ends at once."""
    raise KeyboardInterrupt


def main() -> int:
    """Watch the study, then import what takes seconds.

    The study sends SIGTERM: what a shell starts in the background ignores SIGINT, and so do its children.
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
