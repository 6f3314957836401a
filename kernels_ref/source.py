"""Where the model's weights come from."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from kernels_ref.tensors import Int8Shift


class Expert(NamedTuple):
    """The three matrices of a routed expert: numbers in any floating dtype, or INT8_SHIFT.

    Attributes:
        w1: [I, D] gate.
        w2: [D, I] down.
        w3: [I, D] up.
    """

    w1: Tensor | Int8Shift
    w2: Tensor | Int8Shift
    w3: Tensor | Int8Shift

    def values(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the numbers of w1, w2 and w3; INT8_SHIFT without the padding of K."""
        w1, w2, w3 = self
        # What pads the rows of one matrix shows in the number of rows of the other.
        inner, hidden = (len(w.channel_scale if isinstance(w, Int8Shift) else w) for w in (w1, w2))
        return _values(w1, hidden), _values(w2, inner), _values(w3, hidden)


class Source(Protocol):
    """Where weights come from, under the names of the official checkpoint."""

    def tensor(self, name: str) -> Tensor:
        """Return a tensor that is no routed expert, for instance ``layers.0.attn.wq_a.weight``.

        Block-scaled weights come as their values (bfloat16 holds them exactly), everything else as stored.
        """
        ...

    def expert(self, prefix: str, index: int) -> Expert:
        """Return a routed expert, for instance ``("layers.3", 17)`` or ``("mtp.0", 17)``."""
        ...


def _values(weight: Tensor | Int8Shift, k: int) -> Tensor:
    return weight.values(k) if isinstance(weight, Int8Shift) else weight
