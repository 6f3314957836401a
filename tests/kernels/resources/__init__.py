"""The committed table of what each kernel needs on SM80, one JSON file for each module of kernels.

``python -m tests.kernels.resources [MODULE ...]`` compiles all cases and rewrites the files.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import triton

from kernels_ref.sm80.gate import Compiled, compile_sm80
from tests.kernels.case import Case

FOLDER = Path(__file__).parent


def modules() -> list[str]:
    """Return the modules of `kernels_ref.sm80` that have cases."""
    return sorted(p.stem.removeprefix("cases_") for p in FOLDER.parent.glob("cases_*.py"))


def cases_of(module: str) -> list[Case]:
    """Return the cases of a module."""
    return list(import_module(f"tests.kernels.cases_{module}").CASES)


def build(case: Case) -> Compiled:
    """Compile a case for SM80."""
    return compile_sm80(
        case.fn,
        case.signature,
        case.constexprs,
        divisible=case.divisible,
        num_warps=case.num_warps,
        num_stages=case.num_stages,
        maxnreg=case.maxnreg,
    )


def row(compiled: Compiled) -> dict[str, Any]:
    """Return the row of a compiled kernel."""
    return {
        "registers": compiled.registers,
        "shared": compiled.shared,
        "warps": compiled.num_warps,
        "mma": sorted(compiled.mma),
        "cp_async": compiled.cp_async,
        "ldmatrix": compiled.ldmatrix,
    }


def read(module: str) -> dict[str, Any]:
    """Return the committed table of a module, empty when there is none."""
    path = FOLDER / f"{module}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"triton": None, "kernels": {}}


def write(module: str) -> Path:
    """Compile the cases of a module and write its table, one line a kernel."""
    lines = [
        f"    {json.dumps(case.name)}: {json.dumps(row(build(case)))}"
        for case in sorted(cases_of(module), key=lambda case: case.name)
    ]
    path, rows = FOLDER / f"{module}.json", ",\n".join(lines)
    text = f'{{\n  "triton": {json.dumps(triton.__version__)},\n  "kernels": {{\n{rows}\n  }}\n}}\n'
    path.write_text(text, encoding="utf-8")
    return path
