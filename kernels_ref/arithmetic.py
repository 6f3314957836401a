"""How the model computes: which steps round and to what, and the operations that depend on it.

The switches of `Numerics` are independent, so the loss of each step of the official model, and of the SM80
runtime, can be measured alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_ref.moe import DIGIT_WEIGHTS, quantize_activations
from kernels_ref.quantize import fake_e4m3


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
        experts: ``float``: weights as numbers, route weight before the last projection. ``w4a8`` and
            ``w4a16``: inputs of both projections in one or two INT8 digits per token, products exact, route
            weight in the final sum, as `moe.fused_moe` has it.
    """

    dtype: torch.dtype = torch.float32
    linear: Literal["none", "e4m3"] = "none"
    kv: Literal["none", "e4m3"] = "none"
    index: Literal["none", "e2m1", "int8"] = "none"
    experts: Literal["float", "w4a8", "w4a16"] = "float"


#: The function that the checkpoint's weights define: nothing is rounded below float32.
EXACT = Numerics()
#: The same in BF16: what every runtime loses at least.
BF16 = Numerics(torch.bfloat16)
#: DeepSeek's own inference code.
OFFICIAL = Numerics(torch.bfloat16, linear="e4m3", kv="e4m3", index="e2m1")
#: The SM80 runtime with one INT8 digit per activation of the experts, for many tokens at a time.
SM80 = Numerics(torch.bfloat16, index="int8", experts="w4a8")
#: The same with two digits, for few tokens at a time.
SM80_W4A16 = replace(SM80, experts="w4a16")


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


def digit_linear(x: Tensor, weight: Tensor, digits: int) -> Tensor:
    """Multiply by an INT8_SHIFT matrix with inputs in INT8 digits, ``x @ weight.T``.

    The sum is that of integers, times the row's power of two. float64 holds both, so the numbers that the
    codes stand for serve as well as the codes do; the bits are those of `moe.grouped_gemm`.

    Args:
        x: [n, K].
        weight: [N, K], any floating dtype; values of INT8_SHIFT.
        digits: 1 or 2 INT8 digits per input, with one scale per row.

    Returns:
        [n, N] float32.
    """
    codes, scale = quantize_activations(x, digits)
    weights = torch.tensor(DIGIT_WEIGHTS[digits], dtype=torch.float64)
    integers = (codes.double() * weights[:, None]).sum(1)
    return (integers @ weight.double().T).float() * scale[:, None]


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
