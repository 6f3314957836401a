"""Lower SGLang's kernels for hyper-connections with the real TileLang, and print the CUDA C++ they become.

    python lower_mhc.py sm_80

Prints one JSON object: kernel -> its code, or its error. TileLang hands the code to nvcc; here it is taken
away before, so that no CUDA is needed. Run with TileLang on PYTHONPATH: the environment of the other tests
does not hold it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

#: DeepSeek-V4-Flash: width, streams, coefficients of the streams, rows of a call, epsilons, Sinkhorn steps.
HIDDEN, STREAMS, MIXES, TOKENS, EPS, STEPS = 4096, 4, 24, 8, 1e-6, 20


class _Taken(Exception):
    """The code has reached nvcc."""


def main(arch: str) -> None:
    """Lower every kernel for an architecture such as ``sm_80``."""
    os.environ["TILELANG_TARGET"] = json.dumps({"kind": "cuda", "arch": arch})
    import sglang.kernels.ops.layernorm.mhc as mhc
    import tvm_ffi

    # SM80 has no programmatic dependent launch; without a card SGLang does not ask.
    mhc.is_arch_support_pdl = lambda: False
    mhc._load_tilelang()
    taken: list[str] = []

    def take(code: str, target: Any, pass_config: Any = None) -> None:
        taken.append(code)
        raise _Taken

    tvm_ffi.register_global_func("tilelang_callback_cuda_compile", take, override=True)
    told = {}
    for name, kernel in _kernels(mhc).items():
        taken.clear()
        try:
            kernel()
        except Exception as error:
            told[name] = {"code": taken[0]} if taken else {"error": str(error).strip().splitlines()[-1]}
    print(json.dumps(told))


def _kernels(mhc: Any) -> Mapping[str, Callable[[], Any]]:
    """Return the kernels of a layer as SGLang 0.5.16 calls them without DeepGEMM."""
    import torch

    def bf16(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    wide, n, x, f32 = STREAMS * HIDDEN, TOKENS, bf16(TOKENS, STREAMS, HIDDEN), torch.zeros
    mix: Final = (f32(3), f32(MIXES), x, f32(n, STREAMS), f32(n, STREAMS**2), bf16(n, HIDDEN))
    sizes: Final = (HIDDEN, EPS, EPS, EPS, 2.0, STEPS)
    split = mhc.mhc_pre_gemm_sqrsum_splitk_kernel
    return {
        # Up to 2,048 rows, and beyond.
        "split": lambda: split(MIXES, wide, split_k=32)[0](
            x.view(n, wide), f32(MIXES, wide), f32(32, n, 32), f32(32, n)
        ),
        "product": lambda: mhc.mhc_pre_gemm_sqrsum_tilelang(
            x.view(n, wide), f32(MIXES, wide), f32(n, MIXES), f32(n), MIXES, wide
        ),
        "mix": lambda: mhc.mhc_pre_big_fuse_tilelang(
            f32(1, n, MIXES), f32(1, n), *mix, *sizes, 1, STREAMS, MIXES
        ),
        "mix_and_norm": lambda: mhc.mhc_pre_big_fuse_with_norm_tilelang(
            f32(1, n, MIXES), f32(1, n), *mix, bf16(HIDDEN), *sizes, EPS, 1, STREAMS, MIXES
        ),
        "post": lambda: mhc.mhc_post_tilelang(
            f32(n, STREAMS, STREAMS), x, f32(n, STREAMS), bf16(n, HIDDEN), x, STREAMS, HIDDEN
        ),
        "sinkhorn": lambda: mhc.hc_split_sinkhorn_kernel(STREAMS, STEPS, EPS),
    }


if __name__ == "__main__":
    main(sys.argv[1])
