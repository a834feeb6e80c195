"""`keel watch` and the server process of `keel train --watch`."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from keel.base.errors import KeelError
from keel.lab.watch.follow import Watcher
from keel.lab.watch.page import ENDED_KINDS
from keel.lab.watch.server import ADDRESS, REFRESH_S, WatchServer, listen

POLL_S = 1.0
DRAIN_S = 5.0  # seconds for open pages to fetch the final state
EVERY_PAGE_S = REFRESH_S + 0.5  # seconds within which every open page sends a request
QUIET_S = 1.0  # seconds within which a server without open pages exits
Echo = Callable[[str], None]


def addresses(port: int) -> list[str]:
    """The address of the page on this machine, and how to open it from another one."""
    here = f"http://{ADDRESS}:{port}/"
    tunnel = f"ssh -L {port}:{ADDRESS}:{port} {_user()}@{socket.gethostname()}"
    return [f"watch at {here}", f"from another machine: {tunnel}, then open {here} there"]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "USER"


def watch(runs: Sequence[Path], port: int, *, until_end: bool = False, echo: Echo = print) -> None:
    """Serve the runs' page until Ctrl-C, or with `until_end` until all of them have ended."""
    watcher = Watcher(runs)
    for run in watcher.runs:
        run.check()
    listener = listen(port)
    for line in addresses(listener.getsockname()[1]):
        echo(line)
    with served(watcher, listener):
        kinds: dict[Path, str] = {}
        while True:
            watcher.refresh()
            watcher.judge()
            for run in watcher.runs:
                if kinds.get(run.path) != run.kind:
                    kinds[run.path] = run.kind
                    echo(f"{run.path}: {run.state_text}")
            if all(run.gone for run in watcher.runs):
                raise KeelError(
                    f"{' and '.join(str(run.path) for run in watcher.runs)} was deleted or moved: check the path"
                )
            if until_end and all(run.kind in ENDED_KINDS for run in watcher.runs):
                return show_end(watcher)
            time.sleep(POLL_S)


@contextmanager
def served(watcher: Watcher, listener: socket.socket) -> Iterator[None]:
    """Serve the watcher's page on a socket, in a thread, until the block ends."""
    server = WatchServer(listener, watcher)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def show_end(watcher: Watcher) -> None:
    """Tell open pages that the run has ended, and wait until they have fetched the final state."""
    watcher.final = True
    start = time.monotonic()
    while watcher.seen and time.monotonic() - start < (EVERY_PAGE_S if watcher.final_sent else DRAIN_S):
        time.sleep(0.1)
    if watcher.final_sent:
        time.sleep(REFRESH_S / 2)  # seconds in which its sections are fetched


@contextmanager
def serve_while(run: Path, port: int, echo: Echo = print) -> Iterator[None]:
    """Serve the page of a run that is trained within the block, from another process, so that steps do not wait for it.

    At the end, open pages fetch the final state and the server exits. It also exits if this process dies.
    """
    listener = listen(port, "--watch-port")
    for line in addresses(listener.getsockname()[1]):
        echo(line)
    descriptor = listener.fileno()
    command = [sys.executable, "-m", "keel.lab.watch.serve", str(descriptor), str(run)]
    with listener:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[descriptor], start_new_session=True)
    assert child.stdin is not None
    try:
        yield
    finally:
        child.stdin.close()
        _wait_for_pages(child, echo)


def _wait_for_pages(child: subprocess.Popen[bytes], echo: Echo) -> None:
    """Wait until the server exits. Ctrl-C or SIGTERM end it; they do not affect the finished run."""
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if in_main else None
    try:
        if not _ends(child, QUIET_S):
            echo(f"waiting up to {2 * DRAIN_S:g} s for open pages to fetch the final state; Ctrl-C skips this")
            _ends(child, 2 * DRAIN_S)
    except KeyboardInterrupt:
        pass
    finally:
        child.kill()
        child.wait()
        if in_main:
            signal.signal(signal.SIGTERM, before)


def _ends(child: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        child.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def serve_process(listener: socket.socket, run: Path) -> None:
    """The server process of `serve_while`: it serves until stdin closes and open pages have the final state."""
    os.nice(5)  # training has priority
    ended = threading.Event()
    threading.Thread(target=_wait_for_end, args=(ended,), daemon=True).start()
    watcher = Watcher([run])
    with served(watcher, listener):
        while not ended.wait(POLL_S):
            watcher.refresh()
            watcher.judge()
        show_end(watcher)


def _wait_for_end(ended: threading.Event) -> None:
    while os.read(0, 1):
        pass
    ended.set()


if __name__ == "__main__":  # arguments: a listening socket, and the run's folder
    serve_process(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]))
