"""The HTTP server of the live page, on loopback (also through an SSH tunnel)."""

from __future__ import annotations

import errno
import gzip
import json
import socket
import sys
import traceback
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from keel.base.errors import KeelError
from keel.lab.watch.follow import Watcher
from keel.lab.watch.page import whole_page

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
        reason = "is in use, perhaps by another keel watch" if used else f"cannot be listened on ({error.strerror})"
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
