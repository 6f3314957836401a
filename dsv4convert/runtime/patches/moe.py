"""Routed experts in INT8_SHIFT: a method in place of SGLang's Marlin one, for both expert layouts.

``int8`` is loaded as it is stored; SGLang's own loader cuts it for tensor parallelism, because rows and whole
groups of 128 codes are what it cuts. ``mxfp4`` is loaded into the stock parameters and repacked, shard by
shard, so that a row scale of `w2` is that of the rank's part of the row.

The result is NOT multiplied by ``routed_scaling_factor``: SGLang does that for every subclass of the Marlin
method, when it adds the shared experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Final

import torch
from torch.nn import Module, Parameter

from dsv4convert.errors import Refused
from dsv4convert.formats.spec import INT8_SHIFT
from dsv4convert.names import Layout
from dsv4convert.runtime import ops, settings
from dsv4convert.runtime.refusal import refusal

_LAYOUT: ContextVar[Layout] = ContextVar("expert layout", default=Layout.MXFP4)

#: Backend -> name of the class that SGLang gives each layer of experts.
METHOD_NAMES: Final = {
    "ours": "Int8ShiftMoEMethod",
    "marlin": "Mxfp4MarlinMoEMethod",
    "humming": "Mxfp4HummingMoEMethod",
}
_GROUP: Final = INT8_SHIFT.group
#: SGLang pads the hidden size to this for the layout `mxfp4`; padded columns would be uninitialized.
_HIDDEN_STEP: Final = 256


@contextmanager
def expert_layout(layout: Layout) -> Iterator[None]:
    """Tell the layers built inside how the checkpoint stores routed experts."""
    token = _LAYOUT.set(layout)
    try:
        yield
    finally:
        _LAYOUT.reset(token)


def method(stock: Any, module: ModuleType) -> Any:
    """M1: return the class for the backend that the environment names."""
    backend = settings.moe_backend()
    if backend == "ours":
        return _method_of_ours(stock)
    if backend == "marlin":
        # Asked in one place of this module, to refuse; the GEMM itself is built for SM80 and newer.
        module.is_sm90_supported = lambda: True  # type: ignore[attr-defined]
    return stock


def _method_of_ours(stock: Any) -> Any:
    class Int8ShiftMoEMethod(stock):  # type: ignore[misc]
        """SGLang's protocol around `ops.fused_moe`."""

        def create_moe_runner(self, layer: Module, moe_runner_config: Any) -> None:
            _require_supported(moe_runner_config)
            self.limit = moe_runner_config.swiglu_limit

        def create_weights(
            self,
            layer: Module,
            num_experts: int,
            hidden_size: int,
            intermediate_size_per_partition: int,
            params_dtype: torch.dtype,
            **attributes: Any,
        ) -> None:
            layout = _LAYOUT.get()
            _require_whole_groups(layout, hidden_size, intermediate_size_per_partition)
            sizes = num_experts, hidden_size, intermediate_size_per_partition
            if layout is Layout.INT8:
                _register(layer, *sizes, attributes)
            else:
                super().create_weights(layer, *sizes, params_dtype, **attributes)

        def process_weights_after_loading(self, layer: Module) -> None:
            for matrix in ("w13", "w2"):
                if hasattr(layer, f"{matrix}_weight"):
                    _repack(layer, matrix)

        def apply(self, layer: Module, dispatch_output: Any) -> Any:
            from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

            # The input belongs to the shared experts as well, which may read it at the same time.
            x, top = dispatch_output.hidden_states, dispatch_output.topk_output
            weights = _stored(layer, "w13"), _stored(layer, "w2")
            fused_moe = ops.kernel("fused_moe", x.device)
            out = fused_moe(x, *weights, top.topk_weights, top.topk_ids, limit=self.limit)
            return StandardCombineInput(hidden_states=out)

    return Int8ShiftMoEMethod


def _require_supported(config: Any) -> None:
    wanted = {
        "activation": "silu",
        "is_gated": True,
        "apply_router_weight_on_input": False,
        "no_combine": False,
        "num_local_experts": config.num_experts,
    }
    for name, value in wanted.items():
        found = getattr(config, name)
        if found != value:
            problem = "the kernels of the routed experts do not support this setting of SGLang"
            raise refusal("shim.option", name, problem, expected=str(value), found=str(found))


def _require_whole_groups(layout: Layout, hidden: int, inter: int) -> None:
    step = _GROUP if layout is Layout.INT8 else _HIDDEN_STEP
    for what, size, multiple in (("hidden size", hidden, step), ("intermediate size per GPU", inter, _GROUP)):
        if size % multiple:
            problem = f"the {what} of the routed experts would be cut inside a group"
            raise _split(what, problem, multiple, size)


def _split(what: str, problem: str, multiple: int, size: int) -> Refused:
    return refusal("tp.split", what, problem, expected=f"a multiple of {multiple}", found=f"{size:,}")


def _shapes(experts: int, rows: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    groups = k // _GROUP
    return {
        "weight_codes": (torch.uint8, (experts, rows, groups * _GROUP // 2)),
        "weight_shift2": (torch.uint8, (experts, rows, groups)),
        "channel_scale": (torch.float32, (experts, rows)),
    }


def _register(layer: Module, experts: int, hidden: int, inter: int, attributes: dict[str, Any]) -> None:
    """Give the layer the parameters of layout `int8`; their names end as those of the checkpoint do."""
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoeWeightScaleSupported
    from sglang.srt.utils import set_weight_attrs

    # How the loader cuts a scale; for other names the attribute means nothing.
    per_row = attributes | {"quant_method": FusedMoeWeightScaleSupported.CHANNEL.value}
    for matrix, rows, k in (("w13", 2 * inter, hidden), ("w2", hidden, inter)):
        for suffix, (dtype, shape) in _shapes(experts, rows, k).items():
            parameter = Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
            layer.register_parameter(f"{matrix}_{suffix}", parameter)
            set_weight_attrs(parameter, per_row if suffix == "channel_scale" else attributes)


def _repack(layer: Module, matrix: str) -> None:
    """Replace the MXFP4 parameters of a matrix by INT8_SHIFT ones."""
    packed, scales = (getattr(layer, f"{matrix}_{name}") for name in ("weight", "weight_scale_inv"))
    tensors = ops.kernel("repack_mxfp4", packed.device)(packed.data, scales.data)
    delattr(layer, f"{matrix}_weight")
    delattr(layer, f"{matrix}_weight_scale_inv")
    for suffix, tensor in zip(_shapes(0, 0, 0), tensors, strict=True):
        layer.register_parameter(f"{matrix}_{suffix}", Parameter(tensor, requires_grad=False))


def _stored(layer: Module, matrix: str) -> Any:
    return ops.int8_shift(*(getattr(layer, f"{matrix}_{suffix}") for suffix in _shapes(0, 0, 0)))
