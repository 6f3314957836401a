"""The public peer of the MoE: `fused_marlin_moe` of the SGLang 0.5.16 wheel, without the rest of SGLang.

Its Python files run unchanged over stubs that stand for the packages around them; the three shared objects
are those of `build_marlin.py`. What a call does: zeroing of a lock array, routing alignment, zeroing of the
intermediate, W13, limited SwiGLU in eager torch, W2 with the router weight, and a sum.
"""

from __future__ import annotations

import functools
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# E2M1 in SGLang's scalar types: 2 exponent bits, 1 mantissa bit, signed, bias 0, finite only, no NaN, in
# fields of 8, 8, 1, 32, 1 and 8 bits from the low end.
_E2M1_ID = 2 | 1 << 8 | 1 << 16 | 1 << 49


class Marlin:
    """The peer, loaded.

    Args:
        folder: What `build_marlin.py` made.

    Raises:
        OSError: the folder holds no such thing, or it was built for another system.
    """

    def __init__(self, folder: Path) -> None:
        folder = folder.resolve()
        sys.path.insert(0, str(folder))
        _install_stubs(folder)
        align = import_module("sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size")
        parent = import_module("sglang.srt.layers.moe.fused_moe_triton")
        vars(parent)["moe_align_block_size"] = align.moe_align_block_size
        self._run = import_module("sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe").fused_marlin_moe
        self._prepare = import_module(
            "sglang.srt.layers.quantization.marlin_utils_fp4"
        ).prepare_moe_mxfp4_layer_for_marlin

    def prepare(self, w13: Tensor, scale13: Tensor, w2: Tensor, scale2: Tensor) -> torch.nn.Module:
        """Bring experts into the peer's order, which its own code does.

        Args:
            w13: [E, 2 I, H / 2] int8, rows w1 then w3; packed MXFP4.
            scale13: [E, 2 I, H / 32] uint8.
            w2: [E, H, I / 2] int8.
            scale2: [E, H, I / 32] uint8.
        """
        layer = torch.nn.Module()
        layer.orig_dtype = torch.bfloat16
        for name, value in zip(_PARAMETERS, (w13, scale13, w2, scale2), strict=True):
            setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))
        self._prepare(layer)
        return layer

    def __call__(
        self, x: Tensor, layer: torch.nn.Module, weights: Tensor, ids: Tensor, limit: float = 10.0
    ) -> Tensor:
        """Run the whole MoE.

        Args:
            x: [T, H] bfloat16.
            layer: Of `prepare`.
            weights: [T, k] float32 router weights.
            ids: [T, k] int32 experts.
            limit: Of the SwiGLU.

        Returns:
            [T, H] bfloat16.
        """
        return self._run(
            hidden_states=x,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            w1_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            gating_output=weights,  # Only its number of rows is looked at.
            topk_weights=weights,
            topk_ids=ids,
            num_bits=4,
            clamp_limit=limit,
        )


_PARAMETERS = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")


def _install_stubs(folder: Path) -> None:
    """Put what the peer's files import, and does not belong to the peer, into `sys.modules`."""
    import tvm_ffi

    def load_jit(name: str, *arguments: str, **sources: Any) -> Any:
        return tvm_ffi.load_module(str(folder / f"{name}.so"))

    def unchanged(*arguments: Any, **options: Any) -> Any:
        return arguments[0] if arguments else unchanged

    def align(*arguments: Any) -> None:
        import_module("sglang.jit_kernel.moe_align").moe_align_block_size(*arguments[:8])

    absent = types.SimpleNamespace()
    e2m1 = types.SimpleNamespace(float4_e2m1f=types.SimpleNamespace(id=_E2M1_ID))
    off = types.SimpleNamespace(SGLANG_EXPERIMENTAL_LORA_OPTI=types.SimpleNamespace(get=lambda: False))
    parameters = ("Basev", "ChannelQuantScale", "GroupQuantScale", "Packedv")
    quantization = "sglang.srt.layers.quantization"
    stubs: dict[str, dict[str, Any]] = {
        "sgl_kernel": {"moe_sum_reduce": absent},
        "sgl_kernel.scalar_type": {"scalar_types": e2m1},
        "sglang.jit_kernel.activation": {"silu_and_mul": absent},
        "sglang.jit_kernel.gptq_marlin": {"gptq_marlin_gemm": absent},
        "sglang.jit_kernel.utils": {
            "cache_once": functools.cache,
            "load_jit": load_jit,
            "make_cpp_args": lambda *arguments: arguments,
        },
        "sglang.kernel_api_logging": {"debug_kernel_api": unchanged},
        "sglang.kernels.ops.moe": {"moe_align_block_size": align},
        "sglang.srt.environ": {"envs": off},
        "sglang.srt.layers.parameter": {
            f"{name}{'LLM' if name[-1] == 'v' else ''}Parameter": object for name in parameters
        },
        f"{quantization}.base_config": {"LinearMethodBase": object, "QuantizationConfig": object},
        f"{quantization}.utils": {
            "get_scalar_types": lambda: (object, e2m1),
            "pack_cols": absent,
            "unpack_cols": absent,
        },
        "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph": {
            "get_tc_piecewise_forward_context": absent
        },
        "sglang.srt.utils": {
            "get_device_capability": torch.cuda.get_device_capability,
            "is_cuda": lambda: True,
            "is_hip": lambda: False,
            "is_musa": lambda: False,
            "is_xpu": lambda: False,
        },
        "sglang.srt.utils.custom_op": {"register_custom_op": unchanged},
    }
    for name, members in stubs.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module
