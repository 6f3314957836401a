"""Random experts and routings for the tests and benchmarks of the MoE kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels_ref.tensors import Int8Shift


def random_matrices(
    experts: int, rows: int, k: int, generator: torch.Generator | None = None, device: str = "cpu"
) -> Int8Shift:
    """Return random INT8_SHIFT matrices [experts, rows, k], as a repack could have made them.

    A repack never stores code 8 (minus zero), so neither do these; scales make products of order one.
    """
    options = {"generator": generator, "device": device, "dtype": torch.uint8}
    codes = torch.randint(0, 256, (experts, rows, -(-k // 128) * 64), **options)
    for nibble in (0x0F, 0xF0):
        minus_zero = codes & nibble == 0x88 & nibble
        codes[minus_zero] &= 0xFF ^ nibble
    shift2 = torch.randint(0, 256, (experts, rows, -(-k // 128)), **options)
    # Weights of root mean square about 1 / sqrt(k): the integers' own is about 25.
    middle = round(math.log2(k**-0.5 / 25))
    exponents = torch.randint(middle - 1, middle + 2, (experts, rows), generator=generator, device=device)
    return Int8Shift(codes, shift2, torch.exp2(exponents.float()))


def random_experts(
    experts: int,
    *,
    hidden: int,
    intermediate: int,
    generator: torch.Generator | None = None,
    device: str = "cpu",
) -> tuple[Int8Shift, Int8Shift]:
    """Return w13 [experts, 2 * intermediate, hidden] and w2 [experts, hidden, intermediate]."""
    return (
        random_matrices(experts, 2 * intermediate, hidden, generator, device),
        random_matrices(experts, hidden, intermediate, generator, device),
    )


def random_routing(tokens: int, k: int, experts: int, *, skipped: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return topk_weights [tokens, k] float32 and topk_ids [tokens, k] int32, distinct within a token.

    Args:
        tokens, k, experts: Sizes.
        skipped: Share of entries that become -1.
    """
    ids = torch.rand(tokens, experts).argsort(1)[:, :k].to(torch.int32).contiguous()
    ids[torch.rand(tokens, k) < skipped] = -1
    return torch.rand(tokens, k), ids


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return ``|found - expected| / |expected|`` in the Frobenius norm; NaN when anything is."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
