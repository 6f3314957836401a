"""Speed of the format kernels on one thread: ``python benchmarks/bench_formats.py [SECONDS]``.

GB/s counts input bytes of codes (10^9). Rounds of all cases are interleaved, each with a memcpy of the
same bytes; the ratio survives a busy machine better than the speed.
Each case is checked against the definition before it is timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from dsv4convert.formats.block import dequantize_fp8_block
from dsv4convert.formats.fp8 import Fp8Decoder
from dsv4convert.formats.int8_shift import U8, codes_shape, repack_reference
from dsv4convert.formats.repack import Repacker, weigh

CODE_BYTES = 4 << 20
WIDTHS = (1024, 4096, 16384)
EXPERT_WIDTHS = (2048, 4096, 7168)
BLOCKS = ((128, 128), (32, 32))


@dataclass
class Case:
    """One row of the table: what runs, how many code bytes it reads, and the seconds of each round."""

    name: str
    nbytes: int
    run: Callable[[], object]
    copy: Callable[[], object]
    seconds: list[float] = field(default_factory=list)
    copy_seconds: list[float] = field(default_factory=list)


def fp8_case(k: int, block: tuple[int, int]) -> Case:
    """Gaussian weights of amax 448, scale bytes as in official releases."""
    rows = CODE_BYTES // k
    weights = torch.randn(rows, k, generator=torch.Generator().manual_seed(k)) * 112
    codes = weights.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    grid = -(-rows // block[0]), -(-k // block[1])
    scales = np.random.default_rng(k).integers(115, 118, grid, np.uint8)
    out, target = np.empty((rows, k), np.int16), np.empty_like(codes)
    decoder = Fp8Decoder(block, k)
    decoder.decode(codes, scales, out)
    expected = dequantize_fp8_block(torch.from_numpy(codes), torch.from_numpy(scales), block)
    assert out.tobytes() == expected.view(torch.int16).numpy().tobytes()
    return Case(
        f"FP8 {block[0]}x{block[1]} K={k}",
        codes.nbytes,
        lambda: decoder.decode(codes, scales, out),
        lambda: np.copyto(target, codes),
    )


def expert_rows(k: int, rounding: float) -> tuple[U8, U8]:
    """Rows like the official experts: span 1 (88%) or 2, 22% of blocks without a 4 or 6, 6.5% codes -0."""
    rng = np.random.default_rng(k)
    rows, blocks = CODE_BYTES * 2 // k // 2, k // 32
    shares = [0.13, 0.14, 0.14, 0.12, 0.14, 0.13, 0.12, 0.08]
    codes = rng.choice(8, (rows, blocks, 32), p=shares).astype(np.uint8)
    small = rng.random((rows, blocks, 1)) < 0.22
    codes = np.where(small & (codes > 5), codes - 2, codes) + 8 * rng.integers(0, 2, codes.shape, np.uint8)
    span = np.where(rng.random((rows, 1)) < 0.12, 3, 2)
    scales = 122 - rng.integers(0, span, (rows, blocks))
    scales -= np.where(rng.random(scales.shape) < rounding, rng.integers(4, 7, scales.shape), 0)
    codes = codes.reshape(rows, k)
    return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4), scales.astype(np.uint8)


def repack_cases(k: int, rounding: float) -> list[Case]:
    """The repack, and the weighing that follows it when something rounded."""
    packed, scales = expert_rows(k, rounding)
    n = len(packed)
    out = (
        np.empty(codes_shape(n, k), np.uint8),
        np.empty((n, -(-k // 128)), np.uint8),
        np.empty(n, np.float32),
    )
    target = np.empty_like(packed)
    repacker = Repacker(k)
    repacker.repack(packed, scales, *out)
    reference = repack_reference(packed[:4], scales[:4])
    assert [part[:4].tobytes() for part in out] == [part.tobytes() for part in reference]

    def copy() -> None:
        np.copyto(target, packed)

    label = f"{rounding:.1%} rounding K={k}"
    cases = [Case(f"repack {label}", packed.nbytes, lambda: repacker.repack(packed, scales, *out), copy)]
    if rounding:
        cases.append(Case(f"weigh  {label}", packed.nbytes, lambda: weigh(packed, scales), copy))
    return cases


def clock(run: Callable[[], object]) -> float:
    """Return the CPU seconds this thread spends in one call."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


def main(seconds: float) -> None:
    """Time all cases in interleaved rounds for about `seconds` and print the best of each."""
    torch.set_num_threads(1)
    cases = [fp8_case(k, block) for block in BLOCKS for k in WIDTHS]
    cases += [
        case for rounding in (0, 0.002, 0.1) for k in EXPERT_WIDTHS for case in repack_cases(k, rounding)
    ]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for case in cases:
            case.copy_seconds.append(clock(case.copy))
            case.seconds.append(clock(case.run))
    print(f"{'case':32} {'GB/s':>6} {'median':>7} {'x memcpy':>9}")
    for case in cases:
        best, median = (case.nbytes / 1e9 / s for s in (min(case.seconds), float(np.median(case.seconds))))
        print(f"{case.name:32} {best:6.2f} {median:7.2f} {min(case.seconds) / min(case.copy_seconds):9.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seconds", type=float, nargs="?", default=10.0, help="default 10")
    main(parser.parse_args().seconds)
