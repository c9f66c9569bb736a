"""One process at a time writes to a folder of a run or of tokens: a lock of the operating system.

``flock`` (Unix) and ``msvcrt.locking`` (Windows) end with the process that holds them, by kill -9
too, so a lock is never stale. On NFS, Linux asks the server, which covers other hosts. The file
says who holds the lock, for the error that others get, and is removed at the end.
"""

import contextlib
import datetime
import errno
import json
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

from gpuattn.errors import CheckpointError, ConfigError

try:
    import fcntl
except ImportError:  # Windows
    import msvcrt

LOCK = ".lock"
LOCK_BYTE = 1 << 30  # the byte that Windows locks, far behind the text, which others may read
BUSY = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Return a context that holds the lock of a folder; the folder is made if missing.

    Folders that were made and are empty at the end are removed. Where the file system has no
    locks, a warning says so. Raises ConfigError that names the process which holds the lock, and
    CheckpointError where the folder cannot be written to.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        handle = _acquire(folder)
    except OSError as error:
        raise CheckpointError(
            f"cannot write to {folder}: {error.strerror}. Choose another --out"
        ) from error
    try:
        yield
    finally:
        _release(handle, folder / LOCK)
        for path in made:
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()


def _acquire(folder):
    """Return the handle of the folder's lock file, locked, with this process noted in it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(handle, folder)
            if _is_at(handle, folder / LOCK):
                _note(handle)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the former holder removed the file after it was opened


def _lock(handle, folder):
    try:
        if os.name == "nt":
            os.lseek(handle, LOCK_BYTE, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in BUSY:
            raise ConfigError(
                f"{folder} is in use: {_owner(handle)}. Wait until it ends, stop it, or choose "
                "another --out"
            ) from None
        warnings.warn(
            f"{folder} cannot be locked ({error.strerror}): start no second run in it", stacklevel=2
        )


def _is_at(handle, path):
    """Return whether an open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _note(handle):
    """Write who holds the lock. On a full disk the lock still holds."""
    since = datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, json.dumps(owner).encode())


def _owner(handle):
    """Return who holds the lock, as far as its file says."""
    try:
        os.lseek(handle, 0, os.SEEK_SET)
        owner = json.loads(os.read(handle, 4096))
        return f"process {owner['pid']} on {owner['host']} writes to it since {owner['since']}"
    except (OSError, ValueError, LookupError, TypeError):
        return "another process writes to it"


def _release(handle, path):
    """Remove the file, then release the lock: waiting processes see that the file is gone."""
    with contextlib.suppress(OSError):  # Windows removes no open file
        path.unlink()
    os.close(handle)
    if os.name == "nt":
        with contextlib.suppress(OSError):  # another process has it by now
            path.unlink()
