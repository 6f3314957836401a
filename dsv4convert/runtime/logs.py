"""The log of a server: every line to a file that rotates, no key in it, and the last lines at hand."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final

#: Size at which a file is put aside, and how many are kept beside the current one.
FILE_BYTES: Final = 64 << 20
KEPT: Final = 5
#: Lines shown when a server dies or hangs.
TAIL: Final = 30
HIDDEN: Final = "[API key]"


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
        self._key, self._echo = key, echo
        self.tail: deque[str] = deque(maxlen=TAIL)

    def write(self, line: str) -> str:
        """Take one line and return it as it was written."""
        line = line.replace(self._key, HIDDEN) if self._key else line
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
            return os.open(name, flags | os.O_CLOEXEC, 0o600)

        return open(self.baseFilename, "a", encoding="utf-8", errors="backslashreplace", opener=opener)

    def handleError(self, record: Any) -> None:
        """Go on without the line: a full disk must not stop a server."""
        self.fault = self.fault or str(sys.exc_info()[1])
