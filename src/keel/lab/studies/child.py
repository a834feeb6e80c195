"""The process of one run of a study: it ends when the study does, from its first moment on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any


def end_with_parent() -> None:
    """A run whose study was killed ends too: the study holds the other end of stdin."""
    while os.read(0, 1):  # not sys.stdin, whose lock would keep the interpreter from ending
        pass
    os._exit(137)


def stop(number: int, frame: Any) -> None:
    """What the study asks for when it is stopped; training waits for its step and saves, the rest ends at once."""
    raise KeyboardInterrupt


def main() -> int:
    """Watch the study, then import what takes seconds.

    The study asks by SIGTERM: what a shell starts in the background is deaf to SIGINT, and so are its children.
    """
    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, stop)
    try:
        from keel.lab.studies.point import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
