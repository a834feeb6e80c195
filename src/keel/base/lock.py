"""One writer a run directory: a lock that the kernel takes back when its holder dies, however it dies."""

from __future__ import annotations

import os
import time
from pathlib import Path

from keel.base.errors import KeelError
from keel.base.files import one_line_errors

# POSIX locks do not exclude a second opening in the same process, so those are kept here (pid: a fork holds nothing).
_HELD: dict[str, int] = {}


class RunLock:
    """Held from construction to `release`; the pid in the file is only there to be named in the message.

    A POSIX lock rather than flock: a forked child that outlives its parent does not inherit it, so a killed run is
    free at once even if a worker lingers.
    """

    def __init__(self, path: Path) -> None:
        self._key = os.path.realpath(path)
        self._handle = -1
        if _HELD.get(self._key) == os.getpid():
            raise KeelError(f"{path.parent} is already open in this process (pid {os.getpid()}); close it first")
        with one_line_errors(f"cannot write {path}"):
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._take(path)
        except BaseException:
            os.close(self._handle)
            self._handle = -1
            raise
        _HELD[self._key] = os.getpid()

    def _take(self, path: Path) -> None:
        try:
            import fcntl
        except ImportError:  # Windows: no such lock, so trust the user
            return
        try:
            for wait in (0.05, 0.15, 0.0):  # a report that looks whether the run goes on holds it for an instant
                try:
                    fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except (BlockingIOError, PermissionError):
                    if not wait:
                        raise
                    time.sleep(wait)
        except (BlockingIOError, PermissionError) as error:
            holder = os.pread(self._handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise KeelError(
                f"{path.parent} is in use by another process (pid {holder}); wait for it or choose another run.name"
            ) from error
        except OSError:  # a file system without locks
            return
        with one_line_errors(f"cannot write {path}"):
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Give the lock back; safe to call twice, and in a forked child it only closes the child's handle."""
        if self._handle < 0:
            return
        os.close(self._handle)
        self._handle = -1
        if _HELD.get(self._key) == os.getpid():
            del _HELD[self._key]


def in_use(path: Path) -> bool:
    """Whether a living process holds this lock; asking changes nothing."""
    if _HELD.get(os.path.realpath(path)) == os.getpid():  # opening and closing it here would give our own lock back
        return True
    try:
        import fcntl

        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (ImportError, OSError):
        return False
    try:
        fcntl.lockf(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False
