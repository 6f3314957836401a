"""The command `probe`, prompts, golden files and the page that shows them."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4convert import api
from dsv4convert.errors import EnvironmentFault, Refused, finding
from dsv4convert.golden import encode_golden, read_golden
from dsv4convert.probe.prompt import Prompt, Vocabulary, check_prompt
from dsv4convert.webreport import make_page
from tests.conftest import Ran
from tests.probe.conftest import SHORT, Copy, change, flip
from tests.samples import read_json
from tests.test_schemas import require
from tests.test_webreport import HOSTILE, Parsed, expected_number

Cli = Callable[..., Ran]
IDS = ",".join(map(str, SHORT))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def found(ran: Ran) -> list[tuple[str, str]]:
    return [(f["code"], f["where"]) for f in ran.json()["findings"]]


# ---- what it prints and writes


def test_the_golden_file_is_what_its_schema_says(cli: Cli, trio: dict[str, Path]) -> None:
    ran = cli("probe", trio["int8"], "--ids", IDS, "--tokens", 2, "--reference", trio["official"], "--json")
    assert ran.exit_code == 0
    shown = ran.json()
    require("probe", shown)
    written = Path("int8-golden.json")
    assert shown["golden_file"] == str(written.absolute())
    golden = read_json(written)
    require("golden", golden)
    assert golden == shown["golden"] == read_golden(written)
    assert golden["prompt"] == {"ids": SHORT, "text": None, "chat": False, "pictures": []}
    assert (
        golden["checkpoint"]["manifest_sha256"] and golden["agreement"]["reference"]["layout"] == "official"
    )
    assert len(shown["layer_seconds"]) == 5 and len(shown["token_seconds"]) == 1
    assert 50 << 20 < shown["peak_bytes"] < 2 << 30
    alone = cli(
        "probe", trio["official"], "--ids", IDS, "--tokens", 1, "--json", "--golden", "other.json"
    ).json()
    require("probe", alone)
    require("golden", read_json(Path("other.json")))
    assert alone["golden"]["agreement"] is None and alone["golden"]["checkpoint"]["manifest_sha256"] is None


def test_the_page_says_what_was_run(cli: Cli, trio: dict[str, Path]) -> None:
    ran = cli("probe", trio["mxfp4"], "--ids", IDS, "--tokens", 2, "--reference", trio["official"], "-v")
    lines = ran.out.splitlines()
    assert lines[0] == "mxfp4: DeepSeek-V4 derivative, layout mxfp4, numerics exact"
    assert lines[1] == "  prompt     4 tokens: 11, 42, 7, 300"
    assert sum(line.split()[1:5] == ["equal"] * 4 for line in lines if line.startswith("  layers.")) == 5
    assert "  tokens     2 of 2 equal to the reference's" in lines
    assert sum(line.startswith("             layers.") for line in lines) == 5
    assert lines[-1] == "mxfp4-golden.json: bit-equal to plain"
    assert ran.exit_code == 0 and "done in" in ran.err


def test_nothing_golden_is_written_about_a_broken_checkpoint(
    cli: Cli, trio: dict[str, Path], copy: Copy
) -> None:
    root = copy("mxfp4")
    change(root, "layers.1.attn.wo_b.weight", flip(100, 1))
    ran = cli("probe", root, "--ids", IDS, "--tokens", 1, "--reference", trio["official"])
    assert ran.exit_code == 1 and not list(Path.cwd().iterdir())
    assert "error: `layers.1.attn`: is not bit-equal to the reference" in ran.err
    assert ran.out.splitlines()[-1] == "FAILED: 1 finding; no golden file was written"
    assert cli("probe", root, "--ids", IDS, "--tokens", 1).exit_code == 0


def test_a_checkpoint_is_left_as_it_is(cli: Cli, trio: dict[str, Path]) -> None:
    root = trio["int8"]
    before = sorted((p.name, p.stat().st_mtime_ns) for p in root.iterdir())
    inside = cli("probe", root, "--ids", IDS, "--golden", root / "golden.json")
    beside = cli(
        "probe", trio["mxfp4"], "--ids", IDS, "--reference", root, "--golden", root / "a" / "golden.json"
    )
    assert (inside.exit_code, beside.exit_code) == (2, 2) and "name another place" in inside.err
    assert cli("probe", root, "--ids", IDS, "--tokens", 1).exit_code == 0
    assert sorted((p.name, p.stat().st_mtime_ns) for p in root.iterdir()) == before


def test_golden_files_are_read_line_by_line() -> None:
    golden = {
        "a": {"b": [1, 2]},
        "steps": [{"x": "\u2028"}, {"x": 1.5}],
        "c": {"rows": [{"y": None}]},
        "d": [],
    }
    text = encode_golden(golden).decode("ascii")
    assert json.loads(text) == golden
    assert text.count("\n") == 15 and '  {"x": 1.5}\n' in text and '"b": [1, 2]' in text
    with pytest.raises(ValueError, match="Out of range"):
        encode_golden({"a": math.nan})


def test_progress_is_a_line_every_few_seconds(
    cli: Cli, trio: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["dsv4convert.cli.probe"], "_EVERY_SECONDS", 0.0)
    arguments = ("probe", trio["mxfp4"], "--ids", IDS, "--tokens", 2)
    lines = [line for line in cli(*arguments).err.splitlines() if line.startswith("probing: layers.")]
    assert len(lines) == 10 and "10 of 10 layers, 0 s left" in lines[-1]
    assert cli(*arguments, "-q").err == ""


# ---- prompts


def test_text_is_encoded_by_the_checkpoints_tokenizer(cli: Cli, trio: dict[str, Path]) -> None:
    arguments = ("probe", trio["mxfp4"], "--tokens", 1, "--json", "--prompt", "Aé")
    plain, chat = (cli(*arguments, *extra).json()["golden"] for extra in ((), ("--chat",)))
    # Bytes follow the six markers of the synthetic vocabulary.
    text = [6 + byte for byte in "Aé".encode()]
    assert plain["prompt"] == {"ids": text, "text": "Aé", "chat": False, "pictures": []}
    # Begin of text, user, the text, assistant, end of thinking.
    assert chat["prompt"] == {"ids": [0, 2, *text, 3, 5], "text": "Aé", "chat": True, "pictures": []}
    assert isinstance(plain["text"], str) and all(
        isinstance(r["text"], str) for r in plain["steps"][0]["top"]
    )


def test_markers_in_a_text_become_their_tokens(trio: dict[str, Path]) -> None:
    words = Vocabulary(trio["mxfp4"])
    assert words.encode("<｜User｜>B", chat=False) == (2, 6 + 66)
    assert words.decode([2, 6 + 66]) == "<｜User｜>B"


@pytest.mark.parametrize(
    ("ids", "code"),
    [((), "probe.prompt"), ((0, 511), None), ((0, 512), "probe.token-id"), ((-1,), "probe.token-id")],
)
def test_prompts_that_a_model_takes(ids: tuple[int, ...], code: str | None) -> None:
    prompt = Prompt(ids)
    if code is None:
        check_prompt(prompt, 512, 2)
        with pytest.raises(Refused, match="longer") as caught:
            check_prompt(prompt, 512, 1)
        code = "probe.prompt"
    else:
        with pytest.raises(Refused) as caught:
            check_prompt(prompt, 512, 2)
    assert caught.value.findings[0].code == code


# ---- refusals: each with its legal neighbour


def _remove(name: str) -> Callable[[Path], None]:
    return lambda root: (root / name).unlink()


def _without_marker(root: Path) -> None:
    tokenizer = read_json(root / "tokenizer.json")
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] != "</think>"]
    del tokenizer["model"]["vocab"]["</think>"]
    (root / "tokenizer.json").write_text(json.dumps(tokenizer))


def _large(root: Path) -> None:
    with open(root / "tokenizer.json", "r+b") as file:
        file.truncate((64 << 20) + 1)


def _context(limit: int) -> Callable[[Path], None]:
    def edit(root: Path) -> None:
        config = read_json(root / "config.json") | {"max_position_embeddings": limit}
        (root / "config.json").write_text(json.dumps(config))

    return edit


TEXT = ("--prompt", "Hello")


@pytest.mark.parametrize(
    ("edit", "wrong", "code", "status", "neighbour"),
    [
        (_remove("tokenizer.json"), TEXT, "probe.no-tokenizer", 3, ("--ids", IDS)),
        (lambda r: (r / "tokenizer.json").write_text("{}"), TEXT, "probe.tokenizer", 3, ("--ids", IDS)),
        (lambda r: (r / "tokenizer.json").write_bytes(b"\xff"), TEXT, "probe.tokenizer", 3, ("--ids", IDS)),
        (_large, TEXT, "probe.tokenizer", 3, ("--ids", IDS)),
        (_without_marker, (*TEXT, "--chat"), "probe.chat", 3, TEXT),
        (lambda r: None, ("--prompt", ""), "probe.prompt", 3, ("--prompt", "H")),
        (_context(5), ("--ids", "1,2,3,4,5"), "probe.prompt", 3, ("--ids", "1,2,3,4")),
        (lambda r: None, ("--ids", "1,512"), "probe.token-id", 3, ("--ids", "1,511")),
    ],
)
def test_what_cannot_be_asked_is_refused(
    cli: Cli,
    copy: Copy,
    edit: Callable[[Path], None],
    wrong: tuple[str, ...],
    code: str,
    status: int,
    neighbour: tuple[str, ...],
) -> None:
    root = copy("mxfp4")
    edit(root)
    ran = cli("probe", root, *wrong, "--tokens", 1, "--json")
    assert (ran.exit_code, [c for c, _ in found(ran)]) == (status, [code])
    require("error", ran.json())
    assert cli("probe", root, *neighbour, "--tokens", 1).exit_code == 0


def test_a_vocabulary_of_another_model_is_named(copy: Copy) -> None:
    root = copy("mxfp4")
    tokenizer = read_json(root / "tokenizer.json")
    tokenizer["model"]["vocab"]["A"] = 512
    (root / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(Refused, match="belongs to another model"):
        api.probe(root, "A", tokens=1)
    assert api.probe(root, "B", tokens=1).ok()


@pytest.mark.parametrize(
    "arguments",
    [(), ("--ids", IDS, "--prompt", "x"), ("--ids", "1,x"), ("--ids", ""), ("--ids", IDS, "--chat")],
)
def test_options_that_say_nothing_or_too_much(
    cli: Cli, trio: dict[str, Path], arguments: tuple[str, ...]
) -> None:
    assert cli("probe", trio["mxfp4"], *arguments).exit_code == 2


@pytest.mark.parametrize(
    "arguments", [{}, {"prompt": "x", "ids": [1]}, {"ids": [1], "chat": True}, {"ids": [1], "tokens": 0}]
)
def test_calls_that_say_nothing_or_too_much(trio: dict[str, Path], arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        api.probe(trio["mxfp4"], **arguments)
    with pytest.raises(ValueError, match="exact, bf16, sm80, official"):
        api.probe(trio["mxfp4"], ids=[1], numerics="fp8")


def test_releases_that_run_and_the_one_that_does_not(cli: Cli, sample: Callable[[str], Path]) -> None:
    for kind in ("preview", "vision", "ragged"):
        assert cli("probe", sample(kind), "--ids", IDS, "--tokens", 1).exit_code == 0
    ran = cli("probe", sample("v41"), "--ids", IDS, "--json")
    assert (ran.exit_code, found(ran)) == (3, [("probe.unsupported", "v41")])
    assert "V4.1" in ran.json()["findings"][0]["problem"]


def test_damaged_checkpoints_are_not_run(cli: Cli, copy: Copy, trio: dict[str, Path], tmp_path: Path) -> None:
    root = copy("int8")
    shard = sorted(root.glob("*.safetensors"))[3]
    with open(shard, "r+b") as file:
        file.truncate(shard.stat().st_size - 1)
    ran = cli("probe", root, "--ids", IDS, "--json")
    assert (ran.exit_code, found(ran)) == (1, [("shard.truncated", shard.name)])
    ran = cli("probe", trio["int8"], "--ids", IDS, "--reference", root, "--json")
    assert (ran.exit_code, found(ran)) == (1, [("shard.truncated", f"reference {shard.name}")])
    ran = cli("probe", tmp_path / "nowhere", "--ids", IDS, "--json")
    assert (ran.exit_code, [c for c, _ in found(ran)]) == (3, ["dir.not-found"])


def test_a_reference_of_another_model_is_refused(
    cli: Cli, trio: dict[str, Path], sample: Callable[[str], Path], copy: Copy
) -> None:
    ran = cli("probe", trio["int8"], "--ids", IDS, "--reference", sample("short"), "--json")
    assert (ran.exit_code, [c for c, _ in found(ran)]) == (1, ["reference.other"])
    root = copy("mxfp4")
    config = read_json(root / "config.json") | {"routed_scaling_factor": 2.5}
    (root / "config.json").write_text(json.dumps(config))
    ran = cli("probe", trio["int8"], "--ids", IDS, "--reference", root, "--json")
    (wrong,) = ran.json()["findings"]
    assert wrong["code"] == "reference.other" and "`route_scale`" in wrong["problem"]
    assert (wrong["expected"], wrong["found"]) == ("1.5", "2.5")


def test_a_missing_library_is_named_with_a_way_around(
    trio: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "tokenizers" else real(name, *rest)
    )
    with pytest.raises(EnvironmentFault) as caught:
        api.probe(trio["mxfp4"], "x")
    assert "[probe]" in caught.value.findings[0].hint and "--ids" in caught.value.findings[0].hint
    answer = api.probe(trio["mxfp4"], ids=SHORT, tokens=1).golden
    assert answer["text"] is None and answer["steps"][0]["top"][0]["text"] is None


# ---- golden files as others read them


@pytest.fixture(scope="module")
def golden(trio: dict[str, Path]) -> dict[str, Any]:
    """Return the golden content of a probe of the int8 conversion; not to be changed."""
    return api.probe(trio["int8"], "Hi", tokens=3, reference=trio["official"]).golden


def _set(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(tree: Any) -> None:
        for key in path[:-1]:
            tree = tree[key]
        tree[path[-1]] = value

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        _set("schema", value="dsv4convert-golden-0"),
        _set("checkpoint", value=[]),
        _set("checkpoint", "headers_sha256", value=None),
        _set("prompt", "ids", value=[]),
        _set("prompt", "ids", value=[True]),
        _set("prompt", "chat", value=0),
        _set("numerics", value=None),
        _set("text", value=3),
        _set("steps", value=[]),
        _set("steps", 1, "margin", value="wide"),
        _set("steps", 1, "token", value=1.5),
        _set("steps", 1, "top", value=[]),
        _set("steps", 1, "top", 0, "logprob", value=None),
        _set("agreement", value=[]),
        _set("agreement", "reference", value="plain"),
        _set("agreement", "layers", 2, "routed", value=None),
        _set("agreement", "layers", 2, "picked", value="all"),
    ],
)
def test_a_golden_file_with_something_else_in_it_is_refused(
    golden: dict[str, Any], edit: Callable[[dict[str, Any]], None]
) -> None:
    tree = json.loads(json.dumps(golden))
    Path("g.json").write_bytes(encode_golden(tree))
    assert read_golden(Path("g.json")) == golden
    edit(tree)
    Path("g.json").write_text(json.dumps(tree))
    with pytest.raises(Refused) as caught:
        read_golden(Path("g.json"))
    assert caught.value.findings[0].code == "golden.not-json"


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"schema": NaN}', b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_golden_file_is_refused(raw: bytes) -> None:
    Path("g.json").write_bytes(raw)
    with pytest.raises(Refused) as caught:
        read_golden(Path("g.json"))
    assert caught.value.findings[0].code == "golden.not-json"
    with pytest.raises(EnvironmentFault):
        read_golden(Path("absent.json"))


def test_every_number_of_the_page_is_in_the_golden_file(
    cli: Cli, trio: dict[str, Path], golden: dict[str, Any]
) -> None:
    plain = make_page(trio["int8"]).html
    Path("int8-golden.json").write_bytes(encode_golden(golden))
    ran = cli("report", trio["int8"])
    assert ran.exit_code == 0 and "showing int8-golden.json" in ran.err
    html = Path("int8-report.html").read_text(encoding="utf-8")
    page = Parsed(html)
    manifest = read_json(trio["int8"] / "dsv4convert.json")
    cited = [row for row in page.cited if "golden:" in row[1]]
    assert len(cited) == 1 + 3 * 3 + 2 + 1 + 5 * 5 + 2
    assert [r for r in page.cited if json.loads(r[0]) != expected_number(r[1], manifest, golden)] == []
    assert page.uncited == []
    # Everything else is the page as it is without a golden file.
    assert make_page(trio["int8"]).html == plain and "What it answered" not in plain
    assert "What it answered" in page.text


def test_text_of_a_golden_file_is_no_markup(trio: dict[str, Path], golden: dict[str, Any]) -> None:
    tree = json.loads(json.dumps(golden))
    tree["prompt"]["text"] = tree["text"] = tree["numerics"] = HOSTILE
    tree["steps"][0]["top"][0]["text"] = tree["agreement"]["layers"][0]["layer"] = HOSTILE
    tree["agreement"]["reference"]["name"] = HOSTILE
    Path("g.json").write_text(json.dumps(tree))
    page = make_page(trio["int8"], golden=Path("g.json")).html
    assert (
        "<script" not in page
        and "<img" not in page
        and "\u202e" not in page
        and "49" not in Parsed(page).text.split()
    )


def test_a_golden_file_of_another_checkpoint_is_refused(
    cli: Cli, trio: dict[str, Path], golden: dict[str, Any]
) -> None:
    for key in ("headers_sha256", "manifest_sha256"):
        tree = json.loads(json.dumps(golden))
        tree["checkpoint"][key] = "0" * 64
        Path("g.json").write_text(json.dumps(tree))
        ran = cli("report", trio["int8"], "--golden", "g.json", "--json")
        assert (ran.exit_code, [c for c, _ in found(ran)]) == (3, ["golden.other"])


# ---- where results go

#: Command -> what asks it to write a file, whose name comes next.
WRITES = {"probe": ("--ids", "1", "--golden"), "report": ("-o",), "converted": ("--save",)}


@pytest.mark.parametrize("place", ["pipe", "folder", "missing/x.json"])
@pytest.mark.parametrize("command", ["probe", "report", "converted"])
def test_a_place_that_cannot_take_a_file_is_refused_first(
    cli: Cli, trio: dict[str, Path], command: str, place: str
) -> None:
    """A pipe, like a device, would be replaced by the rename that makes writing safe."""
    os.mkfifo("pipe")
    Path("folder").mkdir()
    ran = cli(command, trio["int8"], *WRITES[command], place)
    assert ran.exit_code == (4 if "/" in place else 2) and place in ran.err
    assert stat.S_ISFIFO(os.stat("pipe").st_mode) and sorted(os.listdir()) == ["folder", "pipe"]


@pytest.mark.parametrize("command", WRITES)
@pytest.mark.parametrize("name", ["dsv4convert.json", "new.json"])
def test_no_result_is_written_into_a_checkpoint(cli: Cli, copy: Copy, command: str, name: str) -> None:
    """It would replace a file of it, or be one that the manifest does not know."""
    root = copy("int8")
    before = {path.name: path.stat() for path in root.iterdir()}
    ran = cli(command, root, *WRITES[command], root / name)
    assert ran.exit_code == 2 and f"{name}` would lie in" in ran.err
    assert {path.name: path.stat() for path in root.iterdir()} == before
    beside = root.parent / f"{root.name}-{name}"
    assert cli(command, root, *WRITES[command], beside).exit_code == 0 and beside.is_file()


def test_an_older_golden_file_is_replaced_or_set_aside(cli: Cli, copy: Copy) -> None:
    root = copy("mxfp4")
    ask = ("probe", root, "--ids", IDS, "--tokens", 1, "--golden", "g.json")
    assert cli(*ask).exit_code == 0
    first = Path("g.json").read_bytes()
    assert cli(*ask).exit_code == 0 and sorted(os.listdir()) == ["g.json"]
    change(root, "layers.1.attn.wo_b.weight", flip(0, 1))
    ran = cli(*ask, "--reference", copy("official"))
    assert ran.exit_code == 1
    assert ran.out.endswith("FAILED: 1 finding; no golden file was written; an older one is now g.json.old\n")
    assert os.listdir() == ["g.json.old"] and len(Path("g.json.old").read_bytes()) == len(first)


def test_an_answer_is_shown_before_it_is_written(
    cli: Cli, trio: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise EnvironmentFault(finding("io.write", "x", "no space left"))

    monkeypatch.setattr("dsv4convert.writer.write_bytes", full)
    ran = cli("probe", trio["int8"], "--ids", IDS, "--tokens", 1)
    assert ran.exit_code == 4 and "probability" in ran.out


def test_zeros_before_an_id_are_no_other_id(cli: Cli, trio: dict[str, Path]) -> None:
    ran = cli("probe", trio["int8"], "--ids", f"{'0' * 30}7,0,00", "--tokens", 1, "--json")
    assert ran.json()["golden"]["prompt"]["ids"] == [7, 0, 0]


def test_names_and_bytes_that_are_no_text(cli: Cli, trio: dict[str, Path]) -> None:
    ran = cli("probe", trio["int8"], "--ids", "1", "--tokens", 1, "--golden", "e\x1b[31m.json")
    assert ran.exit_code == 0 and "\x1b" not in ran.out and "1 token;" in ran.out
    ran = cli("probe", trio["int8"], "--prompt", "a\udcff", "--json")
    assert ran.exit_code == 3 and found(ran) == [("probe.prompt", "prompt")]


def test_a_checkpoint_is_no_reference_of_itself(cli: Cli, trio: dict[str, Path]) -> None:
    ran = cli("probe", trio["int8"], "--ids", "1", "--reference", trio["int8"])
    assert ran.exit_code == 2 and "--reference is DST itself" in ran.err
