"""`keel watch` and the server process of `keel train --watch`: an HTTP server on loopback."""

from __future__ import annotations

import errno
import getpass
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from keel.base.errors import KeelError
from keel.lab.watch.page import ENDED_KINDS, Watcher, whole_page

ADDRESS = "127.0.0.1"
REFRESH_S = 2.0
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_MIN_GZIP_BYTES = 1400  # smaller answers fit into one packet


def listen(port: int, option: str = "--port") -> socket.socket:
    """A socket on loopback; port 0 picks a free one. `option` is the flag that gave the port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((ADDRESS, port))
        listener.listen()
    except OSError as error:
        listener.close()
        used = error.errno == errno.EADDRINUSE
        reason = "is in use, perhaps by another keel watch" if used else f"cannot be opened ({error.strerror})"
        raise KeelError(
            f"port {port} of {ADDRESS} {reason}: set {option} to another one, or to 0 for a free one"
        ) from None
    return listener


def is_local(host: str | None) -> bool:
    """Whether the Host header names this machine; other names may be a DNS-rebinding attack."""
    try:
        return host is not None and urlsplit(f"//{host}").hostname in LOCAL_NAMES
    except ValueError:
        return False


class WatchServer(ThreadingHTTPServer):
    """Serve a watcher's page on a listening socket."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, watcher: Watcher) -> None:
        super().__init__(listener.getsockname(), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.watcher = watcher

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a page that is closed during an answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Routes: `/` is the page, `state` the digests of its sections, `section/NAME` one section."""

    server: WatchServer
    server_version = "keel"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """Answer a request; an error is sent to the page as one line."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not is_local(hosts[0]):
            names = f"open the page as http://{ADDRESS}:PORT/ or http://localhost:PORT/"
            return self._answer(HTTPStatus.FORBIDDEN, f"keel watch accepts only local host names: {names}")
        try:
            return self._route(urlsplit(self.path).path)
        except ConnectionError:
            raise
        except Exception as error:
            traceback.print_exc()
            return self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")

    def _route(self, path: str) -> None:
        watcher = self.server.watcher
        final = watcher.final  # read before the snapshot, so that a final snapshot contains the end of the run
        snapshot = watcher.snapshot()
        if path == "/":
            page = whole_page(snapshot.title, snapshot.sections, REFRESH_S)
            return self._answer(HTTPStatus.OK, page, "text/html", snapshot.etag)
        if path == "/state":
            state = {
                "sections": [{"name": part.name, "digest": part.digest} for part in snapshot.sections],
                "age_s": round(watcher.age(), 1),
                "final": final,
            }
            watcher.final_sent = watcher.final_sent or final
            etag = f"{snapshot.etag}-final" if final else snapshot.etag
            return self._answer(HTTPStatus.OK, json.dumps(state), "application/json", etag)
        for part in snapshot.sections:
            if path == f"/section/{part.name}":
                return self._answer(HTTPStatus.OK, part.html, "text/html", part.digest)
        return self._answer(HTTPStatus.NOT_FOUND, "keel watch has no such page")

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain", etag: str | None = None) -> None:
        known = self.headers.get("If-None-Match", "").replace('"', "").split(", ")
        unchanged = etag is not None and etag in known
        data = b"" if unchanged else text.encode("utf-8", "replace")
        packed = len(data) > _MIN_GZIP_BYTES and "gzip" in self.headers.get("Accept-Encoding", "")
        data = gzip.compress(data, 3) if packed else data
        self.send_response(HTTPStatus.NOT_MODIFIED if unchanged else status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if etag is not None:
            self.send_header("ETag", f'"{etag}"')
        if packed:
            self.send_header("Content-Encoding", "gzip")
        if not unchanged:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests: a page polls every two seconds."""


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
    """Mark the page as final, and wait until open pages have fetched the final state."""
    watcher.final = True
    start = time.monotonic()
    while watcher.seen and time.monotonic() - start < (EVERY_PAGE_S if watcher.final_sent else DRAIN_S):
        time.sleep(0.1)
    if watcher.final_sent:
        time.sleep(REFRESH_S / 2)  # seconds for pages to fetch the final sections


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
    """Wait until the server exits. Ctrl-C or SIGTERM ends only the wait: the run is finished."""
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
