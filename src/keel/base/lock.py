"""One writer per run directory: a file lock that the kernel releases when its holder dies."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from filelock import FileLock, Timeout

from keel.base.errors import KeelError
from keel.base.files import one_line_errors

_WAIT_S = 0.2  # `is_locked` in another process holds a shared lock for an instant
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # a file system without locks


class RunLock:
    """Held from construction to `release`; the pid in the file is for the error message."""

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
                if error.errno not in _NO_LOCKS:  # without locks, trust the user
                    raise

    def release(self) -> None:
        """Release the lock; safe to call twice, and in a forked child, which holds no lock."""
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


def is_locked(path: Path) -> bool:
    """Whether a living process holds this lock. Needs no write permission and changes nothing."""
    import fcntl  # POSIX only; RunLock does not need it

    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two readers do not block each other
    except (BlockingIOError, PermissionError):  # the second on a few file systems
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False
