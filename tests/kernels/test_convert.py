"""The conversion kernels, interpreted, against the definitions and against what `convert` runs on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4convert.formats.block import dequantize_fp8_block
from dsv4convert.formats.codes import FP8_EXACT
from dsv4convert.formats.fp8 import Fp8Decoder
from dsv4convert.formats.int8_shift import RepackStats, repack_reference
from dsv4convert.formats.repack import Repacker
from kernels_ref import convert as reference
from tests.kernels import weights
from tests.kernels.interpreted import call


def decode(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> tuple[Tensor, int]:
    """Run the FP8 kernel into a poisoned buffer; return its bits and the NaN codes it counted."""
    from kernels_ref.sm80.convert import dequantize_fp8_block

    out = torch.full(codes.shape, 0x5A5A, dtype=torch.int16)
    nans = torch.zeros(1, dtype=torch.int32)
    dequantize_fp8_block(codes, scales, block, out=out, nan_codes=nans)
    return out, int(nans)


def repack(packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor, RepackStats]:
    """Run the repack kernel with figures into poisoned buffers."""
    from kernels_ref.sm80.convert import repack_mxfp4
    from kernels_ref.sm80.figures import RepackFigures
    from kernels_ref.tensors import Int8Shift

    n, groups = len(packed), -(-packed.shape[1] // 64)
    out = Int8Shift(
        torch.full((n, groups * 64), 0xA5, dtype=torch.uint8),
        torch.full((n, groups), 0xA5, dtype=torch.uint8),
        torch.full((n,), torch.nan),
    )
    figures = RepackFigures.empty(n, "cpu")
    repack_mxfp4(packed, scales, out=out, figures=figures)
    return *out, figures.stats(scales.numel(), row=5)


@pytest.fixture
def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_fp8_gives_every_product_of_a_code_and_a_scale(draw: torch.Generator) -> None:
    codes, scales = weights.every_fp8_product(draw)
    bits, nans = call(decode, codes, scales, (8, 32))
    expected = np.empty(codes.shape, np.int16)
    Fp8Decoder((8, 32), 512).decode(codes.numpy(), scales.numpy(), expected)
    assert bits.numpy().tobytes() == expected.tobytes()
    assert nans == 256 * 2


@pytest.mark.parametrize(("n", "k", "block"), weights.FP8_SHAPES)
def test_fp8_of_any_shape(n: int, k: int, block: tuple[int, int], draw: torch.Generator) -> None:
    codes, scales = weights.fp8((n, k), block, draw)
    bits, nans = call(decode, codes, scales, block)
    assert torch.equal(bits, dequantize_fp8_block(codes, scales, block).view(torch.int16))
    assert nans == 0


@pytest.mark.parametrize("scale", [0, 2, FP8_EXACT.low, 134, 135, FP8_EXACT.high, 247, 254, 255])
def test_fp8_on_both_sides_of_each_threshold(scale: int) -> None:
    """One block of all codes but NaN: the quick way and the careful way must meet."""
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
    codes[(codes & 0x7F) == 0x7F] = 0
    scales = torch.tensor([[scale, 120]], dtype=torch.uint8)
    bits, _ = call(decode, codes, scales, (128, 128))
    expected = np.empty(codes.shape, np.int16)
    Fp8Decoder((128, 128), 256).decode(codes.numpy(), scales.numpy(), expected)
    assert bits.numpy().tobytes() == expected.tobytes()


def test_fp8_counts_nan_codes_of_partial_words(draw: torch.Generator) -> None:
    codes, scales = weights.fp8((40, 101), (32, 32), draw)
    codes[0, 0], codes[39, 100], codes[31, 64] = 0x7F, 0xFF, 0x7F
    bits, nans = call(decode, codes, scales, (32, 32))
    assert nans == 3
    assert bits[0, 0].item() == 0x7FC0
    assert bits[39, 100].item() & 0xFFFF == 0xFFC0


@pytest.mark.parametrize(("n", "k"), weights.MXFP4_SHAPES)
def test_repack_equals_the_definition(n: int, k: int, draw: torch.Generator) -> None:
    packed, scales = weights.mxfp4(n, k, draw)
    codes, shift2, channel_scale, _ = call(repack, packed, scales)
    expected = repack_reference(packed.numpy(), scales.numpy())
    assert codes.numpy().tobytes() == expected[0].tobytes()
    assert shift2.numpy().tobytes() == expected[1].tobytes()
    assert channel_scale.numpy().tobytes() == expected[2].tobytes()


@pytest.mark.parametrize(("low", "high"), [(0, 254), (0, 6), (248, 254), (118, 121), (120, 120)])
def test_repack_figures_are_those_of_the_cpu(low: int, high: int, draw: torch.Generator) -> None:
    """Rounding, doubling, subnormal row scales; and rows in which nothing of it happens."""
    packed, scales = weights.mxfp4(24, 320, draw, low, high)
    codes, shift2, channel_scale, stats = call(repack, packed, scales)
    expected = [np.empty(t.shape, t.numpy().dtype) for t in (codes, shift2, channel_scale)]
    wanted = Repacker(320).repack(packed.numpy(), scales.numpy(), *expected, row=5)
    assert stats == wanted
    for found, right in zip((codes, shift2, channel_scale), expected, strict=True):
        assert found.numpy().tobytes() == right.tobytes()


def test_a_stack_of_matrices_is_repacked_like_each(draw: torch.Generator) -> None:
    packed, scales = weights.mxfp4(12, 160, draw)
    stacked = call(stack, packed.view(torch.int8).reshape(3, 4, 80), scales.reshape(3, 4, 5))
    single = reference.repack_mxfp4(packed, scales)
    for found, right in zip(stacked, single, strict=True):
        assert torch.equal(found, right.reshape(3, 4, *right.shape[1:]))


def stack(packed: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    """Repack into tensors that the kernel's wrapper makes."""
    from kernels_ref.sm80.convert import repack_mxfp4

    return tuple(repack_mxfp4(packed, scales))


def wrong(what: str) -> str:
    """Call a wrapper with arguments that do not fit and return what it says."""
    from kernels_ref.sm80.convert import dequantize_fp8_block, repack_mxfp4

    bytes_ = {n: torch.zeros(4, n, dtype=torch.uint8) for n in (1, 2, 64, 128)}
    calls = {
        "grid": lambda: dequantize_fp8_block(bytes_[128], bytes_[2][:1]),
        "block": lambda: dequantize_fp8_block(bytes_[128], bytes_[2][:2], (3, 64)),
        "scale": lambda: repack_mxfp4(bytes_[64], bytes_[2]),
    }
    try:
        calls[what]()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "says"),
    [("grid", "scales must be [1, 1]"), ("block", "powers of two"), ("scale", "the grid of packed [4, 64]")],
)
def test_arguments_that_do_not_fit_are_refused(what: str, says: str) -> None:
    assert says in call(wrong, what)
