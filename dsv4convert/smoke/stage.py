"""What all checks with pictures need: a scene, the server's encoding, sentences about what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dsv4convert.errors import Finding, finding
from dsv4convert.smoke.answers import Answer, Picture, Turn, count_at, pick
from dsv4convert.smoke.checks import Scene
from dsv4convert.smoke.encoding import Encoder, Prompt
from dsv4convert.smoke.pictures import plain
from dsv4convert.smoke.server import Trouble

#: Tokens of an answer that is only counted.
FEW: Final = 4


@dataclass(frozen=True, slots=True)
class Stage:
    """A scene whose server sees pictures."""

    scene: Scene
    encoder: Encoder

    @property
    def real(self) -> bool:
        """Tell whether answers are judged: whoever asks says so, because no server tells."""
        return not self.scene.terms.random_weights

    @property
    def limit(self) -> int | None:
        """Most pictures in a request, if the server says it."""
        return count_at(pick(self.scene.server.info, "limit_mm_data_per_request"), "image")

    def refusal(self, pictures: int, prompt: Prompt | None = None) -> str:
        """Say why the server need not take a request; empty if it must."""
        context = self.scene.server.context
        if self.limit is not None and pictures > self.limit:
            return f"the server takes {self.limit:,} pictures in a request"
        if prompt is not None and context is not None and prompt.tokens + FEW > context:
            return f"the prompt has {prompt.tokens:,} tokens, and the server takes {context:,}"
        return ""

    def miscounted(self, where: str, answer: Answer, prompt: Prompt) -> Iterator[Finding]:
        """Yield a finding if an answer counts its prompt otherwise than the official layout."""
        if answer.prompt_tokens == prompt.tokens:
            return
        bare = len(prompt.ids) - len(prompt.blocks)
        problem = f"the prompt of {len(prompt.blocks)} pictures and {bare:,} other tokens is counted wrong"
        found = "no count" if answer.prompt_tokens is None else f"{answer.prompt_tokens:,}"
        yield finding("smoke.picture-count", where, problem, expected=f"{prompt.tokens:,}", found=found)

    def misplaced(self, where: str, prompt: Prompt, borders: Iterable[tuple[str, str]]) -> Iterator[Finding]:
        """Yield a finding for every picture that does not stand between the two texts of its border."""
        for number, (place, (before, after)) in enumerate(zip(prompt.places, borders, strict=True), 1):
            left = self.encoder.text(prompt.ids[:place]).rstrip()[-len(before) :]
            right = self.encoder.text(prompt.ids[place + 1 :]).lstrip()[: len(after)]
            if (left, right) != (before, after):
                problem = f"picture {number} does not stand where the request has it"
                expected, found = f"{before!r}, picture, {after!r}", f"{left!r}, picture, {right!r}"
                yield finding("smoke.picture-place", where, problem, expected=expected, found=found)

    def refused(
        self, where: str, what: str, ask: Callable[[], object], counts: Sequence[int] = ()
    ) -> Iterator[Finding]:
        """Yield a finding unless a request is refused with status 400 and a sentence that has these counts.

        Raises:
            Trouble: there is no answer at all.
        """
        try:
            ask()
        except Trouble as trouble:
            if trouble.kind != "status":
                raise
            if trouble.status != 400:
                yield finding("smoke.refusal", where, what, expected="status 400", found=f"{trouble}"[:120])
            elif missing := [n for n in counts if not re.search(rf"(?<!\d){n}(?!\d)", f"{trouble}")]:
                problem = f"{what} is refused with a sentence that does not count them"
                wanted = " and ".join(f"{n}" for n in missing)
                yield finding("smoke.refusal", where, problem, expected=wanted, found=f"{trouble}"[:120])
        else:
            yield finding("smoke.refusal", where, f"{what} was answered", expected="status 400")

    def alive(self, where: str) -> Iterator[Finding]:
        """Yield what is wrong with the answer to a legal request, sent after one that was refused."""
        turns = shown("What is in this picture?", plain("green"))
        try:
            prompt, answer = self.encoder.encode(turns), self.scene.chat.ask(turns, FEW)
        except Trouble as trouble:
            if trouble.kind == "pictures":
                yield finding("smoke.picture-count", where, f"{trouble}")
            elif trouble.kind == "status":
                problem = "after a refused request the server does not answer a legal one"
                yield finding("smoke.answer", where, problem, expected="status 200", found=f"{trouble}"[:120])
            else:
                raise
        else:
            yield from self.miscounted(where, answer, prompt)


def shown(*parts: str | Picture) -> tuple[Turn]:
    """Return one user turn of texts and pictures."""
    return (Turn("user", parts=parts),)
