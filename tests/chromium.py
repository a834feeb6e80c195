"""A real browser without a screen; its tests run where it is installed, and .ci/run installs it and skips nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import F_DUPFD_CLOEXEC, fcntl
from pathlib import Path
from typing import Any, BinaryIO

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed: apt-get install chromium")


def browse(address: str, profile: Path, *options: str, virtual_s: float = 12.0) -> str:
    """Run Chromium on a page until `virtual_s` seconds have passed in it, which is as fast as the page can go."""
    command = [*_command(profile), f"--virtual-time-budget={1000 * virtual_s:.0f}", *options, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=_environment())
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _command(profile: Path) -> list[str]:
    assert PROGRAM is not None
    return [
        PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
        f"--user-data-dir={profile}",
    ]  # fmt: skip


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.lower() != "http_proxy"}


class Tab:
    """A page in a browser that a test acts on: `run` evaluates JavaScript, `press` and `click` are a user's.

    Chromium's own protocol, over pipes: https://chromedevtools.github.io/devtools-protocol
    """

    def __init__(self, commands: BinaryIO, answers: BinaryIO) -> None:
        self.commands, self.answers, self.session, self.count = commands, answers, "", 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one command; what the browser tells besides is not kept."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        self.commands.write(
            json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0"
        )
        self.commands.flush()
        while True:
            answer = json.loads(b"".join(iter(lambda: self.answers.read(1), b"\0")))
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, expression: str) -> Any:
        """The value of an expression, waited for if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, address: str, *, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Load a page in a window of this size and wait until it is complete."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def until(self, condition: str, within_s: float = 120.0) -> None:
        """Wait until a condition holds in the page."""
        deadline = time.monotonic() + within_s
        while not self.run(condition):
            assert time.monotonic() < deadline, f"not in {within_s:g} s: {condition}"
            time.sleep(0.05)

    def press(self, *keys: str) -> None:
        for key in keys:
            for kind in ("keyDown", "keyUp"):
                self.call(
                    "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=CODES.get(key, 0)
                )

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, file: Path) -> None:
        """The whole page as a PNG."""
        file.write_bytes(b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))


CODES = {"Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35}


@contextmanager
def tab(profile: Path) -> Iterator[Tab]:
    """A browser with one page, until the block ends."""
    to_browser, commands = map(_above_four, os.pipe())
    answers, from_browser = map(_above_four, os.pipe())
    arguments = [*_command(profile), "--remote-debugging-pipe", "about:blank"]
    # it reads commands from descriptor 3 and answers on descriptor 4
    quiet = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)]
    moved = [(os.POSIX_SPAWN_DUP2, to_browser, 3), (os.POSIX_SPAWN_DUP2, from_browser, 4)]
    browser = os.posix_spawn(arguments[0], arguments, _environment(), file_actions=[*quiet, *moved])
    os.close(to_browser)
    os.close(from_browser)
    with open(commands, "wb", buffering=0) as written, open(answers, "rb") as read:
        try:
            yield Tab(written, read)
        finally:
            os.kill(browser, signal.SIGKILL)
            os.waitpid(browser, 0)


def _above_four(descriptor: int) -> int:
    moved = fcntl(descriptor, F_DUPFD_CLOEXEC, 5)
    os.close(descriptor)
    return moved
