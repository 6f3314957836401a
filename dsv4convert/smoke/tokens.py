"""Tokens: those that `probe` computed, and those that a draft guessed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from dsv4convert.errors import Finding, finding
from dsv4convert.smoke.answers import count_at, pick
from dsv4convert.smoke.checks import ACCEPT_LENGTH, ACCEPT_RATE, EVERY, Check, Result, Scene
from dsv4convert.smoke.native import generate
from dsv4convert.smoke.shown import golden_length, golden_turns, unshown
from dsv4convert.smoke.ties import agree, compare

#: After so many wrong tokens the rest is not asked for any more.
_WRONG: Final = 20
#: What ends an answer, as `probe` writes it; and how every other special token begins.
_END: Final = "<｜end▁of▁sentence｜>"
_MARK: Final = "<｜"
#: What drafts are measured on: texts whose continuation is easy to guess, and tokens for each.
_GUESSED: Final = (
    "One, two, three, four, five, six, seven,",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n",
    "Monday, Tuesday, Wednesday, Thursday,",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
)
_GUESSES: Final = 64


def checks(scene: Scene) -> Iterator[Check]:
    """Yield the checks of tokens."""
    bound = f"{scene.terms.tie:g} nats"
    ids = (
        f"for the ids of the golden file the server picks the golden token, or one that is at most {bound} "
        "less probable there; after a difference it goes on from the golden token"
    )
    yield Check("tokens.ids", ids, partial(_golden_ids, scene), EVERY)
    text = "as a chat, the golden text has the golden number of tokens and gets the golden answer"
    yield Check("tokens.text", f"{text}, but for ties within {bound}", partial(_golden_text, scene), EVERY)
    asserts = "tokens per step and the share of guesses that were right are those of a draft that works"
    yield Check("dspark", asserts, partial(_acceptance, scene))


def _golden_ids(scene: Scene) -> Result:
    golden = scene.terms.golden
    if golden is None:
        return Result(skipped="no golden file was given: `dsv4convert probe` makes one")
    if reason := unshown(scene):
        return Result(skipped=reason)
    steps, prompt = golden["steps"], golden["prompt"]["ids"]
    whole = golden_length(golden)
    expected = [step["token"] for step in steps]
    findings: list[Finding] = []
    ties, at = 0, 0
    while at < len(steps) and len(findings) < _WRONG:
        start = at
        ids, left = [*prompt, *expected[:at]], len(steps) - at
        answer = generate(scene.server, ids, left, pictures=scene.terms.shown)
        if answer.prompt_tokens != whole + at:
            problem, found = "the prompt was given as ids and is counted otherwise", f"{answer.prompt_tokens}"
            count = f"{whole + at}"
            findings.append(finding("smoke.usage", "tokens.ids", problem, expected=count, found=found))
        at += agree(answer.ids, expected[at:])
        if at == len(steps):
            break
        fault = _step_fault(at, steps[at], answer.ids[at - start], scene.terms.tie)
        findings += [fault] if fault else []
        ties += fault is None
        at += 1
    facts = {"tokens": len(steps), "ties": ties, "wrong": len(findings), "complete": len(findings) < _WRONG}
    return Result(tuple(findings), facts)


def _step_fault(at: int, step: Mapping[str, Any], token: int, bound: float) -> Finding | None:
    """Judge a token that is not the golden one; None for a tie.

    The golden file lists the most probable tokens. One that is not among them is no more probable than the
    last of them.
    """
    rows = {row["token"]: row["logprob"] for row in step["top"]}
    best = rows.get(step["token"], max(rows.values(), default=0.0))
    if token in rows:
        lost, exactly = best - rows[token], ""
    else:
        lost, exactly = max(step["margin"], best - min(rows.values(), default=best)), "at least "
    if lost <= bound:
        return None
    problem = f"token {at} is {exactly}{lost:.3g} nats less probable than the golden one"
    return finding("smoke.golden", "tokens.ids", problem, expected=f"{step['token']}", found=f"{token}")


def _golden_text(scene: Scene) -> Result:
    golden = scene.terms.golden
    if golden is None:
        return Result(skipped="no golden file was given: `dsv4convert probe` makes one")
    if reason := unshown(scene):
        return Result(skipped=reason)
    prompt = golden["prompt"]
    if not prompt["chat"] or prompt["text"] is None or golden["text"] is None:
        return Result(
            skipped="the golden prompt is no chat: `dsv4convert probe --prompt TEXT --chat` makes one"
        )
    expected = golden["text"].partition(_END)[0]
    if _MARK in expected:
        return Result(skipped="the golden answer holds a special token, which a chat does not show")
    turns, tokens = golden_turns(golden, scene.terms.shown), len(golden["steps"])
    if turns is None:
        return Result(
            skipped="the golden text joins its pictures otherwise than a chat does, by a blank line"
        )
    answer = scene.chat.ask(turns, tokens)
    findings = []
    if answer.prompt_tokens != golden_length(golden):
        problem = "the chat template of the server makes another number of tokens of the prompt"
        count, found = f"{golden_length(golden)}", f"{answer.prompt_tokens}"
        findings.append(finding("smoke.template", "tokens.text", problem, expected=count, found=found))
    trace = () if answer.text == expected else scene.chat.trace(turns, tokens)
    verdict = compare(expected, answer.text, trace, scene.terms.tie)
    if verdict in ("fault", "unknown"):
        code = "smoke.golden" if verdict == "fault" else "smoke.unjudged"
        problem = "the chat answers something else than `probe`"
        shown, found = repr(expected[:60]), repr(answer.text[:60])
        findings.append(finding(code, "tokens.text", problem, expected=shown, found=found))
    return Result(tuple(findings), {"compared": verdict})


def _acceptance(scene: Scene) -> Result:
    server, terms = scene.server, scene.terms
    if not server.info:
        return Result(skipped="`/server_info` cannot be read, so that it is not known whether a draft runs")
    if not server.speculates:
        return Result(skipped="the server runs without a draft")
    metas = [generate(server, prompt, _GUESSES).meta for prompt in _GUESSED]
    steps, right, guesses = (
        sum(count_at(meta, name) or 0 for meta in metas)
        for name in ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts")
    )
    if not steps or not guesses:
        problem = "a draft runs, and the server tells nothing about its guesses"
        expected = "`spec_verify_ct` and `spec_num_proposed_drafts` of `/generate`"
        return Result((finding("smoke.acceptance", "dspark", problem, expected=expected),))
    length, rate = len(_GUESSED) * _GUESSES / steps, right / guesses
    facts = {
        "tokens_per_step": round(length, 3),
        "share_right": round(rate, 4),
        "steps": steps,
        "guesses": guesses,
        "server": _own_figures(scene),
    }
    least = {"length": terms.accept_length, "rate": terms.accept_rate}
    if terms.random_weights and set(least.values()) == {None}:
        reason = f"a draft of random weights cannot be judged: {length:.2f} tokens per step, {rate:.1%} right"
        return Result(skipped=reason, facts=facts)
    return Result(tuple(_draft_faults(length, rate, least)), facts)


def _draft_faults(length: float, rate: float, least: Mapping[str, float | None]) -> Iterator[Finding]:
    shortest = ACCEPT_LENGTH if least["length"] is None else least["length"]
    lowest = ACCEPT_RATE if least["rate"] is None else least["rate"]
    if length < shortest:
        problem, expected = "a step of the draft brings too few tokens", f"at least {shortest:g}"
        yield finding("smoke.acceptance", "dspark", problem, expected=expected, found=f"{length:.3g}")
    if rate < lowest:
        problem, expected = "too few guesses of the draft are right", f"at least {lowest:.1%}"
        yield finding("smoke.acceptance", "dspark", problem, expected=expected, found=f"{rate:.1%}")


def _own_figures(scene: Scene) -> dict[str, float]:
    """Return what the server itself says about all requests so far: state and, if on, metrics."""
    info = scene.server.get("/server_info")
    state = pick(info.json(), "internal_states", 0, "avg_spec_accept_length") if info.status == 200 else None
    figures = {} if state is None else {"avg_spec_accept_length": state}
    metrics = scene.server.get("/metrics")
    if metrics.status == 200:
        figures |= dict(_gauges(metrics.text))
    return figures


def _gauges(text: str) -> Iterator[tuple[str, float]]:
    """Yield the figures of a draft in Prometheus' text format; of several processes the last one."""
    for line in text.splitlines():
        name, value = line.partition("{")[0].partition(" ")[0], line.rpartition(" ")[2]
        if name in ("sglang:spec_accept_length", "sglang:spec_accept_rate"):
            try:
                yield name, float(value)
            except ValueError:
                continue
