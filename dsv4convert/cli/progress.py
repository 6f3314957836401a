"""Progress for people: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

_EVERY_SECONDS: Final = 10.0


class Progress(Protocol):
    """Takes numbers of bytes as they are done."""

    def __call__(self, count: int) -> None: ...


@contextmanager
def progress(label: str, total: int, *, quiet: bool) -> Iterator[Progress]:
    """Show the progress of work that is counted in bytes.

    Args:
        label: What is done.
        total: Bytes in all; 0 when that is not known.
        quiet: Show nothing.
    """
    if quiet:
        yield _nothing
    elif sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(
            total=total or None, desc=label, unit="B", unit_scale=True, delay=1, dynamic_ncols=True
        ) as bar:
            yield lambda count: _advance(bar, count)
    else:
        yield _Lines(label, total)


class LazyProgress:
    """A progress display whose total becomes known only when the plan is made."""

    def __init__(self, label: str, quiet: bool) -> None:
        self._label, self._quiet = label, quiet
        self._manager: Any = None
        self._bar: Callable[[int], None] | None = None

    def begin(self, total: int) -> None:
        """Show the display."""
        self._manager = progress(self._label, total, quiet=self._quiet)
        self._bar = self._manager.__enter__()

    def __call__(self, count: int) -> None:
        if self._bar:
            self._bar(count)

    def __enter__(self) -> LazyProgress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._manager:
            self._manager.__exit__(*error)


def _nothing(count: int) -> None:
    return


def _advance(bar: object, count: int) -> None:
    bar.update(count)  # type: ignore[attr-defined]


class _Lines:
    def __init__(self, label: str, total: int) -> None:
        self._label, self._total = label, total
        self._done, self._start = 0, time.monotonic()
        self._next = self._start + _EVERY_SECONDS

    def __call__(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY_SECONDS
        rate = self._done / (now - self._start)
        text = f"{self._label}: {gigabytes(self._done)}, {rate / 1e9:.2f} GB/s"
        if self._total:
            share, left = 100 * self._done / self._total, (self._total - self._done) / rate
            text = f"{text}, {share:.0f} % of {gigabytes(self._total)}, {duration(left)} left"
        print(text, file=sys.stderr, flush=True)


def gigabytes(count: int) -> str:
    """Return a number of bytes for people."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def gib(count: int) -> str:
    """Return a number of bytes in GiB."""
    return f"{count / 2**30:.2f} GiB"


def duration(seconds: float) -> str:
    """Return a time for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
