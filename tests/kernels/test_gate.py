"""Every shipped kernel compiles for SM80 as it did when its numbers were accepted, and the gate can fail."""

from __future__ import annotations

import re

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels_ref.sm80.gate import SHARED_LIMIT, compile_sm80, sm80_code
from tests.kernels import resources
from tests.kernels.case import INT8_MMA, Case

ALL = [(module, case) for module in resources.modules() for case in resources.cases_of(module)]

# What SM80 does not have: warpgroup products, bulk copies, clusters, barriers with transaction counts, FP8.
BEYOND_SM80 = re.compile(r"\bwgmma\b|\bcp\.async\.bulk|\bcluster\b|\bmbarrier\.\w*expect_tx|\be4m3|\be5m2")


@pytest.mark.parametrize(("module", "case"), ALL, ids=[f"{module}: {case.name}" for module, case in ALL])
def test_kernel_compiles_as_accepted(module: str, case: Case) -> None:
    table = resources.read(module)
    assert table["triton"] == triton.__version__, "the table was made with another Triton: see tests/kernels"
    compiled = resources.build(case)
    assert ".target sm_80" in compiled.ptx
    assert not BEYOND_SM80.findall(compiled.ptx)
    assert compiled.mma == case.mma
    assert compiled.spills == 0
    assert compiled.shared < SHARED_LIMIT
    assert table["kernels"].get(case.name) == resources.row(compiled)


@pytest.mark.parametrize("module", resources.modules())
def test_table_has_a_row_for_each_case_and_no_other(module: str) -> None:
    names = [case.name for case in resources.cases_of(module)]
    assert len(set(names)) == len(names)
    assert sorted(resources.read(module)["kernels"]) == sorted(names)


# ---- the gate itself


@triton.jit
def _product(A, B, C, K, stride, TILE: tl.constexpr):
    rows, columns, ks = tl.arange(0, TILE), tl.arange(0, TILE), tl.arange(0, 64)
    total = tl.zeros((TILE, TILE), tl.int32)
    for k in range(0, K, 64):
        a = tl.load(A + rows[:, None] * stride + (k + ks)[None, :])
        b = tl.load(B + columns[None, :] * stride + (k + ks)[:, None])
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    tl.store(C + rows[:, None] * TILE + columns[None, :], total)


_TYPES = {"A": "*i8", "B": "*i8", "C": "*i32", "K": "i32", "stride": "i32"}
_OPTIONS = {"num_warps": 4, "num_stages": 3}


def test_gate_reports_what_the_code_holds() -> None:
    compiled = compile_sm80(_product, _TYPES, {"TILE": 64}, divisible={"K", "stride"}, **_OPTIONS)
    assert compiled.name == "_product"
    assert compiled.mma == {INT8_MMA}
    # Three stages of two 64 x 64 byte tiles, of which Triton keeps two in flight.
    assert compiled.shared == 2 * 2 * 64 * 64
    assert compiled.cp_async > 0
    assert compiled.ldmatrix > 0
    assert compiled.spills == 0
    assert compiled.cubin[:4] == b"\x7fELF"


def test_gate_sees_the_loss_of_alignment_and_a_spill() -> None:
    unaligned = compile_sm80(_product, _TYPES, {"TILE": 64}, **_OPTIONS)
    assert unaligned.cp_async == 0
    starved = compile_sm80(_product, _TYPES, {"TILE": 128}, divisible={"K", "stride"}, maxnreg=64)
    assert starved.registers <= 64
    assert starved.spills > 0


def test_a_newer_card_is_given_the_very_same_code() -> None:
    """`sm80_code` on compute capability 9.0 gives the PTX of the gate; outside, native code."""
    expected = compile_sm80(_product, _TYPES, {"TILE": 64}, divisible={"K", "stride"}, **_OPTIONS)
    types = {name: _TYPES.get(name, "constexpr") for name in _product.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i in range(5)}
    source = ASTSource(fn=_product, signature=types, constexprs={"TILE": 64}, attrs=attrs)

    def build() -> triton.compiler.CompiledKernel:
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=_OPTIONS)

    with sm80_code():
        carried = build()
    native = build()
    assert carried.asm["ptx"] == expected.ptx
    assert carried.kernel == expected.ptx.encode() + b"\0"
    assert ".target sm_90a" in native.asm["ptx"]
    assert native.kernel[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("types", "values", "divisible"),
    [
        ({**_TYPES, "typo": "i32"}, {"TILE": 64}, ()),
        (_TYPES, {}, ()),
        ({**_TYPES, "TILE": "i32"}, {"TILE": 64}, ()),
        (_TYPES, {"TILE": 64}, {"k"}),
    ],
    ids=["unknown", "missing", "twice", "misspelt"],
)
def test_gate_wants_every_argument_once(types: dict, values: dict, divisible: set) -> None:
    with pytest.raises(ValueError, match="needs a type or a compile-time value"):
        compile_sm80(_product, types, values, divisible=divisible)
