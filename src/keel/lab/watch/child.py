"""The server's process beside `keel train --watch`: a socket that listens already, and the run's folder."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from keel.lab.watch.serve import serve_beside

if __name__ == "__main__":
    serve_beside(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]))
