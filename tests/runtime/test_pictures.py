"""`preflight` and `serve` of a checkpoint with a vision tower: they turn pictures on by themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4convert.convert import convert
from dsv4convert.memory import Demand
from dsv4convert.runtime import contract, hook, machine
from dsv4convert.runtime.guards import Guards
from dsv4convert.runtime.launch import Launch, value_of
from dsv4convert.runtime.preflight import check_launch, prefill_steps
from dsv4convert.runtime.vision.blocks import blocks, extended, start_around
from tests.conftest import Ran
from tests.fakeserving import guard_lines
from tests.toy import Toybox

_GIB = 1 << 30


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toybox:
    return Toybox(tmp_path_factory.mktemp("toys"))


@pytest.fixture(scope="module")
def seeing(toys: Toybox, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a converted checkpoint with a vision tower."""
    target = tmp_path_factory.mktemp("vision") / "out"
    convert(toys.original("vision"), target, experts="int8")
    return target


@pytest.fixture
def launch(seeing: Path) -> Launch:
    return Launch(seeing, 1, False, "127.0.0.1", 30000, None, Demand())


def _codes(launch: Launch, environ: dict[str, str] | None = None) -> list[str]:
    return [f.code for f in check_launch(launch, environ or {}).findings if f.code != "side.missing"]


def test_a_checkpoint_with_a_tower_can_be_served(launch: Launch, toys: Toybox) -> None:
    found = check_launch(launch, {})
    assert found.ok() and found.pictures and _codes(launch) == []
    assert any(line.startswith("pictures: ") for line in found.checked)
    text = check_launch(replace(launch, root=toys.original("int8")), {})
    assert text.ok() and not text.pictures
    assert not any(line.startswith("pictures: ") for line in text.checked)


def _dry_run(cli: Callable[..., Ran], root: Path, *options: object) -> tuple[list[str], dict[str, str]]:
    page = cli("serve", root, "--tp", 1, "--dry-run", "--json", *options).json()
    return page["command"], page["environment"]


def test_serve_turns_pictures_on_by_itself(cli: Callable[..., Ran], seeing: Path, toys: Toybox) -> None:
    command, environment = _dry_run(cli, seeing)
    assert environment.items() >= contract.PICTURES.items()
    assert json.loads(value_of(command, "--limit-mm-data-per-request") or "") == {"image": 96}
    command, environment = _dry_run(cli, seeing, "--limit-images", 8)
    assert json.loads(value_of(command, "--limit-mm-data-per-request") or "") == {"image": 8}
    # Nothing of it for text, whatever was asked for.
    command, environment = _dry_run(cli, toys.original("int8"), "--limit-images", 8)
    assert not contract.PICTURES.keys() & environment.keys()
    assert value_of(command, "--limit-mm-data-per-request") is None


def test_a_limit_of_pictures_means_nothing_for_text(launch: Launch, toys: Toybox) -> None:
    limited = replace(launch, limit_images=8)
    text = check_launch(replace(limited, root=toys.original("int8")), {})
    assert [(f.code, f.where) for f in text.findings] == [("serve.no-effect", "--limit-images")]
    assert text.ok() and _codes(limited) == []


def test_whole_prompts_and_steps_contradict(cli: Callable[..., Ran], seeing: Path) -> None:
    asked = ("serve", seeing, "--tp", 1, "--dry-run", "--whole-prompts", "--")
    ran = cli(*asked, "--chunked-prefill-size", 2048)
    assert ran.exit_code == 2 and "--whole-prompts contradicts --chunked-prefill-size 2048" in ran.err
    assert cli(*asked, "--chunked-prefill-size", -1).exit_code == 0


@pytest.mark.parametrize("name", contract.PICTURES)
def test_variables_of_pictures_belong_to_checkpoints_with_a_tower(
    launch: Launch, toys: Toybox, name: str
) -> None:
    """With them SGLang would take every checkpoint of this architecture for one that sees."""
    right = {name: contract.PICTURES[name]}
    assert _codes(launch, right) == []
    assert _codes(launch, {name: "another.package"}) == ["serve.environment"]
    text = replace(launch, root=toys.original("int8"))
    assert _codes(text, right) == ["serve.environment"]
    assert _codes(text, {name: ""}) == []


