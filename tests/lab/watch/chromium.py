"""A real browser without a screen; its tests run where it is installed, and .ci/run installs it and skips nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed: apt-get install chromium")


def browse(address: str, profile: Path, *options: str, virtual_s: float = 12.0) -> str:
    """Run Chromium on a page until `virtual_s` seconds have passed in it, which is as fast as the page can go."""
    assert PROGRAM is not None
    command = [
        PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
        f"--user-data-dir={profile}", f"--virtual-time-budget={1000 * virtual_s:.0f}", *options, address,
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name.lower() != "http_proxy"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
