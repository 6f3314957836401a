"""How the model computes: which steps round and to what, and the operations that depend on it.

The switches of `Numerics` are independent, so the loss of each step of the official model, and of the SM80
runtime, can be measured alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_ref.quantize import fake_e4m3, per_token_int8


@dataclass(frozen=True, slots=True)
class Numerics:
    """What is rounded, and to what.

    Attributes:
        dtype: dtype of every tensor between two operations; inside, operations compute in float32. The
            streams' coefficients, the compressor's projections, the router and the logits are float32 always.
        linear: ``e4m3``: inputs of the linear layers that are FP8 in the official checkpoint, and of the
            routed experts, are rounded per 128 values with a power-of-two scale. `wo_a` is none of them.
        kv: ``e4m3``: latents and compressed entries are rounded per 64 values, rotated dims excepted.
        index: Queries and keys of the indexer: ``e2m1`` per 32 after a Hadamard rotation, or ``int8`` per
            row after the same rotation.
        experts: ``float``: weights as numbers, route weight before the last projection. ``int8``: inputs of
            both projections in INT8 per token, products exact, route weight in the final sum.
    """

    dtype: torch.dtype = torch.float32
    linear: Literal["none", "e4m3"] = "none"
    kv: Literal["none", "e4m3"] = "none"
    index: Literal["none", "e2m1", "int8"] = "none"
    experts: Literal["float", "int8"] = "float"


#: The function that the checkpoint's weights define: nothing is rounded below float32.
EXACT = Numerics()
#: The same in BF16: what every runtime loses at least.
BF16 = Numerics(torch.bfloat16)
#: DeepSeek's own inference code.
OFFICIAL = Numerics(torch.bfloat16, linear="e4m3", kv="e4m3", index="e2m1")
#: The SM80 runtime while experts compute in INT8; in its BF16 mode the experts are those of `BF16`.
SM80 = Numerics(torch.bfloat16, index="int8", experts="int8")


def linear(x: Tensor, weight: Tensor, numerics: Numerics, *, fp8: bool = True) -> Tensor:
    """Multiply by a dense weight, ``x @ weight.T``.

    Args:
        x: [..., K].
        weight: [N, K], any floating dtype.
        numerics: Decides about the rounding of `x` and of the result.
        fp8: Whether the official checkpoint stores this weight in FP8 (or FP4), so that the official model
            rounds its input too.

    Returns:
        [..., N] in ``numerics.dtype``; products are summed in float32 and rounded once.
    """
    if fp8 and numerics.linear == "e4m3":
        x = fake_e4m3(x)
    return F.linear(x.float(), weight.float()).to(numerics.dtype)


def int8_linear(x: Tensor, weight: Tensor, numerics: Numerics) -> Tensor:
    """Multiply with inputs in INT8 per token.

    With weights of INT8_SHIFT the sum is that of an INT8 product, which is exact, times a power of two;
    float64 holds it exactly, so numbers serve as well as codes do.

    Args:
        x: [n, K].
        weight: [N, K], any floating dtype.
        numerics: Gives the dtype of the result.

    Returns:
        [n, N] in ``numerics.dtype``.
    """
    codes, scale = per_token_int8(x)
    return (codes.double() @ weight.double().T * scale[:, None].double()).to(numerics.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return ``x * rsqrt(mean(x^2) + eps) * weight`` over the last dim.

    Args:
        x: [..., K] bfloat16 or float32.
        weight: [K] any floating dtype; None for a norm without weight.
        eps: Added to the mean of squares.

    Returns:
        [..., K] in the dtype of `x`; computed in float32, rounded once.
    """
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else weight.float() * y).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Return ``silu(min(gate, limit)) * clamp(up, -limit, limit)``.

    Args:
        gate, up: [..., I] bfloat16 or float32, outputs of ``w1`` and ``w3``.
        limit: ``swiglu_limit``.

    Returns:
        [..., I] float32.
    """
    return F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
