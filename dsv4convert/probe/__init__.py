"""Run a checkpoint on a CPU, layer by layer, and say what it answers.

One layer's weights are read at a time, and of the routed experts only those that the prompt activates, one
by one. With a reference both run side by side and are compared after every sublayer. Importing this package
loads no torch; `probe` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dsv4convert.checkpoint import open_checkpoint
from dsv4convert.errors import Dsv4Error, Finding, Refused, errors_of, finding
from dsv4convert.golden import make_golden
from dsv4convert.probe.prompt import TOKENIZER, Prompt, Vocabulary, check_prompt
from dsv4convert.probe.ticker import Tick
from dsv4convert.survey import Survey, survey
from dsv4convert.vision.config import VisionConfig
from dsv4convert.vision.layout import PLACEHOLDER

if TYPE_CHECKING:
    from dsv4convert.probe.pictures import Pictures
    from kernels_ref.config import ModelConfig

__all__ = ["Probed", "Tick", "probe"]


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe found.

    Attributes:
        golden: Content of `golden.json`.
        findings: What is wrong.
        picture_seconds: Per picture, seconds in the vision tower, in that of a reference too.
        layer_seconds: Per layer, seconds over the prompt.
        token_seconds: Per further token, seconds.
        peak_bytes: Largest resident size of this process so far; None where the system does not say.
    """

    golden: dict[str, Any]
    findings: tuple[Finding, ...]
    picture_seconds: tuple[float, ...]
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
            "picture_seconds": [round(s, 4) for s in self.picture_seconds],
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
    images: Sequence[str | os.PathLike[str]] = (),
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
        images: Picture files, shown in this order: where text or ids have the placeholder
            ``<｜deepseek_image｜>``, or else before the text.
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
        Refused: the model is of a release that cannot be run, or the prompt or a picture cannot be used.
        EnvironmentFault: reading failed, or `tokenizers` or Pillow is missing.
        ValueError: neither or both of `prompt` and `ids`, or a number or name that there is not.
    """
    if (prompt is None) == (ids is None) or (chat and ids is not None):
        raise ValueError("pass either `prompt` or `ids`; `chat` goes with `prompt`")
    if tokens < 1 or top < 1:
        raise ValueError("`tokens` and `top` are at least 1")
    seen = _sound(path)
    config = _model_config(seen)
    pictures = _pictures(seen, images)
    given, vocabulary = _prompt(seen, prompt, ids, chat, pictures)
    check_prompt(given, config.vocab, _longest(seen) - tokens)
    from dsv4convert.probe.job import Job  # Loads torch.

    with ExitStack() as stack:
        job = Job(seen, config, numerics, pictures, stack)
        if reference is not None:
            beside = _sound(reference, "reference ")
            job.compare(beside, _model_config(beside))
        if draft:
            job.watch_draft(tokens)
        job.run(given, tokens, top, progress)
        if draft:
            job.examine_draft(given.positions)
    text = vocabulary.decode if vocabulary else None
    steps = [step.as_dict(text) for step in job.steps]
    answer = text([step.token for step in job.steps]) if text else None
    shown = pictures.as_dicts(given.blocks) if pictures else []
    question = given.as_dict() | {"pictures": shown}
    golden = make_golden(seen, question, numerics, steps, answer, job.agreement(), job.draft_form())
    looks = tuple(pictures.seconds) if pictures else ()
    return Probed(golden, job.findings(), looks, tuple(job.layers), tuple(job.further), _peak_bytes())


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


def _pictures(seen: Survey, images: Sequence[str | os.PathLike[str]]) -> Pictures | None:
    """Read the pictures; None if there are none."""
    if not images:
        return None
    name = seen.checkpoint.root.name
    try:
        vision = VisionConfig.from_config(seen.checkpoint.config)
    except ValueError as error:
        raise Refused(finding("probe.unsupported", name, str(error))) from None
    if vision is None:
        problem = f"{seen.title} reads text only, and {len(images)} pictures were given"
        raise Refused(finding("probe.no-vision", name, problem))
    from dsv4convert.probe.pictures import read_pictures  # Loads torch.

    return read_pictures(images, vision)


def _prompt(
    seen: Survey, text: str | None, ids: Sequence[int] | None, chat: bool, pictures: Pictures | None
) -> tuple[Prompt, Vocabulary | None]:
    vocabulary: Vocabulary | None
    try:
        vocabulary = Vocabulary(seen.checkpoint.root)
    except Dsv4Error:
        if text is not None or pictures:
            raise
        return Prompt(tuple(ids or ())), None  # Ids need no tokenizer; the answer is shown as ids.
    if text is None:
        given = Prompt(tuple(ids or ()))
    else:
        count = len(pictures.shown) if pictures else 0
        given = Prompt(vocabulary.encode(text, chat=chat, pictures=count), text, chat)
    return _with_places(seen, given, vocabulary, pictures), vocabulary


def _with_places(seen: Survey, given: Prompt, vocabulary: Vocabulary, pictures: Pictures | None) -> Prompt:
    """Give the pictures their positions; a place without a picture is refused where the model has eyes."""
    place, geometry = vocabulary.placeholder, seen.geometry
    if pictures and place is None:
        problem = f"`{PLACEHOLDER}`, which stands for a picture, is no token of this tokenizer"
        raise Refused(
            finding("probe.chat", TOKENIZER, problem, hint="restore `tokenizer.json` from the source")
        )
    blind = geometry is None or geometry.vision is None
    if place is None or blind or (pictures is None and place not in given.ids):
        return given
    vocab = seen.checkpoint.config["vocab_size"]
    return given.with_pictures(pictures.grids if pictures else (), place, vocab)


def _longest(seen: Survey) -> int:
    longest = seen.checkpoint.config.get("max_position_embeddings")
    return longest if isinstance(longest, int) else 1 << 20


def _peak_bytes() -> int | None:
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            peak = next((line for line in status if line.startswith("VmHWM:")), None)
    except OSError:
        return None
    return int(peak.split()[1]) * 1024 if peak else None
