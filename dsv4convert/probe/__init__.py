"""Run a checkpoint on a CPU, layer by layer, and say what it answers.

One layer's weights are read at a time, and of the routed experts only those that the prompt activates, one
by one. With a reference both run side by side and are compared after every sublayer. Importing this package
loads no torch; `probe` does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dsv4convert.checkpoint import open_checkpoint
from dsv4convert.errors import Dsv4Error, Finding, Refused, errors_of, finding
from dsv4convert.golden import describe, make_golden
from dsv4convert.names import Layout
from dsv4convert.probe.prompt import Prompt, Vocabulary, check_prompt
from dsv4convert.survey import Survey, survey
from dsv4convert.validate.provenance import read_manifest

if TYPE_CHECKING:
    from dsv4convert.probe.agreement import Comparison
    from dsv4convert.probe.draft import DraftHealth
    from dsv4convert.probe.forward import Run, Step
    from kernels_ref.config import ModelConfig

__all__ = ["Probed", "Tick", "probe"]


class Tick(NamedTuple):
    """Progress: a layer is done.

    Attributes:
        done, total: Layers of all passes: one over the prompt, one for each further token.
        layer: ``layers.N``.
        seconds: Time it took, in both checkpoints together if there is a reference.
    """

    done: int
    total: int
    layer: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe found.

    Attributes:
        golden: Content of `golden.json`.
        findings: What is wrong.
        layer_seconds: Per layer, seconds over the prompt.
        token_seconds: Per further token, seconds.
        peak_bytes: Largest resident size of this process so far; None where the system does not say.
    """

    golden: dict[str, Any]
    findings: tuple[Finding, ...]
    layer_seconds: tuple[float, ...]
    token_seconds: tuple[float, ...]
    peak_bytes: int | None

    def ok(self) -> bool:
        """Tell whether nothing is wrong."""
        return not errors_of(self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "ok": self.ok(),
            "golden": self.golden,
            "layer_seconds": [round(s, 4) for s in self.layer_seconds],
            "token_seconds": [round(s, 4) for s in self.token_seconds],
            "peak_bytes": self.peak_bytes,
            "findings": [f.as_dict() for f in self.findings],
        }


def probe(
    path: str | os.PathLike[str],
    prompt: str | None = None,
    *,
    ids: Sequence[int] | None = None,
    chat: bool = False,
    tokens: int = 8,
    top: int = 5,
    numerics: str = "exact",
    reference: str | os.PathLike[str] | None = None,
    draft: bool = False,
    progress: Callable[[Tick], None] | None = None,
) -> Probed:
    """Run a checkpoint of any layout on a prompt.

    Args:
        path: The checkpoint.
        prompt: Text, encoded by its `tokenizer.json`.
        ids: Token ids instead of text.
        chat: Wrap the text as one user turn that is answered without thinking.
        tokens: Tokens to generate, at least 1; fewer when the model ends its answer.
        top: Probable tokens to note at each step, at least 1.
        numerics: ``exact`` (float32), ``bf16``, ``sm80`` or ``official``; a reference always runs exactly.
        reference: A checkpoint of the same model in any layout, to run beside it.
        draft: Run the draft layers too, behind every token that was generated.
        progress: Called after every layer.

    Returns:
        Tokens, margins, agreement with the reference, and findings about it.

    Raises:
        Dsv4Error: the checkpoint or the reference has errors, or an activation is infinity or NaN.
        Refused: the model is of a release that cannot be run, or the prompt cannot be used.
        EnvironmentFault: reading failed, or `tokenizers` is missing.
        ValueError: neither or both of `prompt` and `ids`, or a number or name that there is not.
    """
    if (prompt is None) == (ids is None) or (chat and ids is not None):
        raise ValueError("pass either `prompt` or `ids`; `chat` goes with `prompt`")
    if tokens < 1 or top < 1:
        raise ValueError("`tokens` and `top` are at least 1")
    seen = _sound(path)
    config = _model_config(seen)
    given, vocabulary = _prompt(seen, prompt, ids, chat)
    check_prompt(given, config.vocab, _longest(seen) - tokens)
    with ExitStack() as stack:
        job = _Job(seen, config, numerics, stack)
        if reference is not None:
            job.compare(_sound(reference, "reference "))
        if draft:
            job.watch_draft(tokens)
        job.run(given.ids, tokens, top, progress)
        if draft:
            job.examine_draft(given.ids)
    text = vocabulary.decode if vocabulary else None
    steps = [step.as_dict(text) for step in job.steps]
    answer = text([step.token for step in job.steps]) if text else None
    golden = make_golden(seen, given.as_dict(), numerics, steps, answer, job.agreement(), job.draft_form())
    return Probed(golden, job.findings(), tuple(job.layers), tuple(job.further), _peak_bytes())


