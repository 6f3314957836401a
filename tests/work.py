"""Work for worker processes in tests. Imports nothing heavy, because every process starts with it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


def double(task: int, emit: Callable[[int], None]) -> int:
    """Report and answer."""
    emit(task)
    return 2 * task


def misbehave(task: str, emit: Callable[[int], None]) -> str:
    """Fail in the way it is told."""
    if task == "exit":
        os._exit(7)
    if task == "raise":
        raise ValueError("as told")
    if task == "sleep":
        time.sleep(120)
    return task
