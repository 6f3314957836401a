"""With this directory on PYTHONPATH a newer card runs the code that an A100 would: for validation only.

Triton, TileLang and nvcc generate for SM80, and the driver translates their PTX: Triton's kernels, ours and
SGLang's, by `kernels_ref.sm80.gate`; TileLang's (hyper-connections), and the CUDA that SGLang compiles when
it is first used, as PTX in a fatbin. None of it launches dependently, which SM80 lacks. What runs natively
all the same: `sgl_kernel`, whose wheel holds machine code only, and the libraries of torch.

It is also how TileLang 0.1.11 gets past SM90: there its pass for warp specialization fails on one of SGLang's
kernels (`Cannot find role for stmt`), which upstream DeepGEMM replaces.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_PTX = ["-gencode", "arch=compute_80,code=compute_80"]
#: Holds what must not be dropped while the process runs.
_HELD: list[Any] = []


def _triton(_: ModuleType) -> None:
    from kernels_ref.sm80.gate import sm80_code

    context = sm80_code()
    context.__enter__()
    _HELD.append(context)


def _nvcc(module: ModuleType) -> None:
    stock = module.compile_cuda

    def compile_cuda(
        code: str, target_format: str = "ptx", arch: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        return stock(code, "fatbin", _PTX, *args, **kwargs)

    module.compile_cuda = compile_cuda  # type: ignore[attr-defined]


def _arch(module: ModuleType) -> None:
    # What SGLang asks the card for once; dependent launch and branches in its CUDA follow from it.
    module._init_jit_cuda_arch_once = lambda: None  # type: ignore[attr-defined]
    module._CUDA_ARCH = module.ArchInfo(8, 0, "")  # type: ignore[attr-defined]


def _target(module: ModuleType) -> None:
    # TVM-FFI would ask nvcc for machine code, which a newer card does not run.
    module._get_cuda_target = lambda: " ".join(_PTX)  # type: ignore[attr-defined]


#: Module -> what is done when it has been imported.
_AFTER: Mapping[str, Callable[[ModuleType], None]] = {
    "sglang.srt.model_executor.model_runner": _triton,
    "sglang.jit_kernel.utils.arch": _arch,
    "tilelang.contrib.nvcc": _nvcc,
    "tvm_ffi.cpp.extension": _target,
}


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _AFTER else None
        if spec is not None and spec.loader is not None:
            stock = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                stock(module)
                _AFTER[name](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


os.environ["TILELANG_TARGET"] = '{"kind": "cuda", "arch": "sm_80"}'
sys.meta_path.insert(0, _Finder())
