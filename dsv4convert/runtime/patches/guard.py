"""Guards around building and loading a model: target, NextN and DSpark draft, on every rank.

SGLang logs a warning for a parameter that no tensor filled and for a tensor that no parameter took, and casts
BF16 to FP8 without a word where a module is missing from the skip list. Each of these serves nonsense, so
each refuses here. A healthy model logs one line.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from dsv4convert.errors import Finding, finding
from dsv4convert.formats.spec import PACKING, ROUNDING
from dsv4convert.handoff import SECTION
from dsv4convert.names import Layout
from dsv4convert.runtime import contract, gate, settings
from dsv4convert.runtime.guards import TARGET
from dsv4convert.runtime.patches import moe
from dsv4convert.runtime.refusal import refusal, refuse_all

_LOG = logging.getLogger("dsv4convert.runtime")
#: Findings of one kind that are spelled out.
_SHOWN: Final = 8
#: Scales of a quantized KV cache, which no checkpoint of this family has; their initial value is right.
_OPTIONAL: Final = (".k_scale", ".v_scale")
#: What a NextN draft takes from the target after loading.
_SHARED: Final = ("lm_head.", "embed_tokens.")
_LOADER: Final = "weight_loader"
_DRAFT_BIAS: Final = re.compile(r"mtp\.\d+\.ffn\.gate\.bias_vl")
#: Parameters that a vision tower brings along: its own, and the bias of pictures in each router.
_OF_PICTURES: Final = re.compile(r"tower\..*|.*\.e_score_correction_bias_vl")


def build(stock: Any, module: ModuleType) -> Callable[..., None]:
    """G1: build a model with the expert layout of its checkpoint, then look at what was built."""

    def __init__(self: Any, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        _announce()
        with moe.expert_layout(layout_of(config)):
            stock(self, config, quant_config, prefix)
        _raise_on([*_fp8_parameters(self), *_foreign_experts(self), *_blind(self, config)])

    return __init__


def load(stock: Any, module: ModuleType) -> Callable[..., None]:
    """G2: load weights, then require that every parameter was filled."""

    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> None:
        # Drafts are text: the bias that scores pictures has no place in them.
        weights = (pair for pair in weights if not _DRAFT_BIAS.fullmatch(pair[0]))
        # A running server may be given new weights in parts; only the first load has to be complete.
        if getattr(self, "dsv4_guarded", False):
            stock(self, weights, *args, **kwargs)
            return
        self.dsv4_guarded = True
        parameters = dict(_to_be_filled(self))
        _mark(parameters.values())
        with _counting(parameters) as filled:
            stock(self, weights, *args, **kwargs)
        _raise_on(_unfilled(parameters, filled))
        _report(self, len(parameters))

    return load_weights


def layout_of(config: Any) -> Layout:
    """Return the expert layout that `config.json` states; `mxfp4` without a section of ours.

    Raises:
        Refused: another layout, packing or rounding than this version reads, or not with this backend.
    """
    section = getattr(config, SECTION, None) or {"experts": Layout.MXFP4.value}
    where = f"config.json, {SECTION}"
    wanted = {"packing": PACKING, "rounding": ROUNDING} if section.get("experts") == Layout.INT8.value else {}
    for key, value in wanted.items():
        if section.get(key) != value:
            problem = f"`{key}` of the routed experts is not one this version reads"
            raise refusal("shim.layout", where, problem, expected=value, found=str(section.get(key)))
    if section.get("experts") not in (Layout.INT8.value, Layout.MXFP4.value):
        expected = f"{Layout.INT8.value} or {Layout.MXFP4.value}"
        problem, found = "`experts` is no layout that can be served", str(section.get("experts"))
        raise refusal("shim.layout", where, problem, expected=expected, found=found)
    layout, backend = Layout(section["experts"]), settings.moe_backend()
    if layout is Layout.INT8 and backend != "ours":
        problem = "this backend of the routed experts reads layout `mxfp4` only"
        raise refusal("shim.layout", settings.MOE, problem, expected="ours", found=backend)
    return layout


@cache
def _announce() -> None:
    """Require every patch and say so, once per process."""
    facts = f"sglang={contract.VERSION} experts={settings.moe_backend()}"
    _LOG.info("%s %s patches=%s", contract.SHIM_LINE, facts, ",".join(gate.require_patches()))
    if settings.POISON in settings.switched_on():
        _LOG.warning("%s=1: NaN in padded heads and tokens before attention; for tests only", settings.POISON)


def _fp8_parameters(model: Module) -> Iterator[Finding]:
    names = [name for name, p in model.named_parameters() if p.dtype is torch.float8_e4m3fn]
    for name in names[:_SHOWN]:
        problem = f"the parameter is FP8, one of {len(names)}: BF16 weights would be cast without their scale"
        yield finding("shim.fp8", name, problem, expected="bfloat16", found="float8_e4m3fn")


def _expert_layers(model: Module) -> Iterator[tuple[str, Any]]:
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    yield from ((name, m) for name, m in model.named_modules() if isinstance(m, FusedMoE))


def _foreign_experts(model: Module) -> Iterator[Finding]:
    expected = moe.METHOD_NAMES[settings.moe_backend()]
    for name, layer in _expert_layers(model):
        found = type(layer.quant_method).__name__
        if found != expected:
            problem = "the routed experts of this layer run elsewhere"
            yield finding("shim.experts", name, problem, expected=expected, found=found)


def _blind(model: Module, config: Any) -> Iterator[Finding]:
    """SGLang ignores errors of a package that it was pointed at, and would serve its own class."""
    if getattr(config, "vision_n_layers", 0) and type(model).__name__ == TARGET:
        found = type(model).__module__
        if not found.startswith(f"{settings.MODELS}."):
            problem = "the checkpoint has a vision tower, and this class does not see"
            yield finding(
                "shim.vision", TARGET, problem, expected=f"a class of {settings.MODELS}", found=found
            )


def _to_be_filled(model: Module) -> Iterator[tuple[str, Parameter]]:
    shared = _SHARED if type(model).__name__.endswith("NextN") else ()
    for name, parameter in model.named_parameters():
        if not name.endswith(_OPTIONAL) and not any(part in name for part in shared):
            yield name, parameter


def _mark(parameters: Iterable[Parameter]) -> None:
    """Fill parameters with what no checkpoint holds: NaN, or a negative number where ids belong."""
    for parameter in parameters:
        if parameter.dtype in (torch.bfloat16, torch.float32):
            parameter.data.fill_(torch.nan)
        elif parameter.dtype in (torch.int32, torch.int64):
            parameter.data.fill_(-1)


@contextmanager
def _counting(parameters: dict[str, Parameter]) -> Iterator[dict[str, set[Any]]]:
    """Yield name -> (shard, expert) pairs that the loader puts into the parameters of routed experts.

    Bytes of codes have no value that marks them as absent, so that the calls are counted.
    """
    filled: dict[str, set[Any]] = {}
    loaders = {}
    for name, parameter in parameters.items():
        if ".experts.w" in name:
            loaders[name] = getattr(parameter, _LOADER)
            filled[name] = set()
            setattr(parameter, _LOADER, _noting(loaders[name], filled[name]))
    try:
        yield filled
    finally:
        for name, loader in loaders.items():
            setattr(parameters[name], _LOADER, loader)


def _noting(loader: Callable[..., None], filled: set[Any]) -> Callable[..., None]:
    def weight_loader(param: Parameter, tensor: Tensor, name: str, shard_id: str, expert_id: int) -> None:
        loader(param, tensor, name, shard_id=shard_id, expert_id=expert_id)
        filled.add((shard_id, expert_id))

    return weight_loader


def _unfilled(parameters: dict[str, Parameter], filled: dict[str, set[Any]]) -> Iterator[Finding]:
    for name, parameter in parameters.items():
        if name in filled:
            expected, found = parameter.shape[0] * (2 if ".w13_" in name else 1), len(filled[name])
            if found != expected:
                problem, tensors = "tensors of routed experts are missing", f"{expected} tensors"
                yield finding("shim.unfilled", name, problem, expected=tensors, found=str(found))
        elif _holds_mark(parameter):
            yield finding("shim.unfilled", name, "no tensor of the checkpoint filled it, or not all of it")


def _holds_mark(parameter: Parameter) -> bool:
    if parameter.is_floating_point():
        return bool(parameter.data.isnan().any())
    return parameter.dtype in (torch.int32, torch.int64) and bool((parameter.data < 0).any())


def _raise_on(findings: Iterable[Finding]) -> None:
    faults = list(findings)
    if faults:
        raise refuse_all(faults[:_SHOWN])


def _report(model: Module, parameters: int) -> None:
    from sglang.srt.runtime_context import get_parallel

    parallel, experts = get_parallel(), list(_expert_layers(model))
    layouts = {"int8" if hasattr(layer, "w13_weight_codes") else "mxfp4" for _, layer in experts}
    facts = {
        "model": type(model).__name__,
        "rank": f"{parallel.tp_rank}/{parallel.tp_size}",
        "filled": parameters,
        "fp8": 0,
        "experts": f"{settings.moe_backend()}/{'+'.join(sorted(layouts))}",
        "layers": len(experts),
    }
    facts |= {name.removeprefix("DSV4_SM80_").lower(): 1 for name in settings.switched_on()}
    pictures = [name for name, _ in model.named_parameters() if _OF_PICTURES.fullmatch(name)]
    if pictures:
        facts["pictures"] = len(pictures)
    main = [p.dtype for name, p in model.named_parameters() if name.endswith(".main_proj.weight")]
    if main:
        facts["main_proj"] = str(main[0]).removeprefix("torch.")
    _LOG.info("%s %s", contract.GUARD_LINE, " ".join(f"{key}={value}" for key, value in facts.items()))
