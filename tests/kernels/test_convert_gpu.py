"""The conversion kernels on a card, in its native code and in SM80 code, bit for bit against the CPU."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch

from dsv4convert.formats.block import dequantize_fp8_block
from dsv4convert.formats.fp8 import Fp8Decoder, Fp8Stats
from dsv4convert.formats.int8_shift import RepackStats
from dsv4convert.formats.repack import Repacker
from kernels_ref import convert as reference
from kernels_ref.sm80 import convert
from kernels_ref.sm80.figures import RepackFigures
from kernels_ref.sm80.strips import StripDecoder
from kernels_ref.tensors import Int8Shift
from tests.kernels import weights

pytestmark = pytest.mark.gpu


@pytest.fixture
def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def poisoned(rows: int, k: int) -> Int8Shift:
    groups = -(-k // 128)
    return Int8Shift(
        torch.full((rows, groups * 64), 0xA5, dtype=torch.uint8, device="cuda"),
        torch.full((rows, groups), 0xA5, dtype=torch.uint8, device="cuda"),
        torch.full((rows,), torch.nan, device="cuda"),
    )


def test_fp8_gives_every_product_of_a_code_and_a_scale(code: str, draw: torch.Generator) -> None:
    codes, scales = weights.every_fp8_product(draw)
    out = torch.full(codes.shape, 0x5A5A, dtype=torch.int16, device="cuda")
    nans = torch.zeros(1, dtype=torch.int32, device="cuda")
    convert.dequantize_fp8_block(codes.cuda(), scales.cuda(), (8, 32), out=out, nan_codes=nans)
    expected = np.empty(codes.shape, np.int16)
    Fp8Decoder((8, 32), 512).decode(codes.numpy(), scales.numpy(), expected)
    assert out.cpu().numpy().tobytes() == expected.tobytes()
    assert nans.item() == 512


@pytest.mark.parametrize(
    ("n", "k", "block"),
    [
        *weights.FP8_SHAPES,
        (512, 4096, (128, 128)),
        (96, 7168, (32, 32)),
        # More tiles of rows than the second axis of a grid could have.
        (70_000, 32, (1, 32)),
    ],
)
def test_fp8_of_any_shape(code: str, n: int, k: int, block: tuple[int, int], draw: torch.Generator) -> None:
    codes, scales = weights.fp8((n, k), block, draw)
    out = torch.full(codes.shape, torch.nan, dtype=torch.bfloat16, device="cuda")
    convert.dequantize_fp8_block(codes.cuda(), scales.cuda(), block, out=out)
    assert torch.equal(
        out.cpu().view(torch.int16), dequantize_fp8_block(codes, scales, block).view(torch.int16)
    )


@pytest.mark.parametrize(
    ("n", "k", "low", "high"),
    [
        *((n, k, 110, 124) for n, k in weights.MXFP4_SHAPES),
        (300, 4096, 118, 121),
        (100, 7168, 110, 124),
        (64, 2048, 0, 254),
        (64, 512, 0, 6),
    ],
)
def test_repack_and_its_figures(
    code: str, n: int, k: int, low: int, high: int, draw: torch.Generator
) -> None:
    packed, scales = weights.mxfp4(n, k, draw, low, high)
    out, figures = poisoned(n, k), RepackFigures.empty(n, "cuda")
    convert.repack_mxfp4(packed.cuda(), scales.cuda(), out=out, figures=figures)
    expected = [np.empty(t.shape, t.cpu().numpy().dtype) for t in out]
    wanted = Repacker(k).repack(packed.numpy(), scales.numpy(), *expected, row=5)
    for found, right in zip(out, expected, strict=True):
        assert found.cpu().numpy().tobytes() == right.tobytes()
    assert RepackFigures(*(t.cpu() for t in figures)).stats(scales.numel(), row=5) == wanted


def test_a_captured_graph_converts_what_its_inputs_hold_at_replay(code: str, draw: torch.Generator) -> None:
    packed, scales = (t.cuda() for t in weights.mxfp4(64, 1024, draw))
    codes, grid = (t.cuda() for t in weights.fp8((128, 512), (128, 128), draw))
    out, bits = poisoned(64, 1024), torch.empty(128, 512, dtype=torch.bfloat16, device="cuda")

    def both() -> None:
        convert.repack_mxfp4(packed, scales, out=out)
        convert.dequantize_fp8_block(codes, grid, out=bits)

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    for tensor, fresh in zip((packed, scales), weights.mxfp4(64, 1024, draw), strict=True):
        tensor.copy_(fresh)
    for tensor, fresh in zip((codes, grid), weights.fp8((128, 512), (128, 128), draw), strict=True):
        tensor.copy_(fresh)
    for tensor in (*out, bits):
        tensor.view(torch.uint8).fill_(0xA5)
    graph.replay()
    for found, right in zip(out, reference.repack_mxfp4(packed, scales), strict=True):
        assert torch.equal(found, right)
    assert torch.equal(bits.cpu(), dequantize_fp8_block(codes.cpu(), grid.cpu()))


def test_many_strips_in_flight_land_as_on_the_cpu(code: str, draw: torch.Generator) -> None:
    """Strips of several shapes and both formats through one decoder, each lane reused often."""
    decoder, cpu_fp8, cpu_repack = StripDecoder("cuda"), Fp8Decoder((32, 32), 2048), Repacker(2048)
    flight: deque = deque()

    def land(left: int) -> None:
        while len(flight) > left:
            wait, found, right, stats = flight.popleft()
            assert wait() == stats
            for a, b in zip(found, right, strict=True):
                assert a.tobytes() == b.tobytes()

    for turn in range(24):
        n = 32 * (1 + turn % 5)
        if turn % 3:
            packed, scales = (t.numpy() for t in weights.mxfp4(n, 2048, draw, 112, 122))
            staged = decoder.staging(packed.size).reshape(packed.shape)
            staged[:] = packed
            memory = np.frombuffer(decoder.allocate(n * 1024), np.uint8).reshape(n, 1024)
            found = memory, np.empty((n, 16), np.uint8), np.empty(n, np.float32)
            right = tuple(np.empty_like(a) for a in found)
            stats: RepackStats | Fp8Stats = cpu_repack.repack(packed, scales, *right, row=turn)
            flight.append((decoder.mxfp4(staged, scales, *found, turn), found, right, stats))
        else:
            codes, scales = (t.numpy() for t in weights.fp8((n, 2048), (32, 32), draw))
            if turn % 2:
                codes[n - 1, 9] = 0xFF
            staged = decoder.staging(codes.size).reshape(codes.shape)
            staged[:] = codes
            bits = np.frombuffer(decoder.allocate(n * 4096), np.int16).reshape(n, 2048)
            right = (np.empty((n, 2048), np.int16),)
            stats = cpu_fp8.decode(codes, scales, right[0], row=32 * turn)
            flight.append((decoder.fp8((32, 32), staged, scales, bits, 32 * turn), (bits,), right, stats))
        land(decoder.depth)
    land(0)
