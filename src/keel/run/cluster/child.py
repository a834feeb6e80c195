"""`python -m keel.run.cluster.child ARGUMENTS`: `keel ARGUMENTS` until the actor that started it ends."""

from __future__ import annotations

import runpy
import signal
import threading

from keel.base.watchdog import exit_with_parent


def main() -> None:
    """Watch the actor, then import what takes seconds. Ray's workers block SIGINT, and so would this process."""
    threading.Thread(target=exit_with_parent, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    runpy.run_module("keel", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
