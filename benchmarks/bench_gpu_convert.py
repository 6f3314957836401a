"""Rows of the conversion kernels: FP8 to BF16 and the repack, of official blocks and widths.

Bytes are input plus output. Each result is compared with the CPU's bits before it is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu import Context, Row, time_calls
from dsv4convert.formats.fp8 import Fp8Decoder
from kernels_ref import convert as reference
from kernels_ref.sm80 import convert
from kernels_ref.sm80.figures import RepackFigures
from kernels_ref.tensors import Int8Shift

#: Codes of one input, and inputs in turn: many times any L2 cache.
CODES, INPUTS = 1 << 28, 4
#: Rows that are compared.
ROWS = 256


def rows(context: Context) -> Iterator[Row]:
    """Yield the rows."""
    blocks = [((128, 128), 4096), ((32, 32), 4096)]
    widths = [(4096, 3), (2048, 3)]
    if not context.quick:
        blocks += [((1, 32), 2048), ((128, 128), 7168)]
        widths += [(7168, 3), (4096, 8)]
    for block, k in blocks:
        yield _fp8(block, k)
    for k, span in widths:
        yield from _repack(k, span)


def _fp8(block: tuple[int, int], k: int) -> Row:
    n = CODES // k // 128 * 128
    grid = n // block[0], k // block[1]
    inputs = []
    for _ in range(INPUTS):
        codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, device="cuda")
        codes[(codes & 0x7F) == 0x7F] = 0
        inputs.append((codes, torch.randint(110, 125, grid, dtype=torch.uint8, device="cuda")))
    codes, scales = inputs[0]
    out = torch.full((n, k), torch.nan, dtype=torch.bfloat16, device="cuda")
    convert.dequantize_fp8_block(codes, scales, block, out=out)
    expected = np.empty((ROWS, k), np.int16)
    some = codes[:ROWS].cpu().numpy(), scales[: ROWS // block[0]].cpu().numpy()
    Fp8Decoder(block, k).decode(*some, expected)
    _require(np.array_equal(out[:ROWS].view(torch.int16).cpu().numpy(), expected), f"FP8 {block}")
    _require(not out.isnan().any(), f"FP8 {block}: some output was not written")
    calls = [partial(convert.dequantize_fp8_block, c, s, block, out=out) for c, s in inputs]
    us, spread = time_calls(calls)
    nbytes = codes.nbytes + scales.nbytes + out.nbytes
    return Row("FP8 to BF16", f"{block[0]}x{block[1]}, K={k}", "ours", us, spread, nbytes, error=0.0)


def _repack(k: int, span: int) -> Iterator[Row]:
    n = CODES // k
    inputs = []
    for _ in range(INPUTS):
        packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        inputs.append(
            (packed, torch.randint(122 - span, 123, (n, k // 32), dtype=torch.uint8, device="cuda"))
        )
    packed, scale = inputs[0]
    out = convert.repack_mxfp4(packed, scale)
    for tensor in out:
        tensor.view(torch.uint8).fill_(0xA5)
    convert.repack_mxfp4(packed, scale, out=out)
    for part in (slice(0, ROWS), slice(n - ROWS, n)):
        expected = reference.repack_mxfp4(packed[part], scale[part])
        for found, right in zip(out, expected, strict=True):
            _require(torch.equal(found[part], right), f"repack K={k}")
    nbytes = packed.nbytes + scale.nbytes + sum(tensor.nbytes for tensor in out)
    group, case = "MXFP4 to INT8_SHIFT", f"K={k}, scale bytes span {span}" + (", rounds" if span > 3 else "")
    us, spread = time_calls([partial(convert.repack_mxfp4, p, s, out=out) for p, s in inputs])
    yield Row(group, case, "ours", us, spread, nbytes, error=0.0)
    us, spread = time_calls([partial(_with_figures, p, s, out) for p, s in inputs])
    yield Row(group, case, "ours, with figures", us, spread, nbytes, error=0.0)


def _with_figures(packed: Tensor, scale: Tensor, out: Int8Shift) -> None:
    convert.repack_mxfp4(packed, scale, out=out, figures=RepackFigures.empty(len(packed), packed.device))


def _require(right: object, what: str) -> None:
    """Refuse to time a kernel whose result is wrong."""
    if not right:
        raise SystemExit(f"error: {what}: the result is not that of the reference, so it is not timed")
