"""Holes in tensors: whole pages of a file that hold one repeated pattern, or repeat the page before.

A downloader that reserves the space of a file before it fills it leaves zeros where it was stopped, and file
systems lose whole pages. Weights never look like that, so a page is judged by itself, at the places of the
file, not of the tensor.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

PAGE: Final = 4096
_WORDS: Final = PAGE // 8


class Holes:
    """Looks for pages without content in one tensor, strip by strip.

    Attributes:
        pages: How many were met.
        first: Offset in the tensor of the first one, -1 for none.
        last_end: Offset after the last one.

    Args:
        start: Offset in the file of the tensor's first byte.
        only_zero: Count pages of zero bytes only; scales may be alike for whole pages.
    """

    def __init__(self, start: int, *, only_zero: bool = False) -> None:
        self.pages, self.first, self.last_end = 0, -1, 0
        self._start, self._only_zero = start, only_zero
        self._rest: Bytes = np.empty(0, np.uint8)
        self._before: NDArray[Any] | None = None

    def look(self, piece: Bytes, offset: int) -> None:
        """Look at a flat strip that lies at `offset` in the tensor; strips come in order, without gaps."""
        begin = offset - len(self._rest)
        if len(self._rest):
            # A page that two strips share is put together before the rest is looked at in place.
            missing = min(PAGE - len(self._rest), len(piece))
            page = np.concatenate([self._rest, piece[:missing]])
            if len(page) < PAGE:
                self._rest = page
                return
            self._judge(page, begin)
            begin, piece = begin + PAGE, piece[missing:]
        elif skip := -(self._start + offset) % PAGE:
            begin, piece = begin + skip, piece[skip:]
        whole = len(piece) // PAGE * PAGE
        if whole:
            self._judge(piece[:whole], begin)
        self._rest = piece[whole:].copy()

    def _judge(self, data: Bytes, offset: int) -> None:
        pages = data.view(np.uint64).reshape(-1, _WORDS)
        empty = _same(pages, pages[:, :1])
        if self._only_zero:
            empty &= pages[:, 0] == 0
        else:
            empty[1:] |= _same(pages[1:], pages[:-1])
            if self._before is not None:
                empty[:1] |= _same(pages[:1], self._before)
            self._before = pages[-1:].copy()
        hits = np.flatnonzero(empty)
        if len(hits):
            self.first = offset + int(hits[0]) * PAGE if self.first < 0 else self.first
            self.last_end = offset + (int(hits[-1]) + 1) * PAGE
            self.pages += len(hits)


def _same(pages: NDArray[Any], others: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which rows of `pages` equal those of `others`, which may have a single column."""
    # Two words decide for nearly every page of weights; the whole page is compared only after that.
    result: NDArray[np.bool_] = (pages[:, 1] == others[:, min(1, others.shape[1] - 1)]) & (
        pages[:, -1] == others[:, -1]
    )
    for row in np.flatnonzero(result):
        result[row] = bool((pages[row] == others[row]).all())
    return result