@pytest.mark.parametrize(
    ("extra", "codes"),
    [
        (("--enable-two-batch-overlap",), ["serve.pictures"]),
        (("--allow-auto-truncate",), ["serve.pictures"]),
        (("--limit-mm-data-per-request", '{"image":1}'), ["serve.pictures"]),
        (("--chunked-prefill-size", "512"), ["serve.pictures"]),
        (("--chunked-prefill-size=1023",), ["serve.pictures"]),
        (("--chunked-prefill-size", "1024"), []),
        (("--chunked-prefill-size", "-1"), []),
        (("--disable-radix-cache",), []),
    ],
)
def test_options_that_pictures_rule_out(
    launch: Launch, toys: Toybox, extra: tuple[str, ...], codes: list[str]
) -> None:
    assert _codes(replace(launch, extra=extra)) == codes
    assert _codes(replace(launch, extra=extra, root=toys.original("int8"))) == []


@pytest.mark.parametrize("dspark", [False, True])
def test_no_draft_but_dspark(cli: Callable[..., Ran], seeing: Path, dspark: bool) -> None:
    """Trap 14: the other drafts of SGLang refuse a checkpoint with three stages."""
    command, _ = _dry_run(cli, seeing, *(["--dspark"] if dspark else []))
    assert value_of(command, "--speculative-algorithm") == ("DSPARK" if dspark else None)
    for algorithm in ("EAGLE", "NEXTN"):
        ran = cli("serve", seeing, "--dry-run", "--", "--speculative-algorithm", algorithm)
        assert ran.exit_code == 2 and "--speculative-algorithm: use `--dspark`" in ran.err


