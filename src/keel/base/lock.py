"""One writer a run directory: a lock that the kernel takes back when its holder dies, however it dies."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from filelock import FileLock, Timeout

from keel.base.errors import KeelError
from keel.base.files import one_line_errors

_WAIT_S = 0.2  # a report that looks whether the run goes on holds the lock for an instant
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # a file system without locks


class RunLock:
    """Held from construction to `release`; the pid in the file is only there to be named in the message."""

    def __init__(self, path: Path) -> None:
        self._lock = FileLock(
            path, _WAIT_S, thread_local=False, preserve_lock_file=True, fallback_to_soft=False, on_acquired=_write_pid
        )
        with one_line_errors(f"cannot write {path}"):
            try:
                self._lock.acquire()
            except Timeout:
                raise _in_use(path) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:  # there one has to trust the user
                    raise

    def release(self) -> None:
        """Give the lock back; safe to call twice, and in a forked child, which holds nothing."""
        self._lock.release(force=True)


def _write_pid(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())


def _in_use(path: Path) -> KeelError:
    holder = path.read_text(encoding="ascii", errors="replace").strip() or "unknown"
    if holder == str(os.getpid()):
        return KeelError(f"{path.parent} is already open in this process (pid {holder}); close it first")
    return KeelError(
        f"{path.parent} is in use by another process (pid {holder}); wait for it or choose another run.name"
    )


def in_use(path: Path) -> bool:
    """Whether a living process holds this lock; asking changes nothing, and needs no right to write."""
    import fcntl  # not on every system: what only takes the lock does without

    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who ask do not take each other for the run
    except (BlockingIOError, PermissionError):  # the second on a few file systems
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False
