"""How far a probe is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class Tick(NamedTuple):
    """Progress: a layer is done.

    Attributes:
        done, total: Layers of all passes: one over the prompt, one for each further token.
        layer: ``layers.N``; or a part of the vision tower, ``vision.blocks.N``, which runs before them.
        seconds: Time it took, in both checkpoints together if there is a reference.
    """

    done: int
    total: int
    layer: str
    seconds: float


class Ticker:
    """Runs layers in order, takes their time and reports it."""

    def __init__(self, layers: int, passes: int, progress: Callable[[Tick], None] | None) -> None:
        self._layers = layers
        self._total = layers * passes
        self._done = 0
        self._progress = progress

    def over(self, layer: Callable[[int], object]) -> list[float]:
        """Run all layers and return the seconds of each."""
        seconds = []
        for index in range(self._layers):
            started = time.perf_counter()
            layer(index)
            seconds.append(time.perf_counter() - started)
            self._done += 1
            self.report(f"layers.{index}", seconds[-1])
        return seconds

    def report(self, layer: str, seconds: float) -> None:
        """Say that a layer or a part of the vision tower took this time."""
        if self._progress:
            self._progress(Tick(self._done, self._total, layer, seconds))
