"""The smoke suite against a server whose faults are switches: each is caught, and by one check."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4convert.errors import EnvironmentFault
from dsv4convert.golden import encode_golden, read_golden
from dsv4convert.smoke.checks import Scene, Terms
from dsv4convert.smoke.server import open_server, root_of
from dsv4convert.smoke.suite import Smoke, run_suite
from dsv4convert.smoke.ties import Step, compare
from tests.conftest import Ran
from tests.fakechat import GAP, KEY, MODEL, TIE, FakeChat, chat_ids, golden
from tests.test_schemas import require

CHAT = "Say the names of ten rivers of Europe"
TERMS = Terms(suite="full", lengths=(), concurrency=(1,), golden=golden(chat_ids(CHAT), CHAT))
LARGE = {"lengths": (1024,), "concurrency": (1, 4, 8)}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeChat]:
    with FakeChat() as running:
        yield running
        running.shutdown()


@pytest.fixture(scope="module")
def ask(server: FakeChat) -> Iterator[Callable[..., Smoke]]:
    """Return ``ask(*faults, draft=..., **terms)``, which runs the full suite; clients are made once."""

    def run(*faults: str, draft: bool = False, **terms: Any) -> Smoke:
        server.faults, server.draft = set(faults), draft
        reached.info = {**reached.info, "speculative_algorithm": "DSPARK" if draft else None}
        try:
            return run_suite(replace(scene, terms=replace(TERMS, **terms)))
        finally:
            server.faults, server.draft = set(), False

    with open_server(server.url, KEY, 20.0) as reached, Scene.of(reached, TERMS) as scene:
        yield run


def failed(found: Smoke) -> dict[str, set[str]]:
    """Return what failed: check -> codes."""
    return {o.name: {f.code for f in o.findings} for o in found.outcomes if o.findings}


def test_right_server_passes(ask: Callable[..., Smoke]) -> None:
    found = ask(**LARGE)
    assert failed(found) == {}
    states = {o.name: o.state for o in found.outcomes}
    skipped = {name for name, state in states.items() if state == "skipped"}
    assert skipped == {"responses.named-tool", "dspark"} and found.ok(strict=True)
    assert all(o.reason for o in found.outcomes if o.state == "skipped")
    require("smoke", found.as_dict())


def test_right_server_with_a_draft_passes(ask: Callable[..., Smoke]) -> None:
    found = ask(draft=True, **LARGE)
    assert failed(found) == {}
    by_name = {o.name: o for o in found.outcomes}
    # 64 tokens in 16 steps of 5 guesses, of which 48 were right.
    facts = by_name["dspark"].facts
    assert (facts["tokens_per_step"], facts["share_right"]) == (4.0, 0.6)
    assert facts["server"] == {"avg_spec_accept_length": 3.0, "sglang:spec_accept_length": 3.0}
    assert "grammars under DSpark" in by_name["chat.grammar"].reason
    assert "grammars under DSpark" in by_name["chat.named-tool"].reason


FAULTS = {
    "no-model": ("models", "smoke.models"),
    "open": ("access.none", "smoke.open"),
    "half-key": ("access.wrong", "smoke.open"),
    "leak": ("access.hidden", "smoke.leak"),
    "leak-prefix": ("access.hidden", "smoke.leak"),
    "no-stop-reason": ("messages.answer", "smoke.answer"),
    "cut-stream": ("chat.stream", "smoke.answer"),
    "no-finish": ("chat.stream", "smoke.stream"),
    "no-done": ("chat.stream", "smoke.stream"),
    "no-completed": ("responses.stream", "smoke.stream"),
    "no-message-stop": ("messages.stream", "smoke.stream"),
    "stream-differs": ("chat.stream", "smoke.differs"),
    "bad-call": ("chat.tools", "smoke.tools"),
    "other-call": ("responses.tools", "smoke.tools"),
    "unnamed-tool": ("chat.named-tool", "smoke.tools"),
    "no-grammar": ("chat.grammar", "smoke.grammar"),
    "no-needle": ("long.1024", "smoke.needle"),
    "wrong-token": ("tokens.ids", "smoke.golden"),
    "improbable-token": ("tokens.ids", "smoke.golden"),
    "wrong-text": ("tokens.text", "smoke.golden"),
    "template": ("tokens.text", "smoke.template"),
    "usage-wrong": ("usage", "smoke.usage"),
    "no-call": ("chat.tools", "smoke.tools"),
    "fails-at-once": ("concurrency.8", "smoke.load"),
    "differs-at-once": ("concurrency.8", "smoke.load"),
}
# What a right server may do: the same switches, one step to the side of a fault.
LEGAL = ["stream-ties", "tied-token", "ties-at-once"]


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught_by_one_check(fault: str, ask: Callable[..., Smoke]) -> None:
    check, code = FAULTS[fault]
    terms = LARGE if check.startswith(("long", "concurrency")) else {}
    if check.startswith("concurrency"):
        # Four at once show it too.
        terms = {"concurrency": (1, 8)}
    elif fault == "no-call":
        terms = {"choice": "required"}
    found = ask(fault, **terms)
    expected = {check: {code}} if fault != "no-call" else {check: {code}, "chat.named-tool": {code}}
    assert failed(found) == expected and not found.ok()


@pytest.mark.parametrize("fault", LEGAL)
def test_tie_is_no_fault(fault: str, ask: Callable[..., Smoke]) -> None:
    found = ask(fault, concurrency=(8,))
    assert failed(found) == {}
    facts = {o.name: o.facts for o in found.outcomes}
    if fault == "stream-ties":
        assert facts["chat.stream"]["compared"] == "tie" and facts["responses.stream"]["compared"] == "equal"
    elif fault == "tied-token":
        assert facts["tokens.ids"] == {"tokens": 8, "ties": 1, "wrong": 0, "complete": True}
    else:
        assert facts["concurrency.8"]["tie"] >= 1


@pytest.mark.parametrize("fault", LEGAL)
def test_tie_beyond_the_bound_is_a_fault(fault: str, ask: Callable[..., Smoke]) -> None:
    check = {"stream-ties": "chat.stream", "tied-token": "tokens.ids", "ties-at-once": "concurrency.8"}[fault]
    assert failed(ask(fault, concurrency=(8,), tie=TIE / 2)).keys() == {check}


def test_earlier_turns_that_are_lost_are_missed_in_every_protocol(ask: Callable[..., Smoke]) -> None:
    names = ("chat.turns", "responses.turns", "messages.turns")
    assert failed(ask("forgets")) == {name: {"smoke.turns"} for name in names}


def test_idle_draft_fails_though_every_text_is_right(ask: Callable[..., Smoke]) -> None:
    found = ask("no-acceptance", draft=True)
    assert failed(found) == {"dspark": {"smoke.acceptance"}}
    seen = next(o for o in found.outcomes if o.name == "dspark")
    assert {f.found for f in seen.findings} == {"1", "0.0%"}


def test_threshold_of_the_draft_is_inclusive(ask: Callable[..., Smoke]) -> None:
    assert failed(ask(draft=True, accept_length=4.0, accept_rate=0.6)) == {}
    assert failed(ask(draft=True, accept_length=4.01)) == {"dspark": {"smoke.acceptance"}}
    assert failed(ask(draft=True, accept_rate=0.61)) == {"dspark": {"smoke.acceptance"}}


def test_difference_without_probabilities_is_a_warning(ask: Callable[..., Smoke]) -> None:
    found = ask("stream-differs", "differs-at-once", draft=True, concurrency=(8,))
    assert failed(found) == {"chat.stream": {"smoke.unjudged"}, "concurrency.8": {"smoke.unjudged"}}
    assert found.ok() and not found.ok(strict=True)


def test_random_weights_are_counted_and_not_judged(ask: Callable[..., Smoke]) -> None:
    faults = ("no-needle", "forgets", "no-call")
    assert failed(ask(*faults, random_weights=True, **LARGE)) == {"chat.named-tool": {"smoke.tools"}}
    found = ask("no-acceptance", draft=True, random_weights=True)
    assert failed(found) == {}
    seen = next(o for o in found.outcomes if o.name == "dspark")
    assert seen.state == "skipped" and "1.00 tokens per step, 0.0% right" in seen.reason
    # A threshold that is given is meant.
    found = ask("no-acceptance", draft=True, random_weights=True, accept_rate=0.01)
    assert failed(found) == {"dspark": {"smoke.acceptance"}}


def test_required_calls_need_a_grammar(ask: Callable[..., Smoke]) -> None:
    assert failed(ask(choice="required")) == {}
    found = ask(choice="required", draft=True)
    states = {o.name: o.state for o in found.outcomes}
    assert {states[f"{name}.tools"] for name in ("chat", "responses", "messages")} == {"skipped"}


def test_quick_suite_leaves_the_long_questions_out(ask: Callable[..., Smoke]) -> None:
    found = ask(suite="quick", **LARGE)
    names = {o.name for o in found.outcomes}
    assert {"chat.tools", "concurrency.4", "tokens.ids", "dspark"} <= names
    assert not names & {"long.1024", "concurrency.8", "chat.turns", "messages.tools", "chat.grammar"}


def test_only_what_is_named_is_asked_and_the_rest_is_said_to_be_left(ask: Callable[..., Smoke]) -> None:
    faults = ("wrong-token", "no-done")
    found = ask(*faults, suite="quick", only=("tokens.*", "models"))
    assert [o.name for o in found.outcomes] == ["models", "tokens.ids", "tokens.text"]
    assert failed(found).keys() == {"tokens.ids"} and found.not_checked[0].startswith("13 other checks")
    assert failed(ask(*faults, suite="quick")).keys() > {"tokens.ids"}
    require("smoke", found.as_dict())


def test_context_of_the_server_bounds_long_prompts(ask: Callable[..., Smoke]) -> None:
    # The server takes 4096 tokens, 64 of which are for the answer.
    states = {o.name: o.state for o in ask(lengths=(4032, 4033)).outcomes}
    assert (states["long.4032"], states["long.4033"]) == ("passed", "skipped")


# ---- servers that cannot be asked


@pytest.fixture
def other() -> Iterator[FakeChat]:
    with FakeChat() as running:
        yield running
        running.shutdown()


def test_server_that_stops_answering_ends_the_suite(
    other: FakeChat, cli: Callable[..., Ran], key: Path
) -> None:
    other.faults = {"dies"}
    ran = cli("smoke", other.url, "--api-key-file", key, "--json", "-q", "--timeout", 5)
    found = ran.json()
    require("smoke", found)
    assert ran.exit_code == 4 and found["lost"] and not found["ok"]
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert states["chat.stream"] == "passed" and states["messages.answer"] == "not run"
    assert found["findings"][-1]["code"] == "smoke.unreachable"
    assert "`responses.answer`" in found["findings"][-1]["problem"]


def test_slow_answer_is_a_finding_and_stops_nothing(other: FakeChat) -> None:
    other.faults = {"hangs"}
    with open_server(other.url, KEY, 3.0) as reached, Scene.of(reached, Terms(concurrency=())) as scene:
        found = run_suite(scene)
    assert failed(found) == {"responses.answer": {"smoke.timeout"}} and found.lost is None
    states = {o.name: o.state for o in found.outcomes}
    assert states["messages.stream"] == "passed"


@pytest.mark.parametrize(
    ("fault", "code"), [("not-ready", "smoke.not-ready"), ("empty-list", "smoke.no-model")]
)
def test_server_that_cannot_be_asked(fault: str, code: str, other: FakeChat) -> None:
    other.faults = {fault}
    with pytest.raises(EnvironmentFault) as caught:
        open_server(other.url, KEY, 5.0)
    assert [f.code for f in caught.value.findings] == [code]


@pytest.mark.parametrize("given", ["", "another-key-of-32-characters-0000"])
def test_key_that_does_not_fit_is_said_at_once(given: str, other: FakeChat) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        open_server(other.url, given, 5.0)
    assert [f.code for f in caught.value.findings] == ["smoke.key"]


def test_nobody_listens(cli: Callable[..., Ran]) -> None:
    with FakeChat() as gone:
        gone.shutdown()
    ran = cli("smoke", gone.url, "--json")
    assert ran.exit_code == 4
    require("error", ran.json())
    assert ran.json()["findings"][0]["code"] == "smoke.unreachable"


# ---- the command


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.touch(mode=0o600)
    file.write_text(KEY + "\n")
    return file


def test_command_reports_everything_together(
    server: FakeChat, cli: Callable[..., Ran], key: Path, tmp_path: Path
) -> None:
    path = tmp_path / "golden.json"
    path.write_bytes(encode_golden(TERMS.golden or {}))
    assert read_golden(path) == json.loads(path.read_bytes())
    arguments = ("smoke", f"{server.url}/v1/", "--api-key-file", key, "--golden", path)
    ran = cli(*arguments)
    assert ran.exit_code == 0, ran.err
    last = ran.out.splitlines()[-1]
    assert last == "passed: 16 passed, 1 skipped; 0 errors, 0 warnings"
    assert "  ok    tokens.ids" in ran.out and "  skip  dspark" in ran.out and MODEL in ran.out
    server.faults = {"leak", "wrong-token", "no-done"}
    try:
        ran = cli(*arguments)
    finally:
        server.faults = set()
    assert ran.exit_code == 1 and ran.out.splitlines()[-1].startswith("FAILED: ")
    assert all(f"[{code}]" in ran.err for code in ("smoke.leak", "smoke.golden", "smoke.stream"))
    assert KEY not in ran.out + ran.err


def test_a_name_that_no_check_has_is_refused(server: FakeChat, cli: Callable[..., Ran], key: Path) -> None:
    arguments = ("smoke", server.url, "--api-key-file", key, "--only")
    ran = cli(*arguments, "acces.*")
    assert ran.exit_code == 2 and "access.none" in ran.err and "'acces.*'" in ran.err
    ran = cli(*arguments, "access.*")
    assert ran.exit_code == 0
    assert ran.out.splitlines()[-1] == "passed: 3 passed; 0 errors, 0 warnings"
    assert "  NOT checked  14 other checks of this suite: without `--only`" in ran.out


@pytest.mark.parametrize("pattern", ["tokens.*", "dspark"])
def test_a_run_that_asked_nothing_has_not_passed(
    server: FakeChat, cli: Callable[..., Ran], key: Path, pattern: str
) -> None:
    """Without a golden file, and without a draft."""
    arguments = ("smoke", server.url, "--api-key-file", key, "--only", pattern)
    ran = cli(*arguments)
    assert ran.exit_code == 1 and "[smoke.nothing]" in ran.err and "FAILED: " in ran.out
    told = cli(*arguments, "--json").json()
    assert (told["ok"], told["only"]) == (False, [pattern]) and told["left"] >= 15
    require("smoke", told)
    # One that asks is enough.
    assert cli(*arguments, "--only", "models").exit_code == 0


def test_server_without_a_key(cli: Callable[..., Ran]) -> None:
    with FakeChat(key="") as open_to_all:
        found = cli("smoke", open_to_all.url, "--json", "-q").json()
        open_to_all.shutdown()
    reasons = {check["name"]: check["reason"] for check in found["checks"] if check["state"] == "skipped"}
    assert {"access.none", "access.wrong", "access.hidden"} < reasons.keys() and found["ok"]


def test_keys_of_the_environment_stay_here(
    other: FakeChat, cli: Callable[..., Ran], key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.setenv(name, "a-key-for-somebody-else")
    assert cli("smoke", other.url, "--api-key-file", key, "-q").exit_code == 0
    assert {path for path, _, _ in other.seen} > {"/v1/messages", "/v1/responses", "/v1/chat/completions"}
    assert "somebody-else" not in f"{other.seen}"


def test_missing_libraries_are_a_sentence(cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4convert.smoke.server.LIBRARIES", ("openai", "no_such_client", "nor_this"))
    ran = cli("smoke", "http://127.0.0.1:9", "--json")
    assert ran.exit_code == 4
    assert [f["where"] for f in ran.json()["findings"]] == ["no_such_client", "nor_this"]
    assert "dsv4convert[smoke]" in ran.json()["findings"][0]["hint"]


@pytest.mark.parametrize(
    "url", ["127.0.0.1:30000", "ftp://host", "http://", "http://u:p@h", "http://h:x", "http://h?a=1"]
)
def test_address_that_is_none(url: str, cli: Callable[..., Ran]) -> None:
    assert cli("smoke", url).exit_code == 2


def test_address_is_taken_with_and_without_v1() -> None:
    for text in ("http://host:30000", "http://host:30000/", "http://host:30000/v1", "http://host:30000/v1/"):
        assert root_of(text) == "http://host:30000"
    assert root_of("https://host/behind/proxy/v1") == "https://host/behind/proxy"


# ---- ties


def trace(*tokens: str) -> list[Step]:
    """Return a trace whose every second token is close to `x`."""
    return [Step(t, (("x", TIE if i % 2 else GAP), ("y", GAP))) for i, t in enumerate(tokens)]


@pytest.mark.parametrize(
    ("one", "other", "verdict"),
    [
        ("abcd", "abcd", "equal"),
        ("abcd", "axzz", "tie"),  # position 1 is close
        ("abcd", "xbcd", "fault"),  # position 0 is not
        ("abcd", "ayzz", "fault"),  # at position 1 `x` is close, `y` is not
        ("axzz", "abcx", "tie"),  # both leave the trace at ties of their own
        ("abcd", "abc", "fault"),  # one ends early
        ("abcd", "abcde", "fault"),
        ("abcd", "abcd\ufffd", "equal"),  # cut inside a character
    ],
)
def test_comparison_by_hand(one: str, other: str, verdict: str) -> None:
    assert compare(one, other, trace(*"abcd"), 0.25) == verdict


def test_end_of_an_answer_may_tie_too() -> None:
    end = "<｜end▁of▁sentence｜>"
    close = [Step("a", ()), Step("b", ((end, TIE),))]
    assert compare("ab", "a", close, 0.25) == "tie" and compare("ab", "a", close, TIE / 2) == "fault"
    assert compare("a", "a b", [Step("a", ()), Step(end, ((" b", TIE),))], 0.25) == "tie"


def test_pieces_of_characters_are_judged_by_their_gap() -> None:
    split = [Step("a", ()), Step("\ufffd", (("\ufffd", TIE),)), Step("\ufffd", (("b", GAP),))]
    assert compare("aé", "aè", split, 0.25) == "tie"
    assert compare("aé", "aè", split, TIE / 2) == "fault"


def test_no_trace_no_verdict() -> None:
    assert compare("ab", "ac", (), 0.25) == "unknown"


@pytest.mark.parametrize("names", [("input_tokens", "output_tokens"), ("prompt_tokens", "completion_tokens")])
def test_responses_are_counted_under_the_names_of_either_protocol(names: tuple[str, str]) -> None:
    from dsv4convert.smoke.protocols import _response

    answer = _response({"output": [], "status": "completed", "usage": dict(zip(names, (7, 0), strict=True))})
    assert (answer.prompt_tokens, answer.completion_tokens) == (7, 0)
