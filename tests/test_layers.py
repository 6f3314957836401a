"""The shape of the code: who may import whom, what stays unloaded, and the house budgets.

Everything but the start-up tests reads source text with `ast`; nothing here needs a checkpoint or torch.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "dsv4convert"

# Module -> level. A module imports from strictly lower levels only, also inside functions.
# A row for a folder covers every module in it; those modules may use one another freely.
LEVELS = {
    "catalog": 0,
    "formats.spec": 0,
    "releases": 0,
    "validate.holes": 0,
    "errors": 1,
    "formats.codes": 1,
    "sink": 1,
    "files": 2,
    "formats.block": 2,
    "formats.fp8": 2,
    "formats.int8_shift": 2,
    "geometry": 2,
    "validate.report": 2,
    "vision": 2,
    "workers": 2,
    "writer": 2,
    "formats.repack": 3,
    "header": 3,
    "listing": 3,
    "origin": 3,
    "place": 3,
    "decoder": 4,
    "opening": 4,
    "table": 4,
    "validate.hashlists": 4,
    "checkpoint": 5,
    "device": 5,
    "names": 5,
    "validate.hashing": 5,
    "validate.online": 5,
    "handoff": 6,
    "lookalike": 6,
    "survey": 6,
    "memory": 7,
    "plan": 7,
    "validate.checksums": 7,
    "card": 8,
    "journal": 8,
    "synth": 8,
    "transform": 8,
    "golden": 9,
    "limits": 9,
    "manifest": 9,
    "standin": 9,
    "closing": 10,
    "validate.provenance": 10,
    "finished": 11,
    "validate.content": 11,
    "validate.structure": 11,
    "consume": 12,
    "probe": 12,
    "runtime": 12,
    "smoke": 12,
    "validate.values": 12,
    "webreport": 12,
    "convert": 13,
    "validate": 13,
    "api": 14,
    "cli": 14,
    "__main__": 15,
}
FOLDERS = {"cli", "probe", "releases", "runtime", "smoke", "vision", "webreport"}
# These re-export lazily: at import time they load nothing of ours. The number is what an importer sees.
LAZY = {"": 0, "formats": 3}
# The only modules that may use the kernels, and only inside functions (the kernels load torch).
MAY_USE_KERNELS = {"device", "probe", "runtime", "vision"}

FILE_BUDGET = 400
FUNCTION_BUDGET = 80

# Importing these, or running a command that reads headers only, loads neither torch nor numpy.
LIGHT_MODULES = ["checkpoint", "cli", "names", "plan", "validate.structure", "vision.layout"]
LIGHT_COMMANDS = ["inspect", "plan", "original"]
HEAVY = ("torch", "numpy")


@dataclass(frozen=True)
class Import:
    """One import statement: the module it names, the line, and whether it runs at import time."""

    target: str
    line: int
    at_import: bool


def _sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def _module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


MODULES = {_module_name(path): path for folder in (PACKAGE, "kernels_ref") for path in _sources(folder)}
OURS = {name: path for name, path in MODULES.items() if name.split(".")[0] == PACKAGE}


def _by_name(modules: dict[str, Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", sorted(modules))


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _statements(body: list[ast.stmt], at_import: bool = True) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield every statement, with whether it runs when the module is imported."""
    for node in body:
        yield node, at_import
        runs = at_import and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, field, [])
            here = runs and not (field == "body" and _is_type_checking(node))
            for child in inner:
                if isinstance(child, ast.ExceptHandler | ast.match_case):
                    yield from _statements(child.body, here)
                else:
                    yield from _statements([child], here)


def _targets(node: ast.stmt, module: str, is_package: bool) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            anchor = module.split(".")
            anchor = anchor[: len(anchor) - node.level + (1 if is_package else 0)]
            base = ".".join([*anchor, base]) if base else ".".join(anchor)
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            if inner in MODULES:
                yield inner
            # The version is a string of the root package, not a module.
            elif (base, alias.name) != (PACKAGE, "__version__"):
                yield base


def _imports(name: str) -> list[Import]:
    path = MODULES[name]
    return [
        Import(target, node.lineno, at_import)
        for node, at_import in _statements(_parse(path).body)
        for target in _targets(node, name, path.name == "__init__.py")
    ]


def _row(name: str) -> str:
    """Return the row of `LEVELS` or `LAZY` that a module of the package belongs to."""
    short = name.removeprefix(PACKAGE).removeprefix(".")
    folder = short.split(".")[0]
    return folder if folder in FOLDERS else short


def _level(row: str) -> int:
    """Return the level; -1 for a row that is not in the table (a test of its own says so)."""
    return LAZY[row] if row in LAZY else LEVELS.get(row, -1)


