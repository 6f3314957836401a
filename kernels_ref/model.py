"""The reference model: trunk of DeepSeek-V4 on a CPU, in official names, layer by layer.

    model = Model(ModelConfig.from_dict(config), source)
    logits = model(ids)                               # a whole prompt
    state = model.state()                             # or in pieces, down to single tokens
    first, second = model(ids[:7], state), model(ids[7:], state)

`source` is an original checkpoint or a conversion in either layout. Weights are fetched where they are used
and dropped, of the routed experts only those that a token chose. To see or stop between layers, call `embed`,
`block` and `head` yourself; `__call__` does no more. Pictures come as rows that a vision tower has made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_ref import mhc
from kernels_ref.arithmetic import EXACT, Numerics, rms_norm
from kernels_ref.block import Block, BlockState
from kernels_ref.config import ModelConfig
from kernels_ref.decisions import Decisions
from kernels_ref.source import Source

# Rows of the head per step: bounds the float32 copy of a strip.
_HEAD_ROWS = 8192


@dataclass
class State:
    """What the model remembers of a sequence: the state of each layer."""

    blocks: list[BlockState]

    @property
    def position(self) -> int:
        """Tokens seen."""
        return self.blocks[-1].position


class Model:
    """The trunk.

    Args:
        config: Numbers of the model.
        source: Weights.
        numerics: What is rounded; by default nothing below float32.
        decisions: Records or prescribes chosen experts and picked entries.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: Source,
        numerics: Numerics = EXACT,
        *,
        decisions: Decisions | None = None,
    ) -> None:
        self.config = config
        self.numerics = numerics
        self.source = source
        self.blocks = [
            Block(
                config,
                source,
                numerics,
                f"layers.{layer}",
                ratio=ratio,
                hashed=layer < config.hash_layers,
                decisions=decisions,
            )
            for layer, ratio in enumerate(config.ratios)
        ]

    def state(self) -> State:
        """Return the state before the first token."""
        return State([block.state() for block in self.blocks])

    def embed(self, ids: Tensor, pictures: Tensor | None = None) -> Tensor:
        """Return the streams of tokens, [T, hc, D] in ``numerics.dtype``; all streams are equal.

        Args:
            ids: [T] int64; those from ``vocab`` on are positions of pictures.
            pictures: [P, D] rows of these positions, in order; None where there are none.

        Raises:
            ValueError: there are more or fewer rows than positions.
        """
        place = ids >= self.config.vocab
        found, wanted = 0 if pictures is None else len(pictures), int(place.sum())
        if found != wanted:
            raise ValueError(f"{wanted} positions are of pictures, and {found} rows were given for them")
        x = self.source.tensor("embed.weight")[ids.masked_fill(place, 0)].to(self.numerics.dtype)
        if pictures is not None:
            x[place] = pictures.to(x.dtype)
        return x[:, None].expand(-1, self.config.hc_mult, -1).contiguous()

    def block(self, layer: int, h: Tensor, ids: Tensor, state: State) -> Tensor:
        """Run one layer of the trunk on the next tokens, [T, hc, D] to [T, hc, D].

        Args:
            layer: 0-based.
            h: [T, hc, D] output of the layer before.
            ids: [T] int64 token ids.
            state: Changed in place.
        """
        return self.blocks[layer](h, ids, state.blocks[layer])

    def head(self, h: Tensor) -> Tensor:
        """Return logits, [T, V] float32.

        Args:
            h: [T, hc, D] output of the last layer.
        """
        fn, scale, base = (self.source.tensor(f"hc_head_{part}") for part in ("fn", "scale", "base"))
        x = mhc.collapse_head(h, fn, scale, base, self.config)
        return self.logits(rms_norm(x, self.source.tensor("norm.weight"), self.config.norm_eps))

    def logits(self, x: Tensor) -> Tensor:
        """Multiply normed outputs [T, D] by the head, [T, V] float32."""
        strips = self.source.tensor("head.weight").split(_HEAD_ROWS)
        return torch.cat([F.linear(x.float(), rows.float()) for rows in strips], -1)

    def __call__(
        self,
        ids: Tensor,
        state: State | None = None,
        *,
        pictures: Tensor | None = None,
        on_layer: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Run the model on the next tokens of a sequence.

        Args:
            ids: [T] int64, T >= 1.
            state: Of the tokens before, changed in place; None for a sequence that begins and ends here.
            pictures: See `embed`; the ids of a picture come in one call.
            on_layer: Called with each layer's number and output [T, hc, D].

        Returns:
            [T, V] float32 logits.
        """
        state = self.state() if state is None else state
        h = self.embed(ids, pictures)
        for layer in range(self.config.layers):
            h = self.block(layer, h, ids, state)
            if on_layer:
                on_layer(layer, h)
        return self.head(h)

    def generate(self, ids: Tensor, count: int) -> Tensor:
        """Return the `count` tokens that follow a prompt [T], each time the most probable one."""
        state = self.state()
        found: list[Tensor] = []
        for _ in range(count):
            found.append(self(ids, state)[-1].argmax(-1, keepdim=True))
            ids = found[-1]
        return torch.cat(found)