def _sound(path: str | os.PathLike[str], label: str = "") -> Survey:
    seen = survey(open_checkpoint(path))
    errors = errors_of(seen.findings)
    if errors:
        raise Dsv4Error(replace(f, where=label + f.where) for f in errors)
    return seen


def _model_config(seen: Survey) -> ModelConfig:
    from kernels_ref.config import ModelConfig

    try:
        return ModelConfig.from_dict(seen.checkpoint.config)
    except ValueError as error:
        raise Refused(finding("probe.unsupported", seen.checkpoint.root.name, str(error))) from None


def _prompt(
    seen: Survey, text: str | None, ids: Sequence[int] | None, chat: bool
) -> tuple[Prompt, Vocabulary | None]:
    root = seen.checkpoint.root
    if text is not None:
        vocabulary = Vocabulary(root)
        return Prompt(vocabulary.encode(text, chat=chat), text, chat), vocabulary
    try:
        return Prompt(tuple(ids or ())), Vocabulary(root)
    except Dsv4Error:
        return Prompt(tuple(ids or ())), None  # Ids need no tokenizer; the answer is shown as ids.


def _longest(seen: Survey) -> int:
    longest = seen.checkpoint.config.get("max_position_embeddings")
    return longest if isinstance(longest, int) else 1 << 20


def _stop_tokens(seen: Survey) -> frozenset[int]:
    ends = seen.checkpoint.config.get("eos_token_id")
    return frozenset(ends if isinstance(ends, list) else [ends])


@dataclass
class _Job:
    """One checkpoint, and perhaps its reference, over a prompt and the tokens that follow."""

    seen: Survey
    config: ModelConfig
    numerics: str
    stack: ExitStack
    comparison: Comparison | None = None
    reference: Survey | None = None
    steps: list[Step] = field(default_factory=list)
    theirs: list[int] = field(default_factory=list)
    layers: list[float] = field(default_factory=list)
    further: list[float] = field(default_factory=list)
    depth: int = 0
    draft: DraftHealth | None = None

    def __post_init__(self) -> None:
        from dsv4convert.probe.forward import Run, preset
        from dsv4convert.probe.source import CheckpointSource
        from kernels_ref.decisions import Decisions

        self.source = self.stack.enter_context(CheckpointSource(self.seen))
        self.arithmetic = preset(self.numerics)
        self.made = Decisions()
        self.own: Run = Run(self.source, self.config, self.arithmetic, decisions=self.made)

    def compare(self, reference: Survey) -> None:
        """Run a reference beside the checkpoint."""
        from dsv4convert.probe.agreement import Comparison, Expectation, expectation
        from dsv4convert.probe.forward import Run, preset
        from dsv4convert.probe.source import CheckpointSource
        from kernels_ref.decisions import Decisions

        _require_same(self.config, _model_config(reference))
        self.reference = reference
        record = Decisions()
        source = self.stack.enter_context(CheckpointSource(reference))
        theirs = Run(source, self.config, preset("exact"), decisions=record, label="reference ")
        expected, limit = expectation(self.numerics, self.source.layout, source.layout)
        replayed, made, forced = self.own, self.made, None
        if expected is not Expectation.EQUAL:
            made = Decisions.replay(record.chosen)
            replayed = Run(self.source, self.config, self.arithmetic, decisions=made)
        if expected is Expectation.REPACKED:
            following = Decisions.replay(record.chosen)
            forced = Run(self.source, self.config, self.arithmetic, decisions=following)
        exact = _exact_layers(self.seen) if self.source.layout is Layout.INT8 else frozenset()
        self.comparison = Comparison(
            theirs, self.own, replayed, forced, expected, limit, (record, made), exact
        )

    def run(self, ids: Sequence[int], tokens: int, top: int, progress: Callable[[Tick], None] | None) -> None:
        """Take the prompt in and generate."""
        from dsv4convert.probe.forward import Step

        ticker = _Ticker(self.config.layers, tokens, progress)
        main = self.comparison or self.own
        main.begin(ids)
        self.layers = ticker.over(main.layer)
        if self.comparison:
            self.comparison.finish()
            self.theirs.append(Step.of(self.comparison.theirs.logits(), 1).token)
        self.steps.append(Step.of(self.own.logits(), top))
        ends = _stop_tokens(self.seen)
        while len(self.steps) < tokens and self.steps[-1].token not in ends:
            self.further.append(self._next(ticker, top))

    def _next(self, ticker: _Ticker, top: int) -> float:
        """Generate one more token, in the reference too while both have said the same."""
        from dsv4convert.probe.forward import Step

        started = time.perf_counter()
        runs = [self.own]
        if self.comparison and self.theirs == [step.token for step in self.steps]:
            runs.append(self.comparison.theirs)
        for run in runs:
            run.begin([self.steps[-1].token])
        ticker.over(lambda index: [run.layer(index) for run in runs])
        self.steps.append(Step.of(runs[0].logits(), top))
        if len(runs) > 1:
            self.theirs.append(Step.of(runs[1].logits(), 1).token)
        return time.perf_counter() - started

    def watch_draft(self, tokens: int) -> None:
        """Keep what the draft layers see; refuse where there is none, or nothing to judge it by."""
        runs = [self.own, self.comparison.theirs] if self.comparison else [self.own]
        self.depth = min(run.watch_draft() for run in runs)
        where = self.seen.checkpoint.root.name
        if not self.depth:
            raise Refused(finding("probe.no-draft", where, "its `config.json` names no draft layers"))
        if tokens <= self.depth:
            expected, found = f"at least {self.depth + 1} tokens", f"{tokens}"
            problem = f"a draft that guesses {self.depth} tokens a step cannot be judged by so few"
            raise Refused(finding("probe.draft-short", where, problem, expected=expected, found=found))

    def examine_draft(self, prompt: Sequence[int]) -> None:
        """Run the draft layers behind every answered token that enough others follow."""
        from dsv4convert.probe.agreement import relative_error
        from dsv4convert.probe.draft import DraftHealth, accepted, starts_of

        said = [step.token for step in self.steps]
        ids, starts = [*prompt, *said], starts_of(len(prompt), len(said), self.depth)
        if not starts:
            return  # The model ended its answer early.
        logits, error = self.own.guesses(ids, starts), None
        if self.comparison and self.theirs == said:
            error = relative_error(logits, self.comparison.theirs.guesses(ids, starts))
        self.draft = DraftHealth(self.depth, accepted(logits, ids, starts), error)

    def findings(self) -> tuple[Finding, ...]:
        """Return what the comparison and the draft's guesses show."""
        from dsv4convert.probe.agreement import Expectation

        found = self.comparison.findings() if self.comparison else []
        if self.draft:
            owed = self.comparison is not None and self.comparison.expected is Expectation.EQUAL
            # What differs in the trunk differs in what the draft sees of it.
            found += self.draft.findings(equal=owed and not found)
        return tuple(found)

    def draft_form(self) -> dict[str, Any] | None:
        """Return the JSON form of the draft's health."""
        return self.draft.as_dict() if self.draft else None

    def agreement(self) -> dict[str, Any] | None:
        """Return the JSON form of the comparison."""
        if self.comparison is None or self.reference is None:
            return None
        pairs = zip(self.theirs, self.steps, strict=False)
        equal = sum(token == step.token for token, step in pairs)
        return self.comparison.as_dict(describe(self.reference), self.theirs, equal)