def test_a_step_that_memory_makes_too_short_is_refused(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4convert.runtime.preflight.chunk_size", lambda context, left: 512)
    (fault,) = check_launch(launch, {}).findings
    assert (fault.code, fault.expected, fault.found) == ("serve.pictures", "at least 1,024 tokens", "512")
    assert "--context" in fault.hint
    assert _codes(replace(launch, extra=("--chunked-prefill-size", "2048"))) == []


# ---- whole prompts


def test_whole_prompts_take_one_step_and_keep_no_prefix(cli: Callable[..., Ran], seeing: Path) -> None:
    command, _ = _dry_run(cli, seeing, "--whole-prompts", "--context", 4096)
    assert value_of(command, "--chunked-prefill-size") == "-1" and "--disable-radix-cache" in command
    assert value_of(command, "--context-length") == "4096"


def test_whole_prompts_are_as_long_as_scores_and_window_rows_allow(launch: Launch) -> None:
    whole = replace(launch, whole_prompts=True)
    budget = check_launch(launch, {}).budget
    assert budget is not None
    steps = prefill_steps(whole, budget)
    # A token has 4 bytes for each of its compressed keys, of which there is one for every four tokens.
    scores = steps.context * (steps.context // 4) * 4
    assert steps.chunk == -1 and 0 < scores <= budget.left / 4
    # One tenth of the capacity holds window rows.
    assert steps.context <= budget.tokens // 10 - 1024
    assert prefill_steps(launch, budget).context == budget.context > steps.context
    # Whoever names a context gets it, or is told.
    asked = replace(whole, demand=Demand(context=1 << 20, concurrency=64))
    (fault,) = check_launch(asked, {}).findings
    assert (fault.code, fault.where, fault.found) == ("serve.context", "--whole-prompts", "1,048,576")
    assert _codes(replace(asked, whole_prompts=False)) == []
    assert _codes(replace(asked, demand=Demand(context=16384, concurrency=64))) == []
    small = replace(budget, tokens=10 * 256)
    assert prefill_steps(whole, small).context == 0


def test_no_room_for_any_prompt_is_told(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4convert.runtime.preflight.longest_whole_prompt", lambda budget: 0)
    assert _codes(launch) == []
    assert _codes(replace(launch, whole_prompts=True)) == ["serve.memory"]


# ---- the machine and the log


@pytest.mark.parametrize(
    ("tp", "pictures", "free", "told"), [(1, False, 1, 0), (1, True, 1, 1), (2, True, 1, 1)]
)
def test_pictures_need_shared_memory(
    tp: int, pictures: bool, free: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Status:
        f_bavail, f_frsize = free, _GIB // 2

    monkeypatch.setattr(os, "statvfs", lambda path: Status)
    found = list(machine.shm_findings(tp, pictures))
    assert [f.code for f in found] == ["host.shm"] * told
    assert all("pictures on their way" in f.problem for f in found)
    monkeypatch.setattr(Status, "f_bavail", 2)
    assert list(machine.shm_findings(tp, pictures)) == []


def test_a_server_that_does_not_see_is_noticed() -> None:
    def fed(pictures: bool, *lines: str) -> Guards:
        guards = Guards(1, False, "ours", pictures)
        for line in lines:
            guards.feed(line)
        return guards

    blind, seeing = guard_lines(), guard_lines(pictures="310")
    assert fed(True, *seeing).failed == () and fed(True, *seeing).missing() == ()
    assert "no vision tower" in fed(True, *blind).failed[0]
    assert fed(False, *blind).failed == ()
    # A draft has none.
    draft = guard_lines(dspark=True)[-1]
    assert fed(True, *seeing, draft).failed == ()


def test_patches_of_pictures_are_for_processes_that_see(monkeypatch: pytest.MonkeyPatch) -> None:
    name, package = "SGLANG_EXTERNAL_MODEL_PACKAGE", "dsv4convert.runtime.vision.models"
    monkeypatch.delenv(name, raising=False)
    plain = tuple(p for p in contract.PATCHES if not p.switch)
    assert contract.wanted() == plain
    monkeypatch.setenv(name, "somebody.elses")
    assert contract.wanted() == plain
    monkeypatch.setenv(name, package)
    assert contract.wanted() == (*plain, *contract.PICTURE_PATCHES)
    modules = hook._begin()
    assert "sglang.srt.managers.schedule_policy" in modules


# ---- where pictures stand


class _Item:
    def __init__(self, *offsets: tuple[int, int]) -> None:
        self.offsets = list(offsets)


class _Inputs:
    def __init__(self, *items: _Item) -> None:
        self.mm_items = list(items)


def test_blocks_are_read_from_first_and_last_positions() -> None:
    inputs = _Inputs(_Item((3, 99)), _Item((100, 100)))
    assert list(blocks(inputs)) == [range(3, 100), range(100, 101)]
    assert list(blocks(None)) == []
    around = {position: start_around(inputs, position) for position in (0, 3, 4, 99, 100, 101)}
    assert around == {0: None, 3: None, 4: 3, 99: 3, 100: None, 101: None}


def test_a_step_has_pictures_when_it_computes_a_position_of_one() -> None:
    class Mode:
        is_prefill = True

        def is_extend_without_speculative(self) -> bool:
            return self.is_prefill

    class Batch:
        forward_mode = Mode()
        extend_prefix_lens_cpu = (0, 100)
        extend_seq_lens_cpu = (50, 20)
        mm_inputs: tuple[_Inputs | None, ...] | None = (None, _Inputs(_Item((40, 99))))

    batch = Batch()
    # The picture of the second request is in its prefix.
    assert extended(batch) == []
    batch.mm_inputs = (None, _Inputs(_Item((40, 100))))
    assert [step for step, _ in extended(batch)] == [range(50), range(100, 120)]
    batch.forward_mode.is_prefill = False
    assert extended(batch) == []
    batch.forward_mode.is_prefill, batch.mm_inputs = True, None
    assert extended(batch) == []
