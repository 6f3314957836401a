"""The log of a server: every line to a file that rotates, no key in it, and the last lines at hand."""

from __future__ import annotations

import io
import json
import logging
import os
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, Any, Final

#: Size at which a file is put aside, and how many are kept beside the current one.
FILE_BYTES: Final = 64 << 20
KEPT: Final = 5
#: Lines shown when a server dies or hangs.
TAIL: Final = 30
HIDDEN: Final = "[API key]"
#: A line longer than this is cut, so that a stream without line ends cannot fill the memory.
LONGEST_LINE: Final = 1 << 16


class ServerLog:
    """Takes the lines of a server.

    Args:
        path: The file; older ones are ``path.1`` to ``path.5``.
        key: Text that must not be written; empty for none.
        echo: Called with every line, None to stay silent.
        file_bytes: Size at which a file is put aside.
    """

    def __init__(
        self,
        path: Path,
        key: str = "",
        echo: Callable[[str], None] | None = None,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self._handler = _PrivateFile(path, file_bytes)
        self._echo = echo
        # As itself, and as Python and JSON quote it.
        forms = {key, repr(key)[1:-1], json.dumps(key)[1:-1]} if key else set()
        self._forms = sorted(forms, key=len, reverse=True)
        self.tail: deque[str] = deque(maxlen=TAIL)

    def lines(self, stream: IO[bytes]) -> Iterator[str]:
        """Yield the lines of a server's output without the key, longer ones than `LONGEST_LINE` in pieces."""
        # A key may stand across a cut: what could be its beginning waits for the next piece.
        reach, held = max(map(len, self._forms), default=1) - 1, ""
        while part := stream.readline(LONGEST_LINE):
            text = self._hide(held + part.decode(errors="replace"))
            is_cut = len(part) == LONGEST_LINE and not part.endswith(b"\n")
            end = max(0, len(text) - reach) if is_cut else len(text)
            held = text[end:]
            yield text[:end].rstrip("\r\n")
        if held:
            yield held

    def _hide(self, text: str) -> str:
        for form in self._forms:
            text = text.replace(form, HIDDEN)
        return text

    def write(self, line: str) -> str:
        """Take one line and return it as it was written."""
        line = self._hide(line)
        self.tail.append(line)
        self._handler.emit(logging.makeLogRecord({"msg": line}))
        if self._echo:
            self._echo(line)
        return line

    @property
    def fault(self) -> str:
        """Why lines could not be written, empty if they all were."""
        return self._handler.fault

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # Closing writes what could not be written before.
            self._handler.close()


class _PrivateFile(RotatingFileHandler):
    """A rotating file that only its owner can read: prompts may stand in it."""

    def __init__(self, path: Path, file_bytes: int) -> None:
        self.fault = ""
        super().__init__(
            path, maxBytes=file_bytes, backupCount=KEPT, encoding="utf-8", errors="backslashreplace"
        )

    def _open(self) -> io.TextIOWrapper:
        def opener(name: str, flags: int) -> int:
            handle = os.open(name, flags | os.O_CLOEXEC, 0o600)
            try:
                # A file that was there before may have been open to others.
                if stat.S_ISREG(os.fstat(handle).st_mode):
                    os.fchmod(handle, 0o600)
            except OSError:
                os.close(handle)
                raise
            return handle

        return open(self.baseFilename, "a", encoding="utf-8", errors="backslashreplace", opener=opener)

    def handleError(self, record: Any) -> None:
        """Go on without the line: a full disk must not stop a server."""
        self.fault = self.fault or str(sys.exc_info()[1])