def _place(name: str, line: int) -> str:
    return f"{MODULES[name].relative_to(ROOT)}:{line}"


def _fail_on(places: list[str], rule: str) -> None:
    """Fail with the rule and every place that breaks it."""
    if places:
        pytest.fail("\n".join([rule, *places]), pytrace=False)


# ---- import direction


@_by_name(OURS)
def test_module_has_a_level(name: str) -> None:
    row = _row(name)
    if row not in LEVELS and row not in LAZY:
        pytest.fail(
            f"`{name}` has no level: add it to LEVELS in tests/test_layers.py, one above the highest level "
            "it imports from, or merge it into the module that uses it",
            pytrace=False,
        )


@pytest.mark.parametrize("row", sorted(LEVELS))
def test_level_table_has_no_impossible_row(row: str) -> None:
    """A row may wait for its module, but its name must fit: no folder row has rows below it."""
    folder, dot, _ = row.partition(".")
    assert not dot or folder not in FOLDERS, f"`{row}`: covered by the row of `{folder}`"


@_by_name(OURS)
def test_imports_point_downwards(name: str) -> None:
    row = _row(name)
    wrong = []
    for found in _imports(name):
        target = _row(found.target)
        if found.target.split(".")[0] != PACKAGE or (row in FOLDERS and target == row):
            continue
        too_high = found.at_import if row in LAZY else 0 <= _level(row) <= _level(target)
        if too_high:
            wrong.append(f"{_place(name, found.line)}: imports `{found.target}` (level {_level(target)})")
    _fail_on(wrong, f"`{name}` (level {_level(row)}) may import lower levels only, a lazy `__init__` none:")


def test_kernels_use_only_the_formats_of_ours() -> None:
    wrong = [
        f"{_place(name, found.line)}: imports `{found.target}`"
        for name in sorted(MODULES.keys() - OURS.keys())
        for found in _imports(name)
        if found.target.split(".")[0] == PACKAGE
        and not (found.target + ".").startswith(f"{PACKAGE}.formats.")
    ]
    _fail_on(wrong, "kernels_ref may import dsv4convert.formats and nothing else of ours:")


def test_only_the_kernels_for_a_gpu_need_triton() -> None:
    """A machine without Triton runs `probe`, and a GPU box without anything else runs the kernels."""
    known = {"dsv4convert", "kernels_ref", "numpy", "torch", *sys.stdlib_module_names}
    wrong = [
        f"{_place(name, found.line)}: imports `{found.target}`"
        for name in sorted(MODULES.keys() - OURS.keys())
        for found in _imports(name)
        if found.target.split(".")[0] not in known | ({"triton"} if ".sm80" in name else set())
    ]
    _fail_on(wrong, "kernels_ref may import torch and numpy, its `sm80` triton too:")


@_by_name(OURS)
def test_kernels_are_loaded_only_when_asked_for(name: str) -> None:
    allowed = _row(name).split(".")[0] in MAY_USE_KERNELS
    wrong = [
        f"{_place(name, found.line)}: imports `{found.target}`"
        for found in _imports(name)
        if found.target.split(".")[0] == "kernels_ref" and (found.at_import or not allowed)
    ]
    _fail_on(wrong, f"only functions of {', '.join(sorted(MAY_USE_KERNELS))} may import kernels_ref:")


def test_contributing_draws_the_same_table() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawn = {
        row: int(level)
        for level, rows in re.findall(r"^ {4,5}(\d+) ((?: +[\w.]+)+)$", text, re.MULTILINE)
        for row in rows.split()
    }
    assert drawn == LEVELS


# ---- what a cheap command leaves unloaded


