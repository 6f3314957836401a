"""The scripts: what they carry, what they start, and what they change."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from itertools import permutations, product
from pathlib import Path
from threading import Timer
from typing import Any

import click
import pytest
import torch

from dsv4convert.cli import main
from dsv4convert.runtime.contract import SITE
from tests.conftest import Ran

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def parse(name: str, *words: str) -> click.Context:
    """Parse the words of a command as below the group: click keeps the first help option that it makes."""
    group = click.Context(main, info_name="dsv4convert", **main.context_settings)
    return main.commands[name].make_context(name, [*words], parent=group)


@pytest.fixture
def argv(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda *words: monkeypatch.setattr(sys, "argv", ["script", *map(str, words)])


@pytest.mark.parametrize(
    "path",
    [path for path in sorted((SCRIPTS.parent / "benchmarks").glob("*.py")) if "__main__" in path.read_text()],
    ids=lambda path: path.stem,
)
def test_every_benchmark_says_how_it_is_called(
    path: Path, argv: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS.parent))
    argv("-h")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert (ended.value.code, path.name in capsys.readouterr().out) == (0, True)


def test_hashes_are_benchmarked_without_pytest(
    argv: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv("--rounds", 1, "--dir", tmp_path)
    monkeypatch.setitem(sys.modules, "pytest", None)
    bench = runpy.run_path(str(SCRIPTS.parent / "benchmarks" / "bench_hashes.py"))
    # Small files: whether they are read in time is another matter than whether they are read right.
    main = bench["main"]
    main.__globals__.update(FILES=3, SIZE=1000, TARGET=0, TOOLS=(("sha256sum",),), values=lambda *_: None)
    assert main() == 0
    assert re.search(r"cores: \d+\.\d\d GB/s, sha256sum .*, x\d+\.\d\d\n$", capsys.readouterr().out)
    main.__globals__["_theirs"] = lambda tool, folder, names: dict.fromkeys(names, "0" * 64)
    with pytest.raises(SystemExit, match=r"^error: 3 of 3 SHA-256 are not those of sha256sum, f0 first$"):
        main()
    assert capsys.readouterr().out == "" and not any(tmp_path.iterdir())


def test_a_benchmark_of_a_card_says_that_there_is_none(argv: Callable[..., None]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    for name in ("bench_gpu", "bench_gpu_tower"):
        argv()
        with pytest.raises(SystemExit, match=r"^error: expected a CUDA device .*found none with torch"):
            runpy.run_path(str(SCRIPTS.parent / "benchmarks" / f"{name}.py"), run_name="__main__")


# ---- stage_serving


def stage(path: Path) -> Path:
    """Make a stage of one part from a wheel with a file that is carried and one that is not."""
    import stage_serving

    wheel = path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as content:
        content.writestr("sgl_kernel/__init__.py", "carried")
        content.writestr("sgl_kernel/flash_ops.abi3.so", "left")
    stage_serving._unzip(wheel, path / "tree")
    made = path / "stage"
    made.mkdir()
    archive = made / "server.tar.xz"
    stage_serving._archive(path / "tree", archive)
    row = {"archive": {"sha256": stage_serving._sha256(archive)}}
    (made / "staged.json").write_text(json.dumps({"parts": {"server": row}}))
    return made


def test_a_part_arrives_without_what_is_left_out(tmp_path: Path) -> None:
    import stage_serving

    stage_serving.unpack(stage(tmp_path), tmp_path / "work", [])
    kernel = tmp_path / "work" / "server" / "sgl_kernel"
    assert [p.name for p in kernel.iterdir()] == ["__init__.py"]
    assert (kernel / "__init__.py").read_text() == "carried"


def test_a_part_that_changed_on_the_way_is_refused(tmp_path: Path) -> None:
    import stage_serving

    made = stage(tmp_path)
    with (made / "server.tar.xz").open("ab") as archive:
        archive.write(b"\0")
    with pytest.raises(SystemExit, match=r"server\.tar\.xz: is not the archive of staged\.json"):
        stage_serving.unpack(made, tmp_path / "work", [])
    assert not (tmp_path / "work").exists()


def test_a_stage_that_cannot_be_unpacked_is_told(tmp_path: Path, argv: Callable[..., None]) -> None:
    import stage_serving

    def told(*words: object) -> str:
        argv("unpack", *words)
        with pytest.raises(SystemExit) as ended:
            stage_serving.main()
        return str(ended.value)

    made, work = stage(tmp_path), tmp_path / "work"
    wanted = "expected the STAGE that `pack` wrote, archives beside staged.json"
    assert told(tmp_path / "nowhere", work) == f"error: {tmp_path / 'nowhere'}: is no directory: {wanted}"
    assert told(tmp_path, work) == f"error: {tmp_path}: holds no staged.json: {wanted}"
    (tmp_path / "file").touch()
    taken = tmp_path / "file" / "server"
    assert told(made, tmp_path / "file") == f"error: {taken}: cannot be made a directory: Not a directory"
    argv("pack", tmp_path / "file")
    with pytest.raises(SystemExit, match=r"file: cannot be made a directory: File exists$"):
        stage_serving.main()
    assert "client.tar.xz: is not there" in told(made, work, "client")
    for content in ("{", "[]", '{"parts": 1}'):
        (made / "staged.json").write_text(content)
        assert told(made, work) == f"error: {made / 'staged.json'}: is not what `pack` writes; carry it again"
    (made / "staged.json").write_text('{"parts": {}}')
    assert "not in staged.json" in told(made, work)
    (made / "server.tar.xz").unlink()
    assert "holds no archive" in told(made, work)
    assert told(made, work, "unknown") == "2"
    assert not work.exists()


def test_parts_are_what_the_constraints_pin() -> None:
    import stage_serving

    pinned = {path.stem.removeprefix("staged-") for path in SCRIPTS.parent.glob("constraints/staged-*.txt")}
    assert set(stage_serving.PARTS) == pinned


# ---- validate_serving


def test_every_run_is_one_that_serve_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import validate_serving

    monkeypatch.chdir(tmp_path)
    names = [run.name for run in validate_serving.RUNS]
    assert len(set(names)) == len(names)
    machines = [
        validate_serving.Machine(tmp_path, tmp_path, 1, False, one_card) for one_card in (False, True)
    ]
    for machine, run in product(machines, validate_serving.RUNS):
        (tmp_path / run.layout).mkdir(exist_ok=True)
        words = validate_serving._words(machine, run, 31000, tmp_path / "log")
        context = parse(*words)
        assert (context.params["tp"], context.params["dspark"]) == (run.tp, run.draft)
        assert ("--disable-cuda-graph" in context.params["extra"]) is not run.graph
        assert ("--disable-custom-all-reduce" in context.params["extra"]) is machine.one_card
    with pytest.raises(click.UsageError):
        parse(*words[: words.index("--")], "--unknown")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--gpus", 0), "expected at least 1, found 0"),
        (("--run", "int8-base-graph-whole-tp2"), "needs 2 cards, found 1; pass --gpus 2, or --one-card"),
        (("--gpus", 2, "--one-card"), "not allowed with argument"),
        (("--one-card", "--run", "int8-base-graph-whole"), "has one rank"),
        (("--goldens", "nowhere"), "nowhere is no directory"),
        (("--run", "unknown"), "invalid choice: 'unknown'"),
    ],
)
def test_what_a_machine_cannot_run_is_told_before_anything_is_made(
    tmp_path: Path,
    argv: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    words: tuple[object, ...],
    told: str,
) -> None:
    import validate_serving

    argv(tmp_path / "work", tmp_path / "out", *words)
    with pytest.raises(SystemExit, match="2"):
        validate_serving.main()
    assert told in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_named_runs_start_once_each_in_their_order() -> None:
    import validate_serving

    last, first = validate_serving.RUNS[-1].name, validate_serving.RUNS[0].name
    chosen = validate_serving.chosen([last, first, last], 1, False)
    assert [run.name for run in chosen] == [last, first]
    assert validate_serving.chosen(None, 8, False) == list(validate_serving.RUNS)
    alone = validate_serving.chosen(None, 1, False)
    assert alone == [run for run in validate_serving.RUNS if "-tp" not in run.name]
    assert {run.tp for run in validate_serving.chosen(None, 2, False)} == {1, 2}
    shared = validate_serving.chosen(None, 1, True)
    assert {run.tp for run in shared} == {2, 4, 8}
    assert len(alone) + len(shared) == len(validate_serving.RUNS)


def test_a_working_directory_is_made(
    tmp_path: Path, argv: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that has SGLang, where nothing was unpacked."""
    import validate_serving

    def first(machine: validate_serving.Machine, *_: object) -> int:
        assert machine.work.is_dir() and machine.out.is_dir()
        raise SystemExit("reached")

    monkeypatch.setattr(validate_serving.Machine, "command", first)
    argv(
        tmp_path / "some" / "work",
        tmp_path / "out",
        "--native",
        "--gpus",
        2,
        "--run",
        validate_serving.RUNS[0].name,
    )
    with pytest.raises(SystemExit, match="reached"):
        validate_serving.main()


