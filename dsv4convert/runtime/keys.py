"""API keys in files: made with mode 0600, and refused when anybody else could read them.

A key never stands on a command line or in the environment, where every user of the machine can see it. What
goes wrong is told without a character of the key.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from dsv4convert.errors import Finding, Refused, encodable, finding

#: Random bytes of a new key: 256 bits, 43 characters.
KEY_BYTES = 32
#: Shortest and longest key that is accepted, in characters.
SHORTEST, LONGEST = 16, 1024
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_key(path: Path) -> None:
    """Write a new random key into a new file that only its owner can read.

    Raises:
        Refused: `path` exists, whatever it is.
        OSError: it cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o600)
    except FileExistsError:
        problem = "exists; a key that servers or clients may use is never replaced"
        raise Refused(finding("key.exists", path.name, problem)) from None
    try:
        with os.fdopen(handle, "w") as file:
            # A umask can only take bits away, so that the file was never open to others.
            os.fchmod(handle, 0o600)
            file.write(secrets.token_urlsafe(KEY_BYTES) + "\n")
            file.flush()
            os.fsync(handle)
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def read_key(path: Path) -> str:
    """Return the key in a file.

    Raises:
        Refused: the file is not there, not private, or holds no usable key; all reasons together.
    """
    key, findings = look_at_key(path)
    if findings:
        raise Refused(findings)
    return key


def look_at_key(path: Path) -> tuple[str, list[Finding]]:
    """Return the key in a file, empty if it cannot be used, and what is wrong with the file."""
    where = _printable(path.name)
    try:
        # Not blocking, because the path may name a pipe.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        # A name that no file has may be the key itself, given in place of its file.
        named = where if os.path.lexists(path) else "--api-key-file"
        return "", [finding("key.missing", named, "cannot be opened", found=f"{error.strerror}")]
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            return "", [finding("key.missing", where, "is not a regular file")]
        faults = _not_private(where, status)
        text = os.read(handle, LONGEST + 2)
    finally:
        os.close(handle)
    content = _content_fault(where, text.removesuffix(b"\n").removesuffix(b"\r"))
    if content:
        return "", [*faults, content]
    return text.decode().strip() if not faults else "", faults


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in encodable(name))


def _not_private(where: str, status: os.stat_result) -> list[Finding]:
    faults = []
    mode = stat.S_IMODE(status.st_mode)
    if mode & _OTHERS:
        problem = "other users of this machine have access to the key"
        faults.append(finding("key.mode", where, problem, expected="mode 0600", found=f"{mode:04o}"))
    if status.st_uid != os.geteuid():
        problem = "the key belongs to another user, who can change it"
        expected, found = f"user id {os.geteuid()}", f"{status.st_uid}"
        faults.append(finding("key.owner", where, problem, expected=expected, found=found))
    return faults


def _content_fault(where: str, text: bytes) -> Finding | None:
    """Return what is wrong with the bytes of a key; they travel in an HTTP header."""
    if not SHORTEST <= len(text) <= LONGEST:
        problem, expected = "does not hold one key", f"one line of {SHORTEST} to {LONGEST:,} characters"
        found = f"{len(text):,}" if len(text) <= LONGEST else f"more than {LONGEST:,}"
        return finding("key.content", where, problem, expected=expected, found=found)
    if any(not 0x21 <= byte <= 0x7E for byte in text):
        problem = "holds a blank, a second line or a byte that is not printable ASCII"
        return finding("key.content", where, problem, expected="one line of printable ASCII")
    return None
