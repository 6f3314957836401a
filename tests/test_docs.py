"""The documentation: generated pages are fresh, links resolve, examples run, commands exist."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dsv4convert.catalog import CATALOG
from dsv4convert.cli import main
from dsv4convert.formats.int8_shift import decode_int8_shift, repack_reference
from dsv4convert.formats.repack import Repacker
from tests.conftest import Ran

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
PAGES = [*READMES, *sorted(DOCS.glob("*.md"))]
GENERATED = ("commands.md", "errors.md", "patches.md")
COLUMNS = 120

# A marked block is run; the text block right after it, if there is one, is what it prints.
_RUN = re.compile(
    r"<!-- test: run -->\n```python\n(?P<code>.*?)```\n(?:(?:(?!```|<!--).)*?```text\n(?P<out>.*?)```\n)?",
    re.S,
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _by_page(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda p: p.name)


# ---- generated pages


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_fresh(generator: ModuleType) -> None:
    assert list(generator.stale()) == [], "run `make docs`"
    assert tuple(generator.pages()) == GENERATED


def test_generated_pages_ignore_the_terminal(generator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert list(generator.stale()) == []


def test_a_stale_page_is_noticed(
    generator: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from click.testing import CliRunner

    monkeypatch.setattr(generator, "DOCS", tmp_path)
    checked = CliRunner().invoke(generator.generate, ["--check"])
    assert checked.exit_code == 1 and not any(tmp_path.iterdir())
    assert CliRunner().invoke(generator.generate, []).exit_code == 0
    assert CliRunner().invoke(generator.generate, ["--check"]).exit_code == 0


@pytest.mark.parametrize("code", sorted(CATALOG))
def test_errors_page_has_every_code_once(code: str) -> None:
    assert _text(DOCS / "errors.md").count(f"| `{code}` |") == 1


@_by_page([p for p in PAGES if p.name != "errors.md"])
def test_named_codes_exist(page: Path) -> None:
    families = "|".join(sorted({code.partition(".")[0] for code in CATALOG}))
    named = re.findall(rf"[`\[]((?:{families})\.[a-z0-9]+(?:-[a-z0-9]+)*)[`\]]", _text(page))
    known = [*CATALOG, "config.json", "golden.json", "manifest.md", "probe.md", "report.md", "smoke.md"]
    assert [code for code in named if code not in known] == []


# ---- links and words


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", _text(page)), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@_by_page(PAGES)
def test_relative_links_resolve(page: Path) -> None:
    broken = []
    for link in _LINK.findall(_FENCE.sub("", _text(page))):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = (page.parent / path).resolve() if path else page
        resolves = target.exists() and target.is_relative_to(ROOT)
        if not resolves or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_listed() -> None:
    listed = {link.partition("#")[0] for link in _LINK.findall(_text(DOCS / "index.md"))}
    assert {p.name for p in DOCS.glob("*.md")} - {"index.md"} <= listed


@_by_page(PAGES)
def test_no_path_of_one_machine(page: Path) -> None:
    own = re.compile(r"(?<![\w.\-])/(?:work|tmp|home|root|Users|mnt|dev/shm)/")
    assert [line for line in _text(page).splitlines() if own.search(line)] == []


def _width(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


@_by_page([p for p in PAGES if p.name not in GENERATED])
def test_prose_fits_the_column_limit(page: Path) -> None:
    prose = _FENCE.sub("", _text(page)).splitlines()
    wide = [x for x in prose if _width(x) > COLUMNS and not x.startswith(("|", "    error:"))]
    assert wide == []


# ---- commands

#: Options of pip, hf, docker, SGLang and our own scripts that the pages name on their own.
OPTIONS_OF_OTHERS = {
    "--chunked-prefill-size",
    "--crash-dump-folder",
    "--enable-return-indexer-topk",
    "--force-download",
    "--goldens",
    "--gpus",
    "--grpc-port",
    "--include",
    "--ipc",
    "--local-dir",
    "--log-level",
    "--nccl-port",
    "--one-card",
    "--no-deps",
    "--quantization",
    "--revision",
    "--served-model-name",
    "--shm-size",
    "--ssl-certfile",
    "--ssl-keyfile",
}


def _code(page: Path) -> Iterator[str]:
    text = _text(page)
    for language, block in _FENCE.findall(text):
        if language != "python":
            yield block
    yield from re.findall(r"`([^`\n]+)`", _FENCE.sub("", text))


def _named_commands(page: Path) -> set[str]:
    found = re.findall(r"(?<!from )\bdsv4convert ([a-z][a-z-]*)\b(?!/)", "\n".join(_code(page)))
    return set(found)


@_by_page(PAGES)
def test_named_commands_exist(page: Path) -> None:
    assert _named_commands(page) <= set(main.commands)


@_by_page([*READMES, DOCS / "commands.md"])
def test_every_command_is_named(page: Path) -> None:
    named = _named_commands(page) | set(re.findall(r"^\| `([a-z-]+)\b", _text(page), re.M))
    assert set(main.commands) <= named


@_by_page(PAGES)
def test_named_options_exist(page: Path) -> None:
    known = {option for c in main.commands.values() for p in c.params for option in p.opts}
    known |= {option for p in main.params for option in p.opts} | {"--help"}
    wrong = []
    for line in "\n".join(_code(page)).splitlines():
        match = re.match(r"(?:\$ )?dsv4convert ([a-z-]+)\b(.*)", line)
        if match and match[1] in main.commands:
            own = {option for p in main.commands[match[1]].params for option in p.opts}
            wrong += [o for o in re.findall(r"(?<!\S)--[a-z][a-z-]*", match[2]) if o not in own | {"--help"}]
        elif re.fullmatch(r"--[a-z][a-z-]*(?:[ =].*)?", line):
            option = re.split(r"[ =]", line)[0]
            wrong += [option] if option not in known | OPTIONS_OF_OTHERS else []
    assert wrong == []


def test_both_readmes_show_the_same_commands() -> None:
    blocks = [[b for kind, b in _FENCE.findall(_text(page)) if kind in ("sh", "text")] for page in READMES]
    assert blocks[0] == blocks[1]


# ---- examples


@pytest.fixture
def ran(cli: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return ``ran(page)``, which runs the marked blocks of a page beside a synthetic checkpoint."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *commands: tuple[str, ...]) -> dict[str, Any]:
        for command in commands:
            assert cli(*command, "-q").exit_code == 0
        names: dict[str, Any] = {}
        blocks = list(_RUN.finditer(_text(DOCS / name)))
        assert blocks
        for block in blocks:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block["code"], name, "exec"), names)
            if block["out"] is not None:
                assert printed.getvalue() == block["out"]
        return names

    return run


def test_examples_of_the_formats_page_print_what_it_shows(ran: Callable[..., dict[str, Any]]) -> None:
    names = ran("formats.md")
    codes = np.array(names["codes"], np.uint8)
    packed = (codes[0::2] | codes[1::2] << 4)[None]
    scales = np.array([names["scales"]], np.uint8)
    by_definition = repack_reference(packed, scales)
    stored = [np.frombuffer(names["packed"], np.uint8)[None], np.uint8([[names["shift_byte"]]])]
    stored.append(np.float32([names["channel_scale"]]))
    fast = [np.empty_like(part) for part in by_definition]
    Repacker(128).repack(packed, scales, *fast)
    for shown, defined, written in zip(stored, by_definition, fast, strict=True):
        assert shown.tobytes() == defined.tobytes() == written.tobytes()


def test_decoder_of_the_formats_page_is_that_of_the_package(
    ran: Callable[..., dict[str, Any]], rng: np.random.Generator
) -> None:
    decode = ran("formats.md")["decode"]
    codes = rng.integers(0, 256, (5, 192), np.uint8)
    shifts = rng.integers(0, 256, (5, 3), np.uint8)
    scale = np.exp2(rng.integers(-20, 20, 5)).astype(np.float32)
    expected = decode_int8_shift(codes, shifts, 320) * scale[:, None]
    assert decode(codes, shifts, scale, 320).tobytes() == expected.astype(np.float32).tobytes()


def test_examples_of_the_api_page_print_what_it_shows(ran: Callable[..., Any]) -> None:
    ran("python-api.md", ("synth", "official"))


def test_example_of_the_manifest_page_prints_what_it_shows(ran: Callable[..., Any]) -> None:
    ran("manifest.md", ("synth", "official"), ("convert", "official", "out", "--jobs", "1"))


def test_session_of_the_readme_is_what_the_commands_print(
    cli: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    session = next(
        b for kind, b in _FENCE.findall(_text(READMES[0])) if kind == "text" and b.startswith("$ ")
    )
    commands = re.findall(r"^\$ dsv4convert (.+)\n((?:(?!\$ ).*\n)*)", session, re.M)
    assert len(commands) == 6
    for command, shown in commands:
        printed = iter(cli(*command.split()).out.splitlines())
        # `[...]` stands for lines left out; all others must come in this order.
        lost = [x for x in shown.splitlines() if x != "[...]" and x != "  [...]" and x not in printed]
        assert lost == [], command
