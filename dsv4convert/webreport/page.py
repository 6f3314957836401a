"""The page: facts, pictures and checks poured into `page.html`, which escapes whatever it is given."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from dsv4convert import __version__
from dsv4convert.files import printable
from dsv4convert.webreport.answers import Answers
from dsv4convert.webreport.budget import CARDS
from dsv4convert.webreport.facts import PROJECTIONS, Facts
from dsv4convert.webreport.figures import heat_map, histogram
from dsv4convert.webreport.saved import Check, overall


def render_page(name: str, facts: Facts, checks: Sequence[Check], answers: Answers | None = None) -> str:
    """Return the page.

    Args:
        name: Name of the checkpoint's directory.
        facts: What the manifest says.
        checks: The structural check that was just made, then saved ones.
        answers: What a probe found.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_printable
    )
    environment.filters["code"] = _code
    html = environment.from_string(_resource("page.html")).render(
        name=name,
        shell_name=shlex.quote(name),
        version=__version__,
        style=Markup(_resource("page.css")),
        facts=facts,
        experts=facts.experts,
        projections=PROJECTIONS,
        pictures=_pictures(facts),
        memory=facts.memory,
        cards=CARDS,
        checks=checks,
        answers=answers,
        overall=overall(checks),
        manifest_sha256=checks[0].report.facts["manifest_sha256"],
    )
    return html.encode("utf-8", "backslashreplace").decode()


def _printable(value: Any) -> Any:
    """Let no control character and no change of direction through; markup of our own stays as it is."""
    return printable(value, 4096) if isinstance(value, str) and not isinstance(value, Markup) else value


def _code(text: str) -> Markup:
    """Escape a sentence and set what stands between backticks as code."""
    parts = printable(text, 4096).split("`")
    if len(parts) % 2 == 0:
        return escape("`".join(parts))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part) for i, part in enumerate(parts)
    )


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _pictures(facts: Facts) -> dict[str, Markup]:
    if facts.experts is None:
        return {}
    # The only strings in them that come from outside are numbers and names that matched a pattern.
    return {
        "heat": Markup(heat_map(facts.experts.layers)),
        "spans": Markup(histogram(facts.experts.spans)),
    }
