"""The report page: its numbers are those of the manifest, nothing gets into it as markup, it refuses."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from itertools import pairwise
from math import fsum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from dsv4convert import api
from dsv4convert.webreport import make_page
from dsv4convert.webreport.cited import error, share
from dsv4convert.webreport.figures import heat_class, short_number
from tests.conftest import Ran
from tests.samples import INDEX, MANIFEST, make_served, read_json

ROOT = Path(__file__).resolve().parent.parent
HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7*7 }}&amp;\u202e\x1b"


@pytest.fixture(scope="module")
def made(sample: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return ``made(kind)``: a conversion, made once; not to be changed.

    ``int8`` and ``mxfp4`` come from the shortest sample, ``twice`` from that ``mxfp4``, ``served`` from a
    source that GPUs can share.
    """
    root = tmp_path_factory.mktemp("report")

    def make(kind: str) -> Path:
        if not (root / kind).exists():
            if kind == "served":
                source = make_served(root / "source")
            else:
                source = make("mxfp4") if kind == "twice" else sample("short")
            api.convert(source, root / kind, experts="mxfp4" if kind == "mxfp4" else "int8")
        return root / kind

    return make


@pytest.fixture
def copy(made: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a copy of the int8 conversion that a test may break."""
    return Path(shutil.copytree(made("int8"), tmp_path / "model"))


def edit(root: Path, change: Callable[[Any], object]) -> None:
    """Change the manifest."""
    tree = read_json(root / MANIFEST)
    change(tree)
    (root / MANIFEST).write_text(json.dumps(tree))


class Parsed(HTMLParser):
    """A page as lists: elements with attributes, cited numbers, and digits of cells outside of them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.cited: list[tuple[str, str, str]] = []
        self.uncited: list[str] = []
        self.text = ""
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self._open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        tags = [tag for tag, _ in self._open]
        if tags and tags[-1] == "data":
            attributes = self._open[-1][1]
            self.cited.append((attributes["value"] or "", attributes["data-source"] or "", data))
        elif "td" in tags or "dd" in tags:
            sourced = any("data-source" in attributes for _, attributes in self._open)
            if re.search(r"\d", data) and "code" not in tags and not sourced:
                self.uncited.append(data)


def look_up(tree: Any, keys: list[str]) -> Iterator[Any]:
    """Yield every value that a pointer with `*` names."""
    if not keys:
        yield tree
    elif isinstance(tree, dict):
        for name in tree:
            if fnmatch.fnmatchcase(name, keys[0]):
                yield from look_up(tree[name], keys[1:])
    elif isinstance(tree, list):
        first = 0 if keys[0] == "*" else int(keys[0].removesuffix(".."))
        pooled = keys[0] == "*" or keys[0].endswith("..")
        for item in tree[first:] if pooled else tree[first : first + 1]:
            yield from look_up(item, keys[1:])


WORK: dict[str, Callable[[list[Any]], Any]] = {
    "": lambda values: values[0] if len(values) == 1 else pytest.fail(f"{len(values)} values"),
    "sum": sum,
    "count": len,
    "zeros": lambda values: values.count(0),
    "max": max,
    "mean": lambda values: fsum(values) / len(values),
}


def expected_number(source: str, manifest: Any, golden: Any = None) -> Any:
    """Look a source up, by the rules that `docs/report.md` gives to readers."""
    work, slash, pointer = source.partition("/")
    assert slash, source
    keys = [key.replace("~1", "/").replace("~0", "~") for key in pointer.split("/")]
    tree = golden if "golden:" in work else manifest
    return WORK[work.replace("golden:", "").strip()](list(look_up(tree, keys)))


@pytest.mark.parametrize(("layout", "numbers"), [("int8", 150), ("mxfp4", 40), ("served", 450)])
def test_every_number_is_in_the_manifest(made: Callable[[str], Path], layout: str, numbers: int) -> None:
    page = Parsed(make_page(made(layout)).html)
    manifest = read_json(made(layout) / MANIFEST)
    wrong = [
        (value, source)
        for value, source, text in page.cited
        if json.loads(value) != expected_number(source, manifest)
    ]
    assert wrong == []
    assert len(page.cited) > numbers
    assert page.uncited == []
    plain = [(value, text) for value, _, text in page.cited if re.fullmatch(r"[\d,]+", text)]
    assert [pair for pair in plain if f"{int(float(pair[0])):,}" != pair[1]] == []


def test_numbers_that_differ_are_noticed(made: Callable[[str], Path]) -> None:
    manifest = read_json(made("int8") / MANIFEST)
    manifest["output"]["tensors"] += 1
    page = Parsed(make_page(made("int8")).html)
    value = next(value for value, source, _ in page.cited if source == "/output/tensors")
    assert json.loads(value) != expected_number("/output/tensors", manifest)
    assert Parsed("<td>12</td>").uncited == ["12"]


def test_spans_are_the_rows_that_are_not_zero(made: Callable[[str], Path]) -> None:
    rows = [t["figures"] for t in read_json(made("int8") / MANIFEST)["tensors"].values() if "figures" in t]
    assert rows and all(sum(r["spans"]) == r["rows"] - r["zero_rows"] for r in rows)
    assert all(len(r["spans"]) == r["max_span"] + 1 and sum(r["spans"][4:]) == r["wide_rows"] for r in rows)


def test_budget_of_the_page_is_the_plans_and_adds_up(
    made: Callable[[str], Path], cli: Callable[..., Ran]
) -> None:
    manifest = read_json(made("served") / MANIFEST)
    plan = cli("plan", made("served").parent / "source", "--tp", 4, "--tp", 8, "--json").json()
    page = Parsed(make_page(made("served")).html)
    for size in ("4", "8"):
        row = manifest["memory"][size]
        budget, own = row["budget"], plan["gpu_memory"][size]
        assert own.pop("fits") in (True, False) and budget == own
        assert row["weight_bytes"] == plan["weight_bytes_per_gpu"][size] and row["cuts"] == []
        pools = budget["pool_bytes"]
        fixed = row["weight_bytes"] + budget["rope_table_bytes"]
        assert row["weight_bytes"] == sum(budget["weight_bytes"].values()) + budget["draft_bytes"]
        free = budget["card_bytes"] - budget["runtime_bytes"]
        assert budget["left_bytes"] == free - fixed - sum(pools.values())
        room = budget["mem_fraction_static"] * free - fixed - pools["c128_state"]
        assert budget["max_total_num_tokens"] == int(room / budget["bytes_per_token"]) // 256 * 256 > 0
        shown = {source for _, source, _ in page.cited}
        parts = {f"{key}/{name}" for key, held in budget.items() if isinstance(held, dict) for name in held}
        parts |= {key for key, held in budget.items() if not isinstance(held, dict)}
        assert {f"/memory/{size}/budget/{part}" for part in parts} <= shown


def test_model_without_a_budget_has_weights_and_a_reason(made: Callable[[str], Path]) -> None:
    page = Parsed(make_page(made("int8")).html)
    assert all(row["budget"] is None for row in read_json(made("int8") / MANIFEST)["memory"].values())
    assert "no budget is known" in page.text
    assert not any("/budget/" in source for _, source, _ in page.cited)


def splits(root: Path) -> dict[str, list[str]]:
    """Return the cells of the table of splits: its first column -> the others."""
    table = make_page(root).html.split('<h2 id="memory">')[1].split("</table>")[0]
    rows = re.findall(r"<tr><th scope=\"row\">(TP \d+)</th>(.*?)</tr>", table, re.DOTALL)
    return {
        name: [
            Parsed(f"<td>{cell}</td>").text for cell in re.findall(r"<td[^>]*>(.*?)</td>", cells, re.DOTALL)
        ]
        for name, cells in rows
    }


def test_impossible_split_is_not_said_to_leave_room(made: Callable[[str], Path]) -> None:
    cut, whole = splits(made("int8")), splits(made("served"))
    # A weight of a card that no split leads to would be a number about nothing.
    assert cut["TP 4"] == [
        *("none", "impossible", "impossible"),
        # 256 columns are two groups of 128, and two groups of heads.
        "routed experts w2 cannot be split over 4 GPUs in groups of 128 along K; "
        "output groups of wo_a cannot be split over 4 GPUs in whole groups",
    ]
    assert cut["TP 8"][:3] == ["none", "impossible", "impossible"]
    assert "attention heads cannot be split over 8 GPUs in whole heads" in cut["TP 8"][3]
    for size in ("TP 4", "TP 8"):
        weights, *others = whole[size]
        assert re.fullmatch(r"\d+\.\d\d MiB", weights)
        assert others == [*("leaves room", "leaves room"), "on borders of blocks and groups"]


def test_plan_has_no_weight_for_a_split_that_is_impossible(
    made: Callable[[str], Path], sample: Callable[[str], Path], cli: Callable[..., Ran]
) -> None:
    made("served")
    cut, whole = (cli("plan", source) for source in (sample("short"), made("served").parent / "source"))
    assert cut.exit_code == whole.exit_code == 0
    assert re.findall(r"^  TP[48] .*", cut.out, re.M) == [
        f"  TP{size}        cannot be split: `--tp {size}` says why" for size in (4, 8)
    ]
    weights = re.findall(r"^  TP([48]) {8}\d+\.\d\d GiB of weights per GPU$", whole.out, re.M)
    assert weights == ["4", "8"] and "cannot be split" not in whole.out


@pytest.mark.parametrize("option", ["--reference-report", "--golden"])
def test_page_does_not_replace_what_it_is_made_from(
    copy: Path, checked: Path, cli: Callable[..., Ran], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy.parent)
    before = checked.read_bytes()
    Path("link.json").symlink_to(checked)
    for output, file in (("check.json", checked), (checked, "link.json"), ("model/../check.json", checked)):
        ran = cli("report", copy, "-o", output, option, file)
        assert (ran.exit_code, ran.out) == (2, "") and "is what the page is to show" in ran.err
    assert checked.read_bytes() == before
    told = cli("report", copy, "-o", "check.json", option, checked, "--json")
    assert told.json()["findings"][0]["code"] == "cli.usage"
    # The golden file that is found here by its name is one, too.
    shutil.copy(checked, "model-golden.json")
    assert cli("report", copy, "-o", "model-golden.json").exit_code == 2
    assert Path("model-golden.json").read_bytes() == before
    Path("model-golden.json").unlink()
    assert cli("report", copy, "-o", "page.html", "--reference-report", checked).exit_code == 0


@pytest.mark.parametrize("layout", ["mxfp4", "int8"])
def test_plan_and_page_count_the_same_files(
    made: Callable[[str], Path], sample: Callable[[str], Path], cli: Callable[..., Ran], layout: str
) -> None:
    """The second conversion starts from our own output, whose model card is replaced and not copied."""
    source = sample("short") if layout == "mxfp4" else made("mxfp4")
    target = made("mxfp4") if layout == "mxfp4" else made("twice")
    planned = re.search(
        r", (\d+) other files copied, config\.json written anew$",
        cli("plan", source, "--experts", layout).out,
        re.M,
    )
    shown = re.search(r"other files</th><td>(.*?): (.*?)</td>", make_page(target).html)
    assert planned and shown and "config.json" in shown[2]
    assert int(Parsed(shown[1]).text) == int(planned[1]) + 1
    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    own = {"README.md", MANIFEST, INDEX, "config.json"}
    assert int(planned[1]) == sum(name not in own and not name.endswith(".safetensors") for name in names)


def test_card_that_is_too_small_shows_what_is_missing(made: Callable[[str], Path], tmp_path: Path) -> None:
    root = Path(shutil.copytree(made("served"), tmp_path / "model"))
    edit(root, lambda m: m["memory"]["8"]["budget"].update(left_bytes=-3 << 30))
    page = Parsed(make_page(root).html)
    assert ("-3221225472", "/memory/8/budget/left_bytes", "-3.00 GiB") in page.cited


@pytest.mark.parametrize("layout", ["int8", "mxfp4", "served"])
def test_manifest_is_what_its_schema_says(made: Callable[[str], Path], layout: str) -> None:
    schema = read_json(ROOT / "docs" / "schemas" / "manifest.schema.json")
    jsonschema.validate(read_json(made(layout) / MANIFEST), schema)


def test_page_is_the_same_twice_and_loads_nothing(made: Callable[[str], Path]) -> None:
    html = make_page(made("int8")).html
    assert html == make_page(made("int8")).html
    page = Parsed(html)
    loads = [a[k] for _, a in page.elements for k in ("src", "href", "xlink:href", "srcset") if k in a]
    assert loads == ["data:,"]
    assert re.findall(r"https?://[^\"' ]+|url\(|@import", html) == ["http://www.w3.org/2000/svg"] * 2
    assert "default-src 'none'" in html


def test_page_can_be_read_without_eyes(made: Callable[[str], Path]) -> None:
    page = Parsed(make_page(made("int8")).html)
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    assert [a["lang"] for tag, a in page.elements if tag == "html"] == ["en"]
    assert all(a.get("scope") for tag, a in page.elements if tag == "th")
    pictures = [a for _, a in page.elements if a.get("role") == "img"]
    assert len(pictures) == 2 and all(len(a["aria-label"] or "") > 40 for a in pictures)
    assert {a.get("aria-hidden") for tag, a in page.elements if tag == "svg"} == {"true"}
    assert {a["aria-labelledby"] for _, a in page.elements if "aria-labelledby" in a} <= set(ids)
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def _luminance(colour: str) -> float:
    digits = colour * 2 if len(colour) == 3 else colour
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    r, g, b = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_text_stands_out_in_light_dark_and_print() -> None:
    css = (ROOT / "dsv4convert" / "webreport" / "page.css").read_text()
    modes = [
        dict(re.findall(r"--([\w-]+): #(\w+);", block)) for block in re.findall(r":root \{(.*?)\}", css, re.S)
    ]
    assert len(modes) == 3
    for mode in modes:
        paper = _luminance(mode["paper"])
        for name in ("ink", "soft", "accent", "good", "warn", "bad"):
            light, dark = sorted((paper, _luminance(mode[name])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (name, mode[name])
        # The eight classes of the heat map get darker, or lighter, all the way.
        heat = [_luminance(mode[f"heat-{i}"]) for i in range(1, 8)]
        assert heat == sorted(heat, reverse=mode is not modes[1])


# ---- hostile input


def _poison(tree: dict[str, Any]) -> None:
    tree["source"] |= {"title": HOSTILE, "release": HOSTILE, "revision": HOSTILE}
    tree["plan"] |= {"packing": HOSTILE, "rounding": HOSTILE, "writer_version": HOSTILE, "digest": HOSTILE}
    tree["tool"] |= {"name": HOSTILE, "version": "\ud800"}
    tree["run"] |= {"python": HOSTILE, "machine": HOSTILE, "libraries": {HOSTILE: HOSTILE}}
    tree["roles"] = {HOSTILE: next(iter(tree["roles"].values()))}
    tree["rounded"] = [{"code": HOSTILE, "tensor": HOSTILE, "found": HOSTILE}]
    tree["output"]["files_sha256"] = {HOSTILE: HOSTILE}
    tree["tensors"][HOSTILE] = next(iter(tree["tensors"].values()))


def test_nothing_hostile_becomes_markup(
    made: Callable[[str], Path], copy: Path, cli: Callable[..., Ran]
) -> None:
    hostile = copy.rename(copy.parent / "<b onclick=x>'\"&`$(x)")
    edit(hostile, _poison)
    assert cli("report", hostile, "-o", copy.parent / "page.html").exit_code == 1
    html = (copy.parent / "page.html").read_bytes().decode()
    page, clean = Parsed(html), Parsed(make_page(made("int8")).html)
    assert {tag for tag, _ in page.elements} - {tag for tag, _ in clean.elements} <= {"li", "b", "h4"}
    attributes = {name for _, a in page.elements for name in a}
    assert attributes <= {name for _, a in clean.elements for name in a}
    assert not any(tag in ("script", "img", "b") and a for tag, a in page.elements)
    assert "{{ 7*7 }}" in page.text and "<script>alert(1)</script>" in page.text
    assert not set(html) & {"\u202e", "\x1b"}


def test_hostile_saved_check_becomes_no_markup(copy: Path, cli: Callable[..., Ran], tmp_path: Path) -> None:
    saved = cli("converted", copy, "--json").json()
    row = dict.fromkeys(("code", "where", "problem", "expected", "found", "hint"), HOSTILE)
    saved |= {"subject": HOSTILE, "title": HOSTILE, "checked": [HOSTILE], "not_checked": [f"`{HOSTILE}`"]}
    saved |= {"ok": False, "errors": 1, "findings": [row | {"severity": "error"}]}
    (tmp_path / "check.json").write_text(json.dumps(saved))
    html = make_page(copy, [tmp_path / "check.json"]).html
    page = Parsed(html)
    assert not any(tag in ("script", "img") for tag, _ in page.elements)
    assert "FAILED: 1 error" in page.text
    ran = cli("report", copy, "-o", tmp_path / "page.html", "--reference-report", tmp_path / "check.json")
    assert ran.exit_code == 1 and HOSTILE not in ran.err and not set(ran.err) & {"\u202e", "\x1b"}


# ---- saved checks


def test_saved_check_is_shown(
    copy: Path, sample: Callable[[str], Path], cli: Callable[..., Ran], tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_text(cli("converted", copy, "--json", "--read-data").out)
    full = cli("converted", copy, "--reference", sample("short"), "--json", "--read-data")
    (tmp_path / "b.json").write_text(full.out)
    target = tmp_path / "page.html"
    saved = ("--reference-report", tmp_path / "a.json", "--reference-report", tmp_path / "b.json")
    ran = cli("report", copy, "-o", target, *saved)
    assert (ran.exit_code, ran.err) == (0, "")
    when = re.fullmatch(
        r".*; (contents verified \(check of model, 20\d\d-\d\d-\d\d \d\d:\d\d UTC\))\n", ran.out
    )
    text = Parsed(target.read_text()).text
    assert when and when[1] in text and text.count("contents verified (") == 3  # the head and both checks
    assert "contents: all tensors recomputed from the reference" in text
    assert "whether the conversion was right" in text


def test_saved_check_that_failed_fails_the_command(
    copy: Path, cli: Callable[..., Ran], tmp_path: Path
) -> None:
    shard = sorted(copy.glob("*.safetensors"))[-1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (tmp_path / "bad.json").write_text(cli("converted", copy, "--json", "--read-data").out)
    shard.write_bytes(whole)
    (tmp_path / "good.json").write_text(cli("converted", copy, "--json", "--read-data").out)
    page = ("report", copy, "-o", tmp_path / "page.html", "--reference-report")
    ran = cli(*page, tmp_path / "good.json", page[-1], tmp_path / "bad.json")
    assert (ran.exit_code, ran.err.count("[content.hash]")) == (1, 1)
    # The shard was written after the check that found it damaged.
    assert re.search(
        r"; FAILED: 1 error, 1 warning \(check of model, .* UTC, not of the files here\)\n$", ran.out
    )
    told = cli(*page, tmp_path / "bad.json", "--json")
    assert (told.exit_code, told.json()["ok"]) == (1, False)
    assert [row["code"] for row in told.json()["findings"]] == ["content.hash", "report.elsewhere"]
    assert cli(*page, tmp_path / "good.json").exit_code == 0


@pytest.fixture
def checked(copy: Path, cli: Callable[..., Ran], tmp_path: Path) -> Path:
    """Return a saved check of the whole contents of `copy`."""
    ran = cli("converted", copy, "--json", "--read-data")
    assert ran.exit_code == 0
    (tmp_path / "check.json").write_text(ran.out)
    return tmp_path / "check.json"


@pytest.fixture
def report_when(copy: Path, checked: Path, cli: Callable[..., Ran]) -> Callable[..., Ran]:
    """Return ``report_when(**said)``, which shows a saved check that says something else there."""

    def run(**said: object) -> Ran:
        checked.write_text(json.dumps(read_json(checked) | said))
        return cli("report", copy, "-o", copy.parent / "page.html", "--reference-report", checked)

    return run


def _damage(root: Path) -> None:
    shard = sorted(root.glob("*.safetensors"))[-1]
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def _copied(root: Path) -> Path:
    """Return a damaged copy under the same name and with the same times, as `cp -a` makes it."""
    other = Path(shutil.copytree(root, root.parent / "elsewhere" / root.name))
    times = {path.name: path.stat() for path in other.iterdir()}
    _damage(other)
    for name, status in times.items():
        os.utime(other / name, ns=(status.st_atime_ns, status.st_mtime_ns))
    return other


def _changed(root: Path) -> Path:
    _damage(root)
    return root


def _overwritten(root: Path) -> Path:
    """Put a damaged shard over a checked one as `cp -p` does: same inode, size and modification time."""
    shard = sorted(root.glob("*.safetensors"))[-1]
    before = shard.stat()
    other = Path(shutil.copytree(root, root.parent / "damaged"))
    _damage(other)
    os.utime(other / shard.name, ns=(before.st_atime_ns, before.st_mtime_ns))
    subprocess.run(["cp", "-p", other / shard.name, shard], check=True)
    after = shard.stat()
    known = ("st_ino", "st_dev", "st_size", "st_mtime_ns")
    assert [getattr(after, key) for key in known] == [getattr(before, key) for key in known]
    return root


def _renamed(root: Path) -> Path:
    return root.rename(root.parent / "renamed")


def _touched(root: Path) -> Path:
    (root / "LICENSE").touch()
    return root


def _read(root: Path) -> Path:
    """Copy from the checked files: reading leaves them what they were."""
    shutil.copytree(root, root.parent / "copied")
    return root


@pytest.mark.parametrize("change", [_copied, _changed, _overwritten])
def test_check_of_other_files_verifies_nothing_here(
    copy: Path, checked: Path, cli: Callable[..., Ran], change: Callable[[Path], Path]
) -> None:
    root, target = change(copy), copy.parent / "page.html"
    ran = cli("report", root, "-o", target, "--reference-report", checked)
    assert (ran.exit_code, ran.err.count("[report.elsewhere]")) == (0, 1)
    assert ran.out.endswith("; structure OK, contents not verified\n")
    page = make_page(root, [checked])
    assert page.overall == page.checks[0] and page.checks[1].state == "warning"
    assert re.findall(r"contents verified[^<\n]*", Parsed(page.html).text) == [
        f"contents verified, 1 warning (check of model, {_when(checked)}, not of the files here)"
    ]
    # What it says is so: a check of these files finds the damage.
    assert "[content.hash]" in cli("converted", root, "--read-data", "-q").err


def _when(saved: Path) -> str:
    date, time = read_json(saved)["facts"]["contents_at"].split("T")
    return f"{date} {time[:5]} UTC"


@pytest.mark.parametrize("change", [_renamed, _touched, _read])
def test_check_of_these_files_counts_under_another_name(
    copy: Path, checked: Path, cli: Callable[..., Ran], change: Callable[[Path], Path]
) -> None:
    root, target = change(copy), copy.parent / "page.html"
    ran = cli("report", root, "-o", target, "--reference-report", checked)
    assert (ran.exit_code, ran.err) == (0, "")
    assert ran.out.endswith(f"; contents verified (check of model, {_when(checked)})\n")


def test_equal_inode_numbers_of_another_file_system_are_other_files(
    copy: Path, checked: Path, cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two freshly filled file systems number their files alike; `cp -a` sets the times back."""
    stat, moved = os.stat, 0

    def elsewhere(path: Any, **options: Any) -> Any:
        status = stat(path, **options)
        if not str(path).endswith(".safetensors"):
            return status
        fields = {key: getattr(status, key) for key in dir(status) if key.startswith("st_")}
        return SimpleNamespace(**fields | {"st_dev": status.st_dev + moved})

    monkeypatch.setattr(os, "stat", elsewhere)
    page = ("report", copy, "-o", copy.parent / "page.html", "--reference-report", checked)
    assert "; contents verified (check of model" in cli(*page).out
    moved = 1
    ran = cli(*page)
    assert ran.out.endswith("; structure OK, contents not verified\n") and "[report.elsewhere]" in ran.err


@pytest.mark.parametrize("change", [lambda shard: shard.chmod(0o600), lambda shard: os.link(shard, "link")])
def test_harmless_change_of_status_is_only_a_warning(
    copy: Path,
    checked: Path,
    cli: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], object],
) -> None:
    monkeypatch.chdir(copy.parent)
    change(sorted(copy.glob("*.safetensors"))[0])
    ran = cli("report", copy, "-o", "page.html", "--reference-report", checked)
    assert (ran.exit_code, ran.err.count("[report.elsewhere]")) == (0, 1)


def test_check_that_does_not_say_of_which_files_it_is_can_be_read(
    copy: Path, checked: Path, cli: Callable[..., Ran]
) -> None:
    """As saved by earlier versions; one that says nothing about contents has nothing to say of files."""
    saved = read_json(checked)
    for key in ("identity_sha256", "contents_at"):
        del saved["facts"][key]
    page = ("report", copy, "-o", copy.parent / "page.html", "--reference-report", checked)
    checked.write_text(json.dumps(saved))
    ran = cli(*page)
    assert ran.exit_code == 0 and ran.out.endswith("; structure OK, contents not verified\n")
    assert "does not say in which files it compared contents" in ran.err
    (quoted,) = make_page(copy, [checked]).checks[1:]
    assert quoted.verdict == "contents verified, 1 warning (check of model, undated, of unknown files)"
    checked.write_text(json.dumps(saved | {"contents_percent": None}))
    assert (cli(*page).exit_code, cli(*page).err) == (0, "")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("contents_at", "yesterday"),
        ("contents_at", 7),
        ("contents_at", "2026-99-99T99:99:99Z"),
        ("contents_at", "2026-2-29T01:02:03Z"),
        ("contents_at", "2026-11-30 01:02:03"),
        ("identity_sha256", ["x"]),
        ("identity_sha256", None),
        ("identity_sha256", "\x1b]0;owned\x07" + "0" * 64),
        ("identity_sha256", "A" * 64),
        ("manifest_sha256", 1),
        ("manifest_sha256", "\x1b[2J" + "0" * 59),
    ],
)
def test_saved_check_whose_files_or_time_are_none_is_refused(
    copy: Path, checked: Path, cli: Callable[..., Ran], key: str, value: object
) -> None:
    saved = read_json(checked)
    saved["facts"][key] = value
    checked.write_text(json.dumps(saved))
    ran = cli("report", copy, "-o", copy.parent / "page.html", "--reference-report", checked)
    assert (ran.exit_code, ran.err.count("[report.not-json]")) == (3, 1)
    assert f"expected `facts.{key}`: " in ran.err and not set(ran.err) & {"\x1b", "\x07"}


def test_saved_check_that_says_of_which_files_says_when(
    copy: Path, checked: Path, cli: Callable[..., Ran]
) -> None:
    saved = read_json(checked)
    del saved["facts"]["contents_at"]
    page = ("report", copy, "-o", copy.parent / "page.html", "--reference-report", checked)
    checked.write_text(json.dumps(saved))
    ran = cli(*page)
    assert ran.exit_code == 3 and "`facts.contents_at`: a time" in ran.err and "found no such key" in ran.err
    checked.write_text(json.dumps(saved | {"contents_percent": None}))  # Structure alone has no time.
    assert cli(*page).exit_code == 0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"100"', '"100"'),
        ("1" + "0" * 400, "1" + "0" * 59 + "…"),
        ("true", "true"),
        ("1e999", "Infinity"),
        ("-1", "-1"),
        ("0", "0"),
        ("100.00000001", "100.00000001"),
        ("[100]", "a list"),
    ],
)
def test_saved_check_of_an_impossible_share_is_refused(
    copy: Path, checked: Path, cli: Callable[..., Ran], text: str, found: str
) -> None:
    saved = checked.read_text()
    assert '"contents_percent": 100' in saved
    checked.write_text(re.sub(r'"contents_percent": [\d.]+', f'"contents_percent": {text}', saved))
    ran = cli("report", copy, "-o", copy.parent / "page.html", "--reference-report", checked)
    expected = "`contents_percent`: a number above 0 and up to 100, or null"
    assert (ran.exit_code, ran.out) == (3, "") and f"expected {expected}, found {found}   [" in ran.err


@pytest.mark.parametrize("percent", [100, 12.5, 1, 1e-320])
def test_saved_check_of_a_possible_share_is_taken_as_it_is(copy: Path, checked: Path, percent: float) -> None:
    checked.write_text(json.dumps(read_json(checked) | {"contents_percent": percent}))
    contents = make_page(copy, [checked]).checks[1].contents
    assert type(contents) is float and contents == percent


_ROW = dict.fromkeys(("code", "where", "problem", "expected", "found", "hint"), "x")
_ERROR, _WARNING = _ROW | {"severity": "error"}, _ROW | {"severity": "warning"}


@pytest.mark.parametrize(
    ("rows", "errors", "warnings", "ok"),
    [
        ([], 5, 0, False),
        ([], 0, 0, False),
        ([], 0, 1, True),
        ([_ERROR], 0, 0, True),
        ([_ERROR], 1, 0, True),
        ([_WARNING], 1, 0, False),
        ([], False, 0, True),
        ([], 0, 0, 1),
    ],
)
def test_saved_check_that_contradicts_itself_is_refused(
    report_when: Callable[..., Ran], rows: list[dict[str, str]], errors: int, warnings: int, ok: object
) -> None:
    ran = report_when(findings=rows, errors=errors, warnings=warnings, ok=ok)
    assert (ran.exit_code, ran.out, ran.err.count("[report.not-json]")) == (3, "", 1)


@pytest.mark.parametrize(
    ("rows", "errors", "warnings", "ok"),
    [
        ([], 0, 0, True),
        ([_ERROR, _WARNING], 1, 1, False),
        ([_WARNING], 0, 1, True),
        ([_WARNING], 0, 1, False),  # As `--strict` saves it.
    ],
)
def test_saved_check_that_agrees_with_itself_is_taken(
    report_when: Callable[..., Ran], rows: list[dict[str, str]], errors: int, warnings: int, ok: bool
) -> None:
    ran = report_when(findings=rows, errors=errors, warnings=warnings, ok=ok)
    assert ran.exit_code == bool(errors)
    assert ("FAILED: 1 error, 1 warning" if errors else "contents verified") in ran.out


def test_all_saved_checks_that_failed_are_printed_under_their_names(
    copy: Path, cli: Callable[..., Ran], tmp_path: Path
) -> None:
    names = []
    for shard in sorted(copy.glob("*.safetensors"))[:2]:
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        names.append(f"{shard.name}.json")
        (tmp_path / names[-1]).write_text(cli("converted", copy, "--json", "--read-data").out)
        shard.write_bytes(whole)
    (tmp_path / "good.json").write_text(cli("converted", copy, "--json", "--read-data").out)
    names.insert(1, "good.json")
    saved = [word for name in names for word in ("--reference-report", tmp_path / name)]
    page = ("report", copy, "-o", tmp_path / "page.html", "-q")

    def shown(*words: object) -> list[tuple[str, list[str]]]:
        """Return heading and codes of every group of findings that is printed."""
        ran = cli(*page, *words)
        assert ran.exit_code == 1
        groups = re.split(r"^(structure, .*:|saved check .*:)\n", ran.err, flags=re.MULTILINE)
        assert groups[0] == "" or len(groups) == 1
        texts = zip(["", *groups[1::2]], groups[::2], strict=True)
        return [(name, re.findall(r"\[([a-z.-]+)\]$", text, re.M)) for name, text in texts if text]

    bad = [
        (f"saved check {tmp_path / name} of model:", ["content.hash", "report.elsewhere"])
        for name in (names[0], names[2])
    ]
    assert shown(*saved) == bad
    (copy / "generation_config.json").unlink()
    alone = shown()
    assert [name for name, _ in alone] == [""] and "side.missing" in alone[0][1]
    assert shown(*saved) == [("structure, checked now:", alone[0][1]), *bad]
    codes = [f["code"] for f in cli(*page, "--json", *saved).json()["findings"]]
    assert sorted(codes) == sorted([*alone[0][1], *bad[0][1], *bad[1][1]])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not JSON: Expecting value at character 0 of 0"),
        (b"\xff", "is not UTF-8 at byte 0"),
        (b"[]", "expected a JSON object, found a list"),
        (b"null", "expected a JSON object, found null"),
        (b"{}", "expected `contents_percent`: a number above 0 and up to 100, or null, found no such key"),
        (b'{"contents_percent": NaN}', "is not JSON: NaN is not JSON"),
        (b'{"ok": true, "ok": false}', "expected every key once, found `ok` twice"),
        (b"[" * 100_000, "JSON is nested too deeply"),
    ],
    ids=["empty", "bytes", "list", "null", "object", "nan", "twice", "deep"],
)
def test_file_that_is_no_saved_check_is_refused(
    copy: Path, tmp_path: Path, cli: Callable[..., Ran], content: bytes, reason: str
) -> None:
    (tmp_path / "check.json").write_bytes(content)
    ran = cli("report", copy, "-o", tmp_path / "page.html", "--reference-report", tmp_path / "check.json")
    assert (ran.exit_code, ran.err.count("[report.not-json]")) == (3, 1) and reason in ran.err
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("checked", [1], "`checked`: a list of strings, found a list"),
        ("checked", "abc", '`checked`: a list of strings, found "abc"'),
        ("not_checked", {"a": "b"}, "`not_checked`: a list of strings, found an object"),
        ("findings", {}, "`findings`: a list, found an object"),
        ("findings", [1], "`findings[0]`: an object, found 1"),
        ("findings", [_ROW | {"severity": "note"}], "`findings[0].severity`: `error` or `warning`, found"),
        ("findings", [_ERROR | {"hint": None}], "`findings[0].hint`: a string, found null"),
        ("facts", [1], "`facts`: an object, found a list"),
        ("facts", [["a", "b"]], "`facts`: an object, found a list"),
        ("subject", None, "`subject`: a string, found null"),
    ],
)
def test_saved_check_with_another_shape_is_refused(
    copy: Path, tmp_path: Path, cli: Callable[..., Ran], key: str, value: object, reason: str
) -> None:
    saved = cli("converted", copy, "--json").json()
    (tmp_path / "check.json").write_text(json.dumps(saved | {key: value}))
    ran = cli("report", copy, "-o", tmp_path / "page.html", "--reference-report", tmp_path / "check.json")
    assert (ran.exit_code, ran.err.count("[report.not-json]")) == (3, 1)
    assert f"is not a saved check: expected {reason}" in ran.err


@pytest.mark.parametrize("option", ["--reference-report", "--golden"])
def test_what_is_no_regular_file_gets_one_sentence(
    made: Callable[[str], Path], cli: Callable[..., Ran], tmp_path: Path, option: str
) -> None:
    """Reading a pipe would wait for a writer that never comes."""
    os.mkfifo(tmp_path / "pipe")
    page = ("report", made("int8"), "-o", tmp_path / "page.html", option)
    ran = cli(*page, tmp_path / "pipe")
    assert (ran.exit_code, ran.out) == (4, "")
    assert ran.err.startswith("error: `pipe`: is not a regular file   [file.not-regular]\n")
    ran = cli(*page, tmp_path)
    assert ran.exit_code == 2 and "is a directory" in ran.err
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate((256 << 20) + 1)
    ran = cli(*page, tmp_path / "large.json")
    assert ran.exit_code == 3 and "is too large: expected at most 268,435,456 bytes, found" in ran.err


@pytest.mark.parametrize("code", ["report.not-json", "report.other"])
def test_name_of_a_saved_check_drives_no_terminal(
    copy: Path, checked: Path, cli: Callable[..., Ran], code: str
) -> None:
    saved = read_json(checked)
    saved["facts"]["manifest_sha256"] = "x" if code == "report.not-json" else "0" * 64
    named = checked.parent / "\x1b]0;owned\x07.json"
    named.write_text(json.dumps(saved))
    ran = cli("report", copy, "-o", copy.parent / "page.html", "--reference-report", named)
    assert (ran.exit_code, ran.err.count(f"[{code}]")) == (3, 1)
    assert r"`\x1b]0;owned\x07.json`" in ran.err and not set(ran.err) & {"\x1b", "\x07"}


def test_saved_check_of_another_checkpoint_is_refused(
    copy: Path,
    made: Callable[[str], Path],
    sample: Callable[[str], Path],
    cli: Callable[..., Ran],
    tmp_path: Path,
) -> None:
    for ran in (cli("converted", made("mxfp4"), "--json"), cli("original", sample("short"), "--json")):
        (tmp_path / "check.json").write_text(ran.out)
        refused = cli(
            "report", copy, "-o", tmp_path / "page.html", "--reference-report", tmp_path / "check.json"
        )
        assert (refused.exit_code, refused.err.count("[report.other]")) == (3, 1)


# ---- what cannot be reported on


def test_checkpoint_without_manifest_is_refused(copy: Path, cli: Callable[..., Ran]) -> None:
    (copy / MANIFEST).unlink()
    ran = cli("report", copy, "-o", copy.parent / "page.html")
    assert (ran.exit_code, ran.err.count("[report.no-manifest]")) == (3, 1)
    assert not (copy.parent / "page.html").exists()


def test_official_unfinished_and_missing_are_refused(
    copy: Path, sample: Callable[[str], Path], cli: Callable[..., Ran]
) -> None:
    assert "[dst.not-converted]" in cli("report", sample("short")).err
    (copy / ".dsv4convert").mkdir()
    ran = cli("report", copy)
    assert (ran.exit_code, ran.err.count("[dst.unfinished]")) == (3, 1)
    assert cli("report", copy / "nowhere").exit_code == 3


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no-roles": lambda m: m.pop("roles"),
    "role-number": lambda m: m["roles"]["norm"].update(bytes_in="12"),
    "negative": lambda m: m["output"].update(tensors=-1),
    "bool": lambda m: m["output"].update(data_bytes=True),
    "not-finite": lambda m: m["experts"].update(max_relative_error=float("nan")),
    "rounded": lambda m: m.update(rounded=[1]),
    "rounded-text": lambda m: m.update(rounded=[{"code": 1, "tensor": "x", "found": "y"}]),
    "libraries": lambda m: m["run"].update(libraries=[]),
    "figures": lambda m: _figures(m).update(rows="1"),
    "no-spans": lambda m: _figures(m).pop("spans"),
    "spans": lambda m: _figures(m).update(spans=[1, None]),
    "no-memory": lambda m: m.update(memory=[]),
    "weights": lambda m: m["memory"]["4"].update(weight_bytes=None),
    "cuts": lambda m: m["memory"]["4"].update(cuts=[1]),
    "budget": lambda m: m["memory"]["4"].update(budget={"card_bytes": 1}),
    "left": lambda m: m["memory"]["4"].update(budget=_budget(left_bytes=1.5)),
    "pool": lambda m: m["memory"]["4"].update(budget=_budget(pool_bytes={"window": 1})),
    "header": lambda m: m["source"].update(header_sha256={"x": 1}),
}


def _budget(**changed: Any) -> dict[str, Any]:
    names = ("card", "runtime", "draft", "rope_table", "left")
    pools = ("window", "draft_window", "c4", "c128", "index", "c4_state", "c128_state", "page_lists")
    numbers = ("mem_fraction_static", "bytes_per_token", "concurrency", "context", "max_total_num_tokens")
    whole = {f"{name}_bytes": 1 for name in names} | dict.fromkeys(numbers, 1)
    return whole | {"weight_bytes": {"norm": 1}, "pool_bytes": dict.fromkeys(pools, 1)} | changed


def test_budget_that_is_whole_is_shown(copy: Path, cli: Callable[..., Ran]) -> None:
    edit(copy, lambda m: m["memory"]["4"].update(budget=_budget()))
    assert 'data-source="/memory/4/budget/left_bytes"' in make_page(copy).html


def _figures(tree: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = next(row["figures"] for row in tree["tensors"].values() if "figures" in row)
    return figures


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_manifest_that_lacks_something_is_refused(
    copy: Path, cli: Callable[..., Ran], damage: Callable[[dict[str, Any]], object]
) -> None:
    edit(copy, damage)
    ran = cli("report", copy, "-o", copy.parent / "page.html")
    assert (ran.exit_code, ran.err.count("[manifest.not-json]")) == (3, 1)


def test_damaged_checkpoint_gets_a_page_that_says_so(copy: Path, cli: Callable[..., Ran]) -> None:
    (copy / INDEX).write_text("{")
    ran = cli("report", copy, "--json", "-o", copy.parent / "page.html")
    assert ran.exit_code == 1 and not ran.json()["ok"]
    page = Parsed((copy.parent / "page.html").read_text())
    assert "FAILED" in page.text and "index.not-json" in page.text


@pytest.mark.parametrize("name", ["matplotlib", "jinja2"])
def test_missing_library_is_named_with_the_command(
    made: Callable[[str], Path], cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    ran = cli("report", made("int8"))
    assert (ran.exit_code, ran.err.count("[env.missing]")) == (4, 1)
    assert "pip install 'dsv4convert[report]'" in ran.err


def test_page_has_a_name_of_its_own_and_can_be_replaced(
    made: Callable[[str], Path], cli: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        ran = cli("report", made("int8"))
        assert ran.exit_code == 0 and ran.out.startswith("int8-report.html: ")
    assert [p.name for p in tmp_path.iterdir()] == ["int8-report.html"]
    ran = cli("report", made("int8"), "-o", tmp_path / "no" / "page.html")
    assert ran.exit_code == 4


# ---- numbers and pictures


def test_long_lists_are_cut_and_say_so(copy: Path) -> None:
    rows = [{"code": "value.inexact", "tensor": f"t{i}", "found": "1 block"} for i in range(60)]
    edit(copy, lambda m: m.update(rounded=rows))
    html = make_page(copy).html
    assert "accepted 60; the first 50 are shown" in Parsed(html).text
    assert "<code>t49</code>" in html and "<code>t50</code>" not in html


def test_conversion_without_loss_says_so(copy: Path) -> None:
    def heal(tree: dict[str, Any]) -> None:
        tree["experts"] |= {"codes_changed": 0, "codes_flushed": 0, "max_relative_error": 0.0}
        for row in tree["tensors"].values():
            if "figures" in row:
                row["figures"] |= {"codes_changed": 0, "relative_error": 0.0, "exact_share": 1.0}

    edit(copy, heal)
    html = make_page(copy).html
    assert "Nothing. All" in html and "largest error" in html and "The matrices with" not in html
    # All three columns of the key's first class, and nothing of the others but the key itself.
    assert html.count("fill: var(--heat-3)") == 1


def test_numbers_read_as_people_write_them() -> None:
    assert [error(v, "").text for v in (0, 0.0123, 0.001, 1.6e-5, 1)] == [
        "0",
        "0.012",
        "0.0010",
        "1.6 \N{MULTIPLICATION SIGN} 10⁻⁵",
        "1.0",
    ]
    assert [share(v, "").text for v in (0, 1, 0.5, 1 - 1e-12)] == ["0 %", "100 %", "50.0000 %", "99.9999 %"]
    assert [short_number(n) for n in (7, 950, 1200, 12_700, 5_000_000, 7 * 10**9)] == [
        *("7", "950", "1.2k", "13k", "5M", "7G"),
    ]
    assert [heat_class(v) for v in (0, 1e-12, 1e-5, 2e-4, 3e-4, 9e-3, 1)] == [0, 1, 2, 3, 4, 6, 7]


def test_check_is_saved_beside_its_text(copy: Path, cli: Callable[..., Ran], tmp_path: Path) -> None:
    ran = cli("converted", copy, "--read-data", "--save", tmp_path / "check.json")
    assert ran.exit_code == 0 and ran.out.endswith("contents verified\n")
    shown = cli("converted", copy, "--read-data", "--json").json()
    saved = read_json(tmp_path / "check.json")
    assert saved["facts"].pop("contents_at") <= shown["facts"].pop("contents_at") and saved == shown
    _damage(copy)
    ran = cli("converted", copy, "--read-data", "--save", tmp_path / "check.json")
    assert ran.exit_code == 1 and not read_json(tmp_path / "check.json")["ok"]


@pytest.mark.parametrize(
    ("percent", "shown", "other"),
    [
        ("99.99999999", "99.9999 %", "less than 0.0001 %"),
        ("99.9", "99.9 %", "0.1 %"),
        ("5", "5 %", "95 %"),
        ("12.34567", "12.3456 %", "87.6543 %"),
        ("0.00001", "less than 0.0001 %", "99.9999 %"),
    ],
)
def test_only_the_whole_is_called_100_percent(
    copy: Path, cli: Callable[..., Ran], tmp_path: Path, percent: str, shown: str, other: str
) -> None:
    saved, page = tmp_path / "check.json", tmp_path / "page.html"
    ran = cli("converted", copy, "--read-data", percent, "--save", saved, "-q")
    assert ran.exit_code == 0 and ran.out.endswith(f"\nstructure OK, {shown} of the contents verified\n")
    assert f"contents: {shown} of the weights, at least one of every kind," in ran.out
    assert f"contents: the other {other} of the tensors\n" in ran.out
    assert read_json(saved)["contents_percent"] == float(percent)
    ran = cli("report", copy, "-o", page, "--reference-report", saved)
    assert f"; structure OK, {shown} of the contents verified (check of model" in ran.out
    assert shown in Parsed(page.read_text()).text and "100 % of the contents" not in page.read_text()
