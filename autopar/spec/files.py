"""Files that users name: read within bounds, and written as a whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from autopar.errors import SpecError

_IN_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""Where the folder lets no file be made or replaced, as with a file that is mounted by itself."""


def read_file(path: str | Path, what: str, limit_bytes: int, error: type[SpecError] = SpecError) -> str:
    """The text of a file in UTF-8, with or without a byte order mark. `what`: what it should hold, for messages.

    Raises `error` where it is no regular file (a pipe or a device may have no end), is larger than `limit_bytes`,
    cannot be read, or is no UTF-8 text.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            kind = os.fstat(file.fileno()).st_mode
            raw = file.read(limit_bytes + 1) if stat.S_ISREG(kind) else b""
    except OSError as e:
        raise error(f"{path}: cannot read the {what}: {e.strerror or e}") from e
    except ValueError as e:  # of the path: a zero byte, say
        raise error(f"{os.fspath(path)!r}: cannot read the {what}: {e}") from e
    if not stat.S_ISREG(kind):
        raise error(f"{path}: cannot read the {what}: it is {_kind(kind)}, not a file")
    if len(raw) > limit_bytes:
        raise error(f"{path}: larger than {limit_bytes >> 20} MiB: this is no {what}")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = raw[: e.start].count(b"\n") + 1
        raise error(f"{path}:{line}: not UTF-8 text: byte {raw[e.start]:#04x} in it") from e


def write_file(path: str | Path, content: str | bytes, what: str = "file") -> None:
    """Writes a file as a whole: whoever reads it finds the old content or the new, and where it cannot be written
    the old one stays.

    An existing file keeps its permissions, a link what it points to; what is no regular file (`/dev/stdout`) is
    written to as it is. Raises `SpecError`, with the file and the cause, where it cannot be written.
    """
    try:
        data = content.encode() if isinstance(content, str) else content
        target = Path(os.path.realpath(path))
        before = _status(target)
        # A file that may not be written to is not replaced either: opening it says why.
        as_it_is = before is not None and not (stat.S_ISREG(before.st_mode) and os.access(target, os.W_OK))
        if as_it_is or not _replace(target, data, before):
            _write_in_place(target, data)
    except OSError as e:
        raise SpecError(f"{path}: cannot write the {what}: {e.strerror or e}") from e
    except ValueError as e:  # of the path, or of text that is no Unicode
        raise SpecError(f"{os.fspath(path)!r}: cannot write the {what}: {e}") from e


def check_writable(path: str | Path) -> None:
    """Raises `OSError`, with the cause, where a file cannot be written there, as far as that is known without writing
    it: that it can be made is tried with another one beside it, which is removed again."""
    target = Path(os.path.realpath(path))
    before = _status(target)
    if before is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    if before is None:
        draft = _draft(target)
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        draft.unlink()


def _draft(target: Path) -> Path:
    """A new name beside the file's."""
    return target.with_name(f".{target.name[:200]}.{secrets.token_hex(6)}")


def _replace(target: Path, data: bytes, before: os.stat_result | None) -> bool:
    """Writes a draft beside the file and renames it; False where the folder does not allow that, but the file may."""
    draft = _draft(target)
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(handle, "wb") as file:
            if before is not None:
                with contextlib.suppress(OSError):  # only root may give a file away
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except OSError as e:
        if before is None or e.errno not in _IN_PLACE:
            raise
        return False
    finally:
        with contextlib.suppress(OSError):  # renamed, or never made
            draft.unlink()
    with contextlib.suppress(OSError):  # not every file system lets a folder be synchronized
        handle = os.open(target.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    return True


def _write_in_place(target: Path, data: bytes) -> None:
    with target.open("wb") as file:
        file.write(data)


def _status(target: Path) -> os.stat_result | None:
    try:
        return target.stat()
    except FileNotFoundError:
        return None


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISFIFO(mode):
        return "a pipe"
    return "a device" if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else "something else"
