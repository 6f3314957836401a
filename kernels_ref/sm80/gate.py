"""Compile Triton kernels for SM80 without a GPU, say what they need, and run that code on newer cards.

`compile_sm80` gives PTX, machine code and the resources ptxas counts. `sm80_code` lets a card of any later
architecture run the same PTX: Triton's own launcher hands it to the driver, which translates it as it would
on a machine that received only SM80 code. Nothing of the card's own instruction set gets in.

Source: PTX ISA 8.7; Triton 3.6 ``CUDABackend`` (stages, ``knobs.runtime.add_stages_inspection_hook``).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 80, 32)
#: Bytes of shared memory a block may use on compute capability 8.0 (CUDA programming guide, table of limits).
SHARED_LIMIT = 163 * 1024

_MMA = re.compile(r"\bmma\.sync\.aligned\.(m\d+n\d+k\d+)\.row\.col(?:\.satfinite)?\.((?:\w+\.){3}\w+)")
_USAGE = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_STATIC = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel compiled for SM80.

    Attributes:
        name: Entry point.
        ptx: PTX text, ``.target sm_80``.
        cubin: SM80 machine code; loads on compute capability 8.x only.
        num_warps: Warps of a block.
        registers: 32-bit registers of a thread.
        spills: Bytes of spill stores and loads of a thread, and of its stack frame.
        shared: Bytes of shared memory of a block, static and dynamic.
        mma: Shapes and types of the matrix instructions, as ``m16n8k32.s32.s8.s8.s32``.
        cp_async: Number of asynchronous copies from global to shared memory in the PTX.
        ldmatrix: Number of ``ldmatrix`` instructions in the PTX.
    """

    name: str
    ptx: str
    cubin: bytes
    num_warps: int
    registers: int
    spills: int
    shared: int
    mma: frozenset[str]
    cp_async: int
    ldmatrix: int


def compile_sm80(
    fn: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    *,
    divisible: Collection[str] = (),
    num_warps: int = 4,
    num_stages: int = 3,
    maxnreg: int | None = None,
) -> Compiled:
    """Compile one kernel for SM80; about a second, no GPU.

    Args:
        fn: A ``@triton.jit`` function, not decorated under ``TRITON_INTERPRET``.
        signature: Run-time argument -> type: ``*bf16``, ``*u8``, ``*i8``, ``*fp32``, ``*i32``, ``i32``,
            ``i64``, ``fp32`` ... A pointer counts as aligned to 16 bytes, as torch allocates.
        constexprs: Compile-time argument -> value. The launcher also turns every integer that is 1 into one.
        divisible: Integer arguments that are multiples of 16. The launcher finds that out from the values;
            here it must be said, or copies fall to single elements.
        num_warps, num_stages, maxnreg: As at launch.

    Returns:
        Code and resources.

    Raises:
        ValueError: an argument has no type or is named twice, or a name is not an argument.
    """
    names = list(fn.arg_names)
    unknown = (set(signature) | set(constexprs) | set(divisible)) - set(names)
    if unknown or set(signature) & set(constexprs) or set(signature) | set(constexprs) != set(names):
        raise ValueError(
            f"{fn.__name__} takes {names}: each needs a type or a compile-time value and nothing else, got "
            f"types of {sorted(signature)}, values of {sorted(constexprs)}, divisible {sorted(divisible)}"
        )
    types = {name: signature.get(name, "constexpr") for name in names}
    aligned = [i for i, name in enumerate(names) if types[name].startswith("*") or name in divisible]
    source = ASTSource(
        fn=fn,
        signature=types,
        constexprs=dict(constexprs),
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
    with sm80_code():
        kernel = triton.compile(source, target=TARGET, options=options)
    ptx = kernel.asm["ptx"]
    cubin, log = _assemble(ptx)
    static = _STATIC.search(log)
    return Compiled(
        name=kernel.metadata.name,
        ptx=ptx,
        cubin=cubin,
        num_warps=kernel.metadata.num_warps,
        registers=int(_found(_USAGE, log).group(1)),
        spills=sum(map(int, _found(_SPILLS, log).groups())),
        shared=kernel.metadata.shared + (int(static.group(1)) if static else 0),
        mma=frozenset(f"{shape}.{types}" for shape, types in _MMA.findall(ptx)),
        cp_async=len(re.findall(r"\bcp\.async\.c[ag]\.", ptx)),
        ldmatrix=len(re.findall(r"\bldmatrix\.", ptx)),
    )


def require_card() -> None:
    """End the program with one sentence where no card can run SM80 code."""
    if not torch.cuda.is_available():
        found = f"none with torch {torch.__version__}"
    elif (capability := torch.cuda.get_device_capability()) < (8, 0):
        found = f"{torch.cuda.get_device_name()} of {capability[0]}.{capability[1]}"
    else:
        return
    sys.exit(f"error: expected a CUDA device of compute capability 8.0 or newer; found {found}")


def _assemble(ptx: str) -> tuple[bytes, str]:
    """Return the machine code of PTX and what ptxas says about its resources."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx, encoding="utf-8")
        command = [knobs.nvidia.ptxas.path, "-v", "-lineinfo", "--gpu-name=sm_80", source, "-o", target]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"ptxas refused the PTX: {done.stderr.strip()}")
        return target.read_bytes(), done.stdout + done.stderr


def _found(pattern: re.Pattern[str], log: str) -> re.Match[str]:
    match = pattern.search(log)
    if match is None:
        raise RuntimeError(f"ptxas says nothing that matches {pattern.pattern!r}: {log.strip()}")
    return match


@contextmanager
def sm80_code() -> Iterator[None]:
    """Let every kernel that is launched inside run SM80 code, whatever the card.

    Kernels launched before keep their native code for launches outside. The launcher and its arguments,
    streams, graphs are Triton's own; only the binary is replaced by PTX for SM80, which the driver
    translates. On a card of compute capability 8.0 the code is the same, translated by the driver instead of
    by ptxas.
    """

    def stages_of_sm80(backend: Any, stages: dict[str, Any], options: Any, language: Any, _: Any) -> None:
        with knobs.runtime.scope():
            knobs.runtime.add_stages_inspection_hook = None
            CUDABackend(TARGET).add_stages(stages, options, language)
        # cuModuleLoadData takes machine code or a zero-terminated PTX text.
        stages["cubin"] = lambda ptx, metadata: ptx.encode() + b"\0"

    with knobs.runtime.scope(), knobs.compilation.scope():
        knobs.runtime.override_arch = "sm80"
        knobs.runtime.add_stages_inspection_hook = stages_of_sm80
        # A name no pass knows: it changes nothing but the keys of Triton's caches, in memory and on disk, so
        # that native code and this code of one kernel are kept apart.
        knobs.compilation.instrumentation_mode = "sm80-ptx"
        yield