def test_a_working_directory_that_is_a_file_gets_a_sentence(
    tmp_path: Path, argv: Callable[..., None]
) -> None:
    import validate_serving

    (tmp_path / "file").touch()
    for words in ((tmp_path / "file", tmp_path / "out"), (tmp_path / "work", tmp_path / "file" / "out")):
        argv(*words)
        with pytest.raises(SystemExit, match=r"^error: .*/file\S*: expected a directory"):
            validate_serving.main()


#: Stands for `dsv4convert`: a server that is ready at once and ends by SIGTERM, and answers of `smoke`.
FAKE = """
import json, signal, sys, time
from pathlib import Path
place = Path(sys.argv[0]).parent
if sys.argv[1] == "serve":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(json.dumps({"guards": []}), flush=True)
    time.sleep(60)
elif sys.argv[1] == "smoke":
    if (place / "slow").exists():
        time.sleep(3)
    facts = {"tokens": 24, "ties": 0, "wrong": 0, "complete": True}
    print(json.dumps({"checks": [{"name": "tokens.ids", "facts": facts}]}))
else:
    print(json.dumps({"loads": []}))
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let `validate_serving` start a stand-in; return its directory."""
    import validate_serving

    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "cli.py").write_text(FAKE)
    for name in ("work", "out"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(validate_serving, "CLI", (sys.executable, str(tmp_path / "fake" / "cli.py")))
    monkeypatch.setattr(validate_serving, "STAGGER", 0.4)
    # Its processes are told from others by this number, from those of another test beside this one, too.
    monkeypatch.setattr(validate_serving, "NCCL_PORT", 1000 * os.getpid())
    return tmp_path / "fake"


def machine_of(tmp_path: Path, one_card: bool = False) -> Any:
    import validate_serving

    return validate_serving.Machine(tmp_path / "work", tmp_path / "out", 1, False, one_card)


@pytest.mark.parametrize("one_card", [False, True])
@pytest.mark.usefixtures("fake")
def test_servers_are_started_judged_and_ended(tmp_path: Path, one_card: bool) -> None:
    import validate_serving

    runs = (
        [run for run in validate_serving.RUNS if run.tp == 2][:2] if one_card else validate_serving.RUNS[:2]
    )
    machine = machine_of(tmp_path, one_card)
    results = validate_serving._validate_all(machine, runs)
    assert [result["ok"] for result in results] == [True, True]
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results
    assert len(machine.serving) == 2 and {result["end"] for result in results} == {143}


@pytest.mark.parametrize("facts", [{}, {"complete": False, "wrong": 0}, {"complete": True, "wrong": 1}])
def test_golden_tokens_that_were_not_all_compared_are_not_right(facts: dict[str, object]) -> None:
    import validate_serving

    def right(golden: dict[str, object]) -> bool:
        return validate_serving._is_right(
            {"goldens": {"chat": golden | {"status": 0}}, "end": 143, "left": 0}
        )

    assert not right(facts) and right({"complete": True, "wrong": 0})


@pytest.mark.parametrize("one_card", [False, True])
def test_after_an_interrupt_no_server_starts_and_those_that_run_end(
    tmp_path: Path, fake: Path, one_card: bool
) -> None:
    import validate_serving

    (fake / "slow").touch()
    machine = machine_of(tmp_path, one_card)
    runs = [run for run in validate_serving.RUNS if (run.tp > 1) is one_card][:9]
    Timer(1.0, machine.interrupt).start()
    results = validate_serving._validate_all(machine, runs)
    # A server every 0.4 s, and on one card one after the other.
    assert 1 <= len(machine.serving) <= (1 if one_card else 3) and len(results) == 9
    assert not any(result["ok"] for result in results)
    assert {result["error"] for result in results} == {"RuntimeError('interrupted')"}
    # One that was only just started does not know the signal yet.
    assert {process.poll() for process in machine.serving} <= {143, -signal.SIGTERM}
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts_and_keeps_what_was_found(
    tmp_path: Path,
    fake: Path,
    argv: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    import validate_serving

    (fake / "slow").touch()
    monkeypatch.setattr(validate_serving, "prepare", lambda *_: tmp_path)
    before = {known: signal.getsignal(known) for known in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    # Twice, as by somebody who is in a hurry.
    for seconds in (1.0, 1.2):
        Timer(seconds, os.kill, (os.getpid(), number)).start()
    argv(tmp_path / "work", tmp_path / "out")
    try:
        assert validate_serving.main() == 130
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(results) == len(validate_serving.chosen(None, 1, False))


@pytest.mark.parametrize("missing", ["int8-760.json", "vision-one.json", "one.png"])
def test_golden_files_that_are_missing_are_told_before_anything_is_made(
    tmp_path: Path, argv: Callable[..., None], capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    import serving_checkpoints
    import validate_serving

    (tmp_path / "goldens").mkdir()
    for layout, wanted in serving_checkpoints.CHECKPOINTS.items():
        for golden in wanted.goldens:
            for word in serving_checkpoints.golden_words(layout, golden, tmp_path / "goldens"):
                if not word.startswith("--"):
                    Path(word).touch()
    run = next(
        run for run in validate_serving.RUNS if missing.startswith(run.layout) or run.layout == "vision"
    )
    words = (tmp_path / "work", tmp_path / "out", "--run", run.name, "--goldens", tmp_path / "goldens")
    argv(*words)
    assert not validate_serving._missing(tmp_path / "goldens", [run])
    (tmp_path / "goldens" / missing).unlink()
    with pytest.raises(SystemExit, match="2"):
        validate_serving.main()
    assert f"goldens lacks {missing}" in capsys.readouterr().err and not (tmp_path / "work").exists()


def test_a_checkpoint_whose_making_was_interrupted_is_made_anew(tmp_path: Path) -> None:
    import serving_checkpoints

    said: list[str] = []

    def command(log: str, name: str, place: Path, *_: object) -> int:
        said.append(name)
        if name == "synth":
            (tmp_path / place).mkdir()
        elif len(said) == 2:
            raise KeyboardInterrupt
        return 0

    wanted = serving_checkpoints.CHECKPOINTS["int8"]
    with pytest.raises(KeyboardInterrupt):
        serving_checkpoints._make_official(command, tmp_path, wanted)
    assert not (tmp_path / "official").exists()
    for _ in range(2):
        serving_checkpoints._make_official(command, tmp_path, wanted)
    assert (tmp_path / "official").is_dir() and said == ["synth", "original"] * 2


def test_prompts_are_as_long_as_they_say_and_hold_no_marker() -> None:
    import serving_checkpoints

    for length in (40, 760, 3000):
        prompt = [int(word) for word in serving_checkpoints.ids(length).split(",")]
        # 6 markers and 256 bytes come first in the vocabulary of 1024.
        assert len(prompt) == length and min(prompt) >= 262 and max(prompt) < 1024


def test_checkpoints_are_made_and_probed_by_commands_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import serving_checkpoints

    said: dict[str, list[str]] = {}

    def command(log: str, *words: object) -> int:
        name, *rest = map(str, words)
        if name in ("synth", "convert"):
            (tmp_path / rest[name == "convert"]).mkdir(parents=True)
        # The commands run in the directory of the checkpoints.
        monkeypatch.chdir(tmp_path)
        assert parse(name, *rest) is not None
        said[log] = rest
        return 0

    changed: list[Path] = []
    monkeypatch.setattr(serving_checkpoints.subprocess, "run", lambda words, **_: changed.append(words[-1]))
    folder = serving_checkpoints.prepare(command, tmp_path, serving_checkpoints.CHECKPOINTS, None)
    assert changed == [tmp_path / "unfinished" / "foreseeable"] and (tmp_path / "foreseeable").is_dir()
    assert sum(log.startswith("synth-") for log in said) == 4
    assert sum(log.startswith("convert-") for log in said) == 6
    assert said["probe-vision-three"].count("--image") == 3
    for layout, golden in (("vision", "three"), ("int8", "chat")):
        words = serving_checkpoints.golden_words(layout, golden, folder)
        assert words[1] == said[f"probe-{layout}-{golden}"][-1]
    # With golden files of another time only checkpoints are made, and those are there.
    said.clear()
    assert serving_checkpoints.prepare(command, tmp_path, ["int8"], tmp_path) == tmp_path
    assert not said


# ---- foreseeable


def test_the_draft_of_a_foreseeable_checkpoint_is_right(
    tmp_path: Path, cli: Callable[..., Ran], argv: Callable[..., None]
) -> None:
    import foreseeable

    lengths = {}
    for name in ("random", "foreseeable"):
        root = tmp_path / name
        assert cli("synth", root, "-q").exit_code == 0
        if name == "foreseeable":
            argv(root)
            foreseeable.main()
            assert cli("original", root, "-q").exit_code == 0
        golden = tmp_path / f"{name}.json"
        asked = cli("probe", root, "--ids", "300,400", "--tokens", "8", "--draft", "--golden", golden)
        assert asked.exit_code == 0
        lengths[name] = json.loads(golden.read_text())["draft"]["length"]
    assert lengths["foreseeable"] == 6.0
    assert lengths["random"] < 2


def test_no_other_checkpoint_is_changed(
    tmp_path: Path, cli: Callable[..., Ran], argv: Callable[..., None]
) -> None:
    import foreseeable

    def told(root: Path) -> str:
        argv(root)
        before = [(file, file.read_bytes()) for file in sorted(root.glob("*")) if file.is_file()]
        with pytest.raises(SystemExit) as ended:
            foreseeable.main()
        assert all(file.read_bytes() == content for file, content in before)
        return str(ended.value)

    wanted = "expected a checkpoint that `dsv4convert synth` made"
    assert told(tmp_path / "nowhere") == f"error: {tmp_path / 'nowhere'}: is no directory: {wanted}"
    assert told(tmp_path) == f"error: {tmp_path}: holds no README.md: {wanted}"
    preview, official, converted = (tmp_path / name for name in ("preview", "official", "converted"))
    assert cli("synth", preview, "-q", "--release", "deepseek-v4-flash").exit_code == 0
    assert "config.json has no DSpark draft" in told(preview)
    assert cli("synth", official, "-q").exit_code == 0
    assert cli("convert", official, converted, "-q").exit_code == 0
    assert "its README.md does not begin with" in told(converted)
    # A download has a card of its own.
    (official / "README.md").write_text("---\nlicense: mit\n---\n")
    assert "nothing was changed" in told(official)


# ---- one_card


@pytest.mark.parametrize(
    ("visible", "words", "expected"),
    [
        ("0,1,2,3", ("-c",), ["0,1,2,3", None]),
        ("3", ("-c",), ["0", None]),
        ("-1", ("-c",), ["-1", None]),
        ("", ("-c",), ["", None]),
        ("GPU-7", ("-c",), ["GPU-7", None]),
        ("0,1,2,3", ("-m", "dsv4convert.runtime.sight", "modules"), ["0,1,2,3", None]),
        ("0,1,2,3", ("-m", "dsv4convert.runtime.sight", "gpus"), ["0,1,2,3", 4]),
    ],
)
def test_ranks_on_one_card_are_hosts_of_their_own(
    monkeypatch: pytest.MonkeyPatch, visible: str, words: tuple[str, ...], expected: list[object]
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", *words])
    monkeypatch.setattr(torch.cuda, "device_count", torch.cuda.device_count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: f"card {device}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, device))
    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "of another process")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(sys, "path", [str(SCRIPTS / "one_card")])
    runpy.run_path(str(SCRIPTS / "one_card" / "sitecustomize.py"))
    assert os.environ["NCCL_HOSTID"] == str(os.getpid())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected[0]
    if expected[1]:
        assert torch.cuda.device_count() == expected[1]
        assert (torch.cuda.get_device_properties(3), torch.cuda.mem_get_info(3)) == ("card 0", (1, 0))


@pytest.mark.parametrize("order", [*permutations(("activate", "one_card", "link"), 2)], ids="-".join)
def test_ranks_on_one_card_still_run_the_code_of_sm80(tmp_path: Path, order: tuple[str, ...]) -> None:
    """All these directories hold a `sitecustomize`, and Python imports one."""
    own, link = SCRIPTS / "one_card", tmp_path / "link"
    link.mkdir()
    (link / "sitecustomize.py").symlink_to(own / "sitecustomize.py")
    (tmp_path / "sitecustomize.py").write_text("print('next')")
    places = {"activate": SITE, "one_card": own, "link": link}
    path = [*(places[name] for name in order), tmp_path, SCRIPTS.parent]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    environment.pop("ENABLE_DSV4_SM80", None)
    code = "import os; print(os.environ['NCCL_HOSTID'] == str(os.getpid()))"
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (ran.stdout.split(), ran.stderr) == (["next", "True"], "")
