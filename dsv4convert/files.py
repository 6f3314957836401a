"""Files that someone else wrote: open them safely, see what they pretend to be, parse strict JSON.

Used for shards, the index, ``config.json`` and every file to copy. Nothing here knows what they contain.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn

from dsv4convert.errors import Dsv4Error, EnvironmentFault, Finding, Refused, finding

#: What a fresh volume holds; a directory with nothing else counts as empty.
VOLUME = "lost+found"

_LFS = b"version https://git-lfs.github.com/spec/"
_MARKUP = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype|!--|html|head|body|title|error|\?xml)", re.IGNORECASE
)


def printable(text: object, limit: int = 300) -> str:
    """Return `text` fit for any message: no control character, no surrogate, not longer than `limit`."""
    shown = str(text)
    if len(shown) > limit:
        shown = shown[:limit] + "…"
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def listed(names: Iterable[str], count: int) -> str:
    """Return the first three of `count` names for a message."""
    first = [f"`{printable(n)}`" for n, _ in zip(names, range(3), strict=False)]
    return ", ".join(first) + (", …" if count > len(first) else "")


def fail(code: str, where: str, problem: str, expected: str = "", found: str = "") -> NoReturn:
    """Raise one finding as an error."""
    raise Dsv4Error(finding(code, printable(where), problem, expected=expected, found=found))


def _os_fault(error: OSError, name: str) -> Finding:
    """Return the finding for a failed system call on `name`."""
    reason = error.strerror or type(error).__name__
    if error.errno in (errno.ENOENT, errno.ELOOP):
        return finding("file.unreadable", printable(name), f"cannot be opened: {reason}")
    if isinstance(error, PermissionError):
        return finding("file.unreadable", printable(name), "permission denied")
    return finding("io.read", printable(name), f"reading failed: {reason}")


def open_regular(path: str | os.PathLike[str], name: str) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; never blocks on a FIFO and never touches a device.

    Args:
        path: Where the file lies; links are followed.
        name: What messages call it.

    Returns:
        The file descriptor, to be closed by the caller, and its status.

    Raises:
        Dsv4Error: ``file.not-regular``, ``file.unreadable`` or ``io.read``.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            fail("file.not-regular", name, "is not a regular file")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Dsv4Error(_os_fault(error, name)) from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):  # replaced between the two calls
        os.close(fd)
        fail("file.not-regular", name, "is not a regular file")
    return fd, status


def identity(status: os.stat_result) -> list[int]:
    """Return what tells a file from what it was before, and from every copy.

    The time of the last status change shows a write whose modification time was set back (`cp -p`), and two
    file systems may use the same inode numbers.
    """
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino]


def read_start(fd: int, length: int, name: str, offset: int = 0) -> bytes:
    """Read up to `length` bytes at `offset`; shorter only at the end of the file.

    Raises:
        Dsv4Error: ``io.read``.
    """
    parts = []
    try:
        while length and (part := os.pread(fd, length, offset)):
            parts.append(part)
            offset += len(part)
            length -= len(part)
    except OSError as error:
        raise Dsv4Error(_os_fault(error, name)) from None
    return b"".join(parts)


def read_whole(path: str | os.PathLike[str], name: str, most: int, code: str) -> bytes:
    """Read a file that a command cannot do without and that is held in memory.

    Args:
        path: Where the file lies; links are followed.
        name: What messages call it.
        most: Bytes that it may have.
        code: Finding code for a larger one.

    Raises:
        Refused: `code`; it is larger.
        EnvironmentFault: ``file.not-regular``, ``file.unreadable`` or ``io.read``.
    """
    try:
        fd, status = open_regular(path, name)
        try:
            if status.st_size <= most:
                return read_start(fd, status.st_size, name)
        finally:
            os.close(fd)
    except Dsv4Error as fault:
        raise EnvironmentFault(fault.findings) from None
    limit, size = f"at most {most:,} bytes", f"{status.st_size:,} bytes"
    raise Refused(finding(code, printable(name), "is too large", expected=limit, found=size))


def check_disguise(head: bytes, name: str, *, markup: bool = True) -> None:
    """Refuse a Git LFS pointer or a web page that was saved under the name of a model file.

    Args:
        head: First bytes of the file, 64 or more if it has them.
        name: What messages call it.
        markup: Look for web pages too; off for files that may be markup.

    Raises:
        Dsv4Error: ``file.lfs-pointer`` or ``file.html-page``.
    """
    if head.startswith(_LFS):
        fail("file.lfs-pointer", name, "is a Git LFS pointer, not the file itself")
    if markup and _MARKUP.match(head):
        fail("file.html-page", name, "is a web page, not the file itself", found=quoted(head))


def quoted(head: bytes) -> str:
    """Return the first bytes of a file for a message."""
    return f"`{printable(head[:40].decode('utf-8', 'replace').strip())}`"


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def parse_json(raw: bytes, name: str, code: str, *, find_repeats: bool = True) -> tuple[Any, tuple[str, ...]]:
    """Parse strict JSON: UTF-8, no NaN, no runaway nesting or integer.

    Args:
        raw: The text; a byte order mark is tolerated.
        name: What messages call it.
        code: Finding code for text that is not JSON.
        find_repeats: Look for repeated keys; half the speed for many small objects.

    Returns:
        The value (of a repeated key the last one, as every reader does), and the repeated keys.

    Raises:
        Dsv4Error: a finding of `code`.
    """
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            repeated.extend(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        return result

    try:
        text = raw.decode("utf-8-sig")
        value = json.loads(
            text, object_pairs_hook=unique if find_repeats else None, parse_constant=_reject_constant
        )
    except UnicodeDecodeError as error:
        fail(code, name, f"is not UTF-8 at byte {error.start:,}")
    except RecursionError:
        fail(code, name, "JSON is nested too deeply")
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" starting at")
        fail(code, name, f"is not JSON: {reason} at character {error.pos:,} of {len(text):,}")
    except ValueError as error:
        fail(code, name, f"is not JSON: {printable(error)}")
    return value, tuple(repeated)
