"""One row of the compile gate."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """A kernel in one configuration that is shipped.

    Attributes:
        name: Key of its row, unique in the module: kernel and tile, as ``fused_moe.w13 16x128x128``.
        fn: The ``@triton.jit`` function.
        signature: Run-time argument -> type, as for `gate.compile_sm80`.
        constexprs: Compile-time argument -> value.
        divisible: Integer arguments that are multiples of 16.
        num_warps, num_stages, maxnreg: As at launch.
        mma: The matrix instructions that it must use, and no others; empty for a kernel without products.
    """

    name: str
    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    divisible: Collection[str] = ()
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None
    mma: frozenset[str] = frozenset()


#: The two matrix instructions of these kernels on SM80: integer operands, and BF16 operands.
INT8_MMA = "m16n8k32.s32.s8.s8.s32"
BF16_MMA = "m16n8k16.f32.bf16.bf16.f32"