class _Ticker:
    """Runs layers in order, takes their time and reports it."""

    def __init__(self, layers: int, passes: int, progress: Callable[[Tick], None] | None) -> None:
        self._layers = layers
        self._total = layers * passes
        self._done = 0
        self._progress = progress

    def over(self, layer: Callable[[int], object]) -> list[float]:
        """Run all layers and return the seconds of each."""
        seconds = []
        for index in range(self._layers):
            started = time.perf_counter()
            layer(index)
            seconds.append(time.perf_counter() - started)
            self._done += 1
            if self._progress:
                self._progress(Tick(self._done, self._total, f"layers.{index}", seconds[-1]))
        return seconds


def _require_same(config: ModelConfig, reference: ModelConfig) -> None:
    """Refuse a reference with another number in its config; none of them is changed by a conversion."""
    other = [n for n in config.__slots__ if getattr(config, n) != getattr(reference, n)]
    if other:
        problem = f"is another model: {', '.join(f'`{n}`' for n in other[:3])} differ"
        found, expected = (str(getattr(c, other[0]))[:60] for c in (reference, config))
        raise Dsv4Error(finding("reference.other", "config.json", problem, expected=expected, found=found))


def _exact_layers(seen: Survey) -> frozenset[str]:
    """Return the layers whose experts lost nothing in the repack, if a manifest says so."""
    manifest, _ = read_manifest(seen.checkpoint.root)
    losses = manifest.get("losses") if manifest else None
    if not isinstance(losses, dict):
        return frozenset()
    return frozenset(layer for layer, parts in losses.items() if _is_exact(parts))


def _is_exact(parts: Any) -> bool:
    found = list(parts.values()) if isinstance(parts, dict) else [None]
    return all(isinstance(part, dict) and part.get("codes_changed") == 0 for part in found)


def _peak_bytes() -> int | None:
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            peak = next((line for line in status if line.startswith("VmHWM:")), None)
    except OSError:
        return None
    return int(peak.split()[1]) * 1024 if peak else None
