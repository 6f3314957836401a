"""One checkpoint, and perhaps its reference, over a prompt and the tokens that follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsv4convert.errors import Dsv4Error, Finding, Refused, finding
from dsv4convert.golden import describe
from dsv4convert.names import Layout
from dsv4convert.probe.agreement import Expectation, Owed, expectation
from dsv4convert.probe.comparison import Comparison
from dsv4convert.probe.draft import DraftErrors, DraftHealth, accepted, compare_drafts, starts_of
from dsv4convert.probe.forward import Run, Step, preset
from dsv4convert.probe.losses import exact_layers
from dsv4convert.probe.pictures import Pictures
from dsv4convert.probe.prompt import Prompt
from dsv4convert.probe.source import CheckpointSource
from dsv4convert.probe.ticker import Tick, Ticker
from dsv4convert.survey import Survey
from dsv4convert.vision.config import VisionConfig

if TYPE_CHECKING:
    from torch import Tensor

    from kernels_ref.config import ModelConfig


@dataclass
class Job:
    """A checkpoint that answers, what it is compared with, and what was found.

    Attributes:
        seen: The checkpoint.
        config: Numbers of the model.
        numerics: Name of the arithmetic.
        pictures: What the prompt shows; None for text.
        stack: Closes the files.
        comparison, reference: Set by `compare`.
        steps: Answered tokens.
        theirs: Those of the reference, up to the first difference.
        layers: Seconds of each layer over the prompt.
        further: Seconds of each further token.
        depth, draft: Guesses per step, and how right they were; set by the methods about the draft.
        remarks: What is strange before anything ran.
    """

    seen: Survey
    config: ModelConfig
    numerics: str
    pictures: Pictures | None
    stack: ExitStack
    comparison: Comparison | None = None
    reference: Survey | None = None
    steps: list[Step] = field(default_factory=list)
    theirs: list[int] = field(default_factory=list)
    layers: list[float] = field(default_factory=list)
    further: list[float] = field(default_factory=list)
    depth: int = 0
    draft: DraftHealth | None = None
    remarks: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ends = _stop_tokens(self.seen)
        self.source = self.stack.enter_context(CheckpointSource(self.seen))
        self.arithmetic = preset(self.numerics)
        self.own = Run(self.source, self.config, self.arithmetic)
        self.sources = [self.source]

    def compare(self, reference: Survey, config: ModelConfig) -> None:
        """Run a reference, whose config has these numbers, beside the checkpoint."""
        _require_same(self.config, config)
        if self.pictures:
            _require_same(self.pictures.vision, VisionConfig.from_config(reference.checkpoint.config))
        self.reference = reference
        source = self.stack.enter_context(CheckpointSource(reference))
        self.sources.append(source)
        theirs = Run(source, self.config, preset("exact"), label="reference ")
        expected, limit = expectation(self.numerics, self.source.layout, source.layout)
        replayed, forced, exact = self.own, None, frozenset[str]()
        if expected is not Expectation.EQUAL:
            replayed = self._following(theirs)
        if expected is Expectation.REPACKED:
            forced = self._following(theirs)
            repacked = self.seen if self.source.layout is Layout.INT8 else reference
            exact, silent = exact_layers(repacked, self.config.layers)
            self.remarks += silent
        owed = Owed(expected, limit, exact)
        self.comparison = Comparison(theirs, self.own, replayed, forced, owed)

    def _following(self, theirs: Run) -> Run:
        """Return a run of the checkpoint that makes the decisions of the reference."""
        from kernels_ref.decisions import Decisions

        replay = Decisions.replay(theirs.decisions.chosen)
        return Run(self.source, self.config, self.arithmetic, decisions=replay)

    def run(self, prompt: Prompt, tokens: int, top: int, progress: Callable[[Tick], None] | None) -> None:
        """Take the prompt in and generate."""
        ticker = Ticker(self.config.layers, tokens, progress)
        main = self.comparison or self.own
        main.begin(prompt.positions, *self._rows(prompt, ticker))
        self.layers = ticker.over(main.layer)
        if self.comparison:
            self.theirs.append(Step.of(self.comparison.finish(), 1).token)
        self.steps.append(Step.of(self.own.logits(), top))
        while len(self.steps) < tokens and self.steps[-1].token not in self.ends:
            self.further.append(self._next(ticker, top))

    def _rows(self, prompt: Prompt, ticker: Ticker) -> list[Tensor]:
        """Return what the vision tower of each checkpoint makes of the pictures; nothing for text."""
        if self.pictures is None:
            return []
        return [self.pictures.rows(source, prompt.blocks, ticker.report) for source in self.sources]

    def _next(self, ticker: Ticker, top: int) -> float:
        """Generate one more token, compared as the prompt is while both have said the same."""
        started = time.perf_counter()
        together = self.comparison if self.theirs == self._said() else None
        main = together or self.own
        main.begin([self.steps[-1].token])
        ticker.over(main.layer)
        if together:
            self.theirs.append(Step.of(together.finish(), 1).token)
        self.steps.append(Step.of(self.own.logits(), top))
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
        said = self._said()
        ids, starts = [*prompt, *said], starts_of(len(prompt), len(said), self.depth)
        if not starts:
            expected, found = f"at least {self.depth + 1} tokens", f"{len(said)}"
            problem = "was not judged: the model ended its answer early"
            self.remarks.append(finding("probe.draft-ended", "mtp", problem, expected=expected, found=found))
            return
        right = accepted(self.own.guesses(ids, starts), ids, starts)
        self.draft = DraftHealth(self.depth, right, self._beside(ids, len(prompt)))

    def _beside(self, ids: Sequence[int], prompt: int) -> DraftErrors | None:
        """Compare the draft with the reference's, behind the tokens that both have said."""
        if self.comparison is None:
            return None
        same = self._same()
        starts = starts_of(prompt, same, self.depth)
        if not starts:
            return None
        both = self.comparison
        return compare_drafts(both.own, both.theirs, both.owed.expected, ids[: prompt + same], starts)

    def _said(self) -> list[int]:
        return [step.token for step in self.steps]

    def _same(self) -> int:
        """Return how many tokens, from the first, the reference has said too."""
        return sum(a == b for a, b in zip(self.theirs, self._said(), strict=False))

    def findings(self) -> tuple[Finding, ...]:
        """Return what the comparison and the draft's guesses show."""
        found = self.comparison.findings() if self.comparison else []
        if self.draft:
            # Embedding and head are the draft's, too: it is not blamed for what the trunk shows already.
            limit = self.comparison.owed.limit if self.comparison and not found else None
            found += self.draft.findings(limit)
        return (*found, *self.remarks)

    def draft_form(self) -> dict[str, Any] | None:
        """Return the JSON form of the draft's health."""
        return self.draft.as_dict() if self.draft else None

    def agreement(self) -> dict[str, Any] | None:
        """Return the JSON form of the comparison."""
        if self.comparison is None or self.reference is None:
            return None
        return self.comparison.as_dict(describe(self.reference), self.theirs, self._same())


def _stop_tokens(seen: Survey) -> frozenset[int]:
    """Return the ids that end an answer; none where the config names none."""
    ends = seen.checkpoint.config.get("eos_token_id")
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(end) is int for end in listed):
        problem, expected = "is no id of a token", "an integer, a list of integers or null"
        raise Dsv4Error(
            finding("config.field", "eos_token_id", problem, expected=expected, found=repr(ends)[:60])
        )
    return frozenset(listed)


def _require_same(config: ModelConfig | VisionConfig, reference: ModelConfig | VisionConfig | None) -> None:
    """Refuse a reference with another number in its config; none of them is changed by a conversion."""
    if reference is None:
        problem = "is another model: it has no vision tower"
        raise Dsv4Error(finding("reference.other", "config.json", problem))
    other = [n for n in config.__slots__ if getattr(config, n) != getattr(reference, n)]
    if other:
        problem = f"is another model: {', '.join(f'`{n}`' for n in other[:3])} differ"
        found, expected = (str(getattr(c, other[0]))[:60] for c in (reference, config))
        raise Dsv4Error(finding("reference.other", "config.json", problem, expected=expected, found=found))