def _python(code: str, *args: str) -> str:
    """Run `code` in a fresh interpreter, as from a checkout, and return what it printed last."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny synthetic checkpoint in another process, so that this one stays without torch."""
    path = tmp_path_factory.mktemp("layers") / "official"
    command = [sys.executable, "-m", PACKAGE, "synth", str(path), "--scale", "tiny"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_importing_a_header_module_loads_no_torch(module: str) -> None:
    code = f"import sys, {PACKAGE}.{module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert _python(code) == "[]"


@pytest.mark.parametrize("command", LIGHT_COMMANDS)
def test_running_a_header_command_loads_no_torch(command: str, tiny_checkpoint: Path) -> None:
    code = f"""
import sys
from {PACKAGE}.cli import main
status = 0
try:
    main(sys.argv[1:], prog_name="{PACKAGE}")
except SystemExit as stop:
    status = stop.code or 0
print()
print(status, [m for m in {HEAVY!r} if m in sys.modules])
"""
    assert _python(code, command, str(tiny_checkpoint)) == "0 []"


# ---- house rules


def _definitions(
    tree: ast.Module,
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """Yield the functions and classes of a module and the methods of its classes, with dotted names."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{method.name}", method


def _is_restated(node: ast.AST) -> bool:
    """Say whether the docstring belongs elsewhere: overloads, overrides, setters."""
    marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", [])]
    return any(re.search(r"(^|\.)(overload|override|setter)$", mark) for mark in marks)


@_by_name(MODULES)
def test_module_says_what_it_knows(name: str) -> None:
    assert ast.get_docstring(_parse(MODULES[name])), f"`{name}` has no module docstring"


@_by_name(MODULES)
def test_public_names_have_docstrings(name: str) -> None:
    bare = [
        f"{_place(name, node.lineno)}: `{dotted}`"
        for dotted, node in _definitions(_parse(MODULES[name]))
        if not any(part.startswith("_") for part in dotted.split("."))
        and not ast.get_docstring(node)
        and not _is_restated(node)
    ]
    _fail_on(bare, "public names without a docstring:")


@_by_name(OURS)
def test_package_never_asserts(name: str) -> None:
    tree = _parse(OURS[name])
    found = [_place(name, node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    _fail_on(found, "`assert` vanishes under -O; raise an error of ours instead:")


@_by_name(MODULES)
def test_files_and_functions_stay_within_budget(name: str) -> None:
    path = MODULES[name]
    lines = len(path.read_text(encoding="utf-8").splitlines())
    long = [f"{path.relative_to(ROOT)}: {lines} lines"] if lines > FILE_BUDGET else []
    long += [
        f"{_place(name, node.lineno)}: `{node.name}` has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(_parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno
        and node.end_lineno - node.lineno >= FUNCTION_BUDGET
    ]
    _fail_on(long, f"over the budget of {FILE_BUDGET} lines a file, {FUNCTION_BUDGET} a function:")


def test_nothing_points_outside_the_repository() -> None:
    """A clone on another machine has neither the folder beside this one nor our work folder."""
    outside = re.compile(r"\.\./" + r"shared\b|(?<![\w.])/" + r"work/")
    folders = (PACKAGE, "kernels_ref", "tests", "benchmarks", "docs")
    paths = [path for folder in folders for path in _sources(folder)]
    paths += [*ROOT.glob("*.py"), *ROOT.glob("*.toml"), ROOT / "Makefile", ROOT / ".ci" / "run"]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if outside.search(line)
    ]
    _fail_on(found, "paths that exist on one machine only:")


# ---- the checks themselves: each must be able to fail


@pytest.mark.parametrize(
    ("source", "at_import"),
    [
        ("import torch", True),
        ("try:\n    import torch\nexcept ImportError:\n    pass", True),
        ("class A:\n    import torch", True),
        ("try:\n    pass\nexcept ImportError:\n    import torch", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import torch", True),
        ("def f():\n    import torch", False),
        ("class A:\n    def f(self):\n        import torch", False),
        ("def f():\n    if True:\n        with open('x'):\n            import torch", False),
    ],
)
def test_statements_know_when_an_import_runs(source: str, at_import: bool) -> None:
    seen = [
        runs
        for node, runs in _statements(ast.parse(source).body)
        if isinstance(node, ast.Import) and node.names[0].name == "torch"
    ]
    assert seen == [at_import]


@pytest.mark.parametrize(
    ("source", "module", "is_package", "expected"),
    [
        ("import dsv4convert.plan", "dsv4convert.cli", True, ["dsv4convert.plan"]),
        ("from dsv4convert import errors", "dsv4convert.plan", False, ["dsv4convert.errors"]),
        ("from dsv4convert import __version__", "dsv4convert.manifest", False, []),
        ("from dsv4convert.errors import Finding", "dsv4convert.plan", False, ["dsv4convert.errors"]),
        ("from . import errors", "dsv4convert.plan", False, ["dsv4convert.errors"]),
        ("from .errors import Finding", "dsv4convert.plan", False, ["dsv4convert.errors"]),
        ("from ..errors import Finding", "dsv4convert.formats.spec", False, ["dsv4convert.errors"]),
        ("from .spec import BlockFormat", "dsv4convert.formats", True, ["dsv4convert.formats.spec"]),
    ],
)
def test_targets_resolve_absolute_and_relative_imports(
    source: str, module: str, is_package: bool, expected: list[str]
) -> None:
    assert list(_targets(ast.parse(source).body[0], module, is_package)) == expected
