"""The pictures of a report: SVG by matplotlib, made to live inside a page.

Pictures are drawn in placeholder colours that become CSS variables of the page, so that one picture serves
light, dark and print. Text stays text in the font of the page. The same facts give the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from matplotlib import rc_context, style
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dsv4convert.webreport.cited import Cited
from dsv4convert.webreport.facts import PROJECTIONS, Layer, Span

#: Borders of the colour classes and their labels; fixed, so that two reports can be compared by eye.
BORDERS = {1e-5: "10⁻⁵", 1e-4: "10⁻⁴", 3e-4: "", 1e-3: "10⁻³", 3e-3: "", 1e-2: "10⁻²"}
# Exact, then one between any two borders, and those beyond them.
_CLASSES = len(BORDERS) + 2

_VARIABLES = ("ink", "soft", "rule", "safe", "wide", *(f"heat-{i}" for i in range(_CLASSES)))
# No colour that matplotlib draws by itself looks like these.
_COLOUR = {name: f"#01f0{i:02x}" for i, name in enumerate(_VARIABLES)}
_SVG = "{http://www.w3.org/2000/svg}"
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dsv4convert",
    "font.size": 12,
    "text.color": _COLOUR["ink"],
    "axes.labelcolor": _COLOUR["soft"],
    "xtick.labelcolor": _COLOUR["soft"],
    "ytick.labelcolor": _COLOUR["soft"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def heat_map(layers: Sequence[Layer]) -> str:
    """Draw one row per layer and one column per projection, three times: mean, largest, rounded share."""
    row = 13 if len(layers) > 20 else 18
    top, bottom, left, width = 46, 50, 46, 400
    height = top + row * len(layers) + bottom
    step = (width - left) / 3
    titles: dict[str, str] = {}
    with _house_style():
        figure = _figure(width, height)
        for panel, heading in enumerate(("mean error", "largest error", "codes rounded")):
            x, wide = (left + panel * step) / width, (step - 12) / width
            axes = figure.add_axes((x, bottom / height, wide, row * len(layers) / height))
            _frame(axes, layers, heading, labelled=panel == 0)
            titles |= _squares(axes, layers, panel, heading)
        axes = figure.add_axes((left / width, 4 / height, (width - left - 12) / width, 32 / height))
        _key(axes)
        return _inline(figure, titles)


def _squares(axes: Any, layers: Sequence[Layer], panel: int, heading: str) -> dict[str, str]:
    """Draw the squares of one panel and return what each one says."""
    titles = {}
    for y, layer in enumerate(layers):
        for x, projection in enumerate(PROJECTIONS):
            if projection in layer.cells:
                cell = layer.cells[projection]
                value, text = _cell_values(cell.mean, cell.worst, cell.exact)[panel]
                key = f"{panel}/{layer.name}/{projection}"
                titles[key] = f"{layer.name} {projection}: {heading} {text}"
                _box(axes, (x + 0.03, y + 0.06), (0.94, 0.88), f"heat-{heat_class(value)}", key)
    return titles


def _box(
    axes: Any, corner: tuple[float, float], size: tuple[float, float], colour: str, key: str | None = None
) -> None:
    patch = Rectangle(corner, *size, facecolor=_COLOUR[colour], edgecolor="none", gid=key)
    patch.set_clip_on(False)
    axes.add_patch(patch)


def _cell_values(mean: Cited, worst: Cited, exact: Cited) -> tuple[tuple[float, str], ...]:
    return (mean.value, mean.text), (worst.value, worst.text), (1 - exact.value, f"all but {exact.text}")


def heat_class(value: float) -> int:
    """Return the colour class of an error: 0 for exact, then one per decade."""
    return 0 if value == 0 else 1 + sum(value >= border for border in BORDERS)


def _frame(axes: Any, layers: Sequence[Layer], heading: str, *, labelled: bool) -> None:
    axes.set_xlim(0, len(PROJECTIONS))
    axes.set_ylim(len(layers), 0)
    axes.set_title(heading, loc="left", fontsize=12, pad=22)
    axes.xaxis.tick_top()
    axes.set_xticks([x + 0.5 for x in range(len(PROJECTIONS))], PROJECTIONS)
    axes.tick_params(pad=3)
    shown = _labelled_rows(layers) if labelled else []
    axes.set_yticks([y + 0.5 for y in shown], [_short(layers[y].name) for y in shown], fontsize=11)
    if labelled:
        axes.text(-0.1, -0.25, "layer", ha="right", va="bottom", fontsize=11, color=_COLOUR["soft"])
    axes.set_frame_on(False)


def _labelled_rows(layers: Sequence[Layer]) -> list[int]:
    """Return the rows to label: every fifth of many layers, and all draft stages."""
    step = 5 if len(layers) > 20 else 1
    return [y for y, layer in enumerate(layers) if layer.name.startswith("mtp") or y % step == 0]


def _short(name: str) -> str:
    kind, _, number = name.partition(".")
    return number if kind == "layers" else f"{kind} {number}"


def _key(axes: Any) -> None:
    """Draw the colour key: exact, a gap, then the classes with their borders."""
    axes.set_xlim(0, _CLASSES + 0.5)
    axes.set_ylim(32, 0)
    axes.axis("off")
    _box(axes, (0, 2), (1, 10), "heat-0")
    axes.text(0.5, 16, "exact", ha="center", va="top", fontsize=11, color=_COLOUR["soft"])
    for i in range(1, _CLASSES):
        _box(axes, (i + 0.52, 2), (0.96, 10), f"heat-{i}")
    for i, label in enumerate(BORDERS.values()):
        axes.text(i + 2.5, 16, label, ha="center", va="top", fontsize=11, color=_COLOUR["soft"])


def histogram(spans: Sequence[Span]) -> str:
    """Draw how many rows have which span, on a logarithmic axis: wide rows are rare and matter."""
    width, height = 400, 250
    with _house_style():
        figure = _figure(width, height)
        axes = figure.add_axes((8 / width, 46 / height, 384 / width, 178 / height))
        largest = max((span.rows.value for span in spans), default=0)
        axes.set_yscale("log")
        axes.set_ylim(0.5, max(10, largest) * 2)
        axes.set_xlim(-0.6, max(len(spans), 5) - 0.4)
        titles = {}
        for x, span in enumerate(spans):
            if span.rows.value:
                key = f"span/{x}"
                titles[key] = f"span {span.label}: {span.rows.text} rows"
                _bar(axes, x, span, key, len(spans))
        axes.set_xticks(range(len(spans)), [s.label.replace(" or more", "+") for s in spans])
        axes.set_xlabel("span: largest minus smallest scale byte of the row")
        axes.set_yticks([])
        axes.yaxis.set_minor_locator(_nowhere())
        for side in ("left", "right", "top"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(_COLOUR["rule"])
        return _inline(figure, titles)


def _nowhere() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _bar(axes: Any, x: int, span: Span, key: str, bars: int) -> None:
    colour = _COLOUR["safe" if span.exact else "wide"]
    (bar,) = axes.bar([x], [span.rows.value - 0.5], bottom=0.5, width=0.78, color=colour, linewidth=0)
    bar.set_gid(key)
    bar.set_clip_on(False)
    label = span.rows.text if bars <= 6 else short_number(int(span.rows.value))
    axes.text(x, span.rows.value * 1.12, label, ha="center", va="bottom", fontsize=11)


def short_number(value: int) -> str:
    """Return a count in at most five characters: ``950``, ``1.2k``, ``34M``."""
    for factor, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= factor:
            digits = f"{value / factor:.1f}" if value < 10 * factor else f"{value / factor:.0f}"
            return digits.removesuffix(".0") + unit
    return str(value)


class _house_style:
    """A context in which a matplotlibrc of the user has no say."""

    def __enter__(self) -> None:
        self._default = style.context("default", after_reset=True)
        self._own = rc_context(_SETTINGS)
        self._default.__enter__()
        self._own.__enter__()

    def __exit__(self, *error: object) -> None:
        self._own.__exit__(None, None, None)
        self._default.__exit__(None, None, None)


def _figure(width: int, height: int) -> Any:
    return Figure(figsize=(width / 72, height / 72), dpi=72)


def _inline(figure: Any, titles: dict[str, str]) -> str:
    """Return an `<svg>` element for use in HTML: no ids, no fonts, colours of the page, a title per mark."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    ElementTree.register_namespace("", _SVG.strip("{}"))
    root = ElementTree.fromstring(buffer.getvalue())
    for group in root.findall(f"{_SVG}defs"):
        root.remove(group)  # A style sheet, which would reach beyond the picture.
    for element in reversed(list(root.iter())):
        _tidy(element, titles)
    root.set("width", root.get("width", "").removesuffix("pt"))
    root.set("height", root.get("height", "").removesuffix("pt"))
    root.set("aria-hidden", "true")
    return ElementTree.tostring(root, encoding="unicode")


def _tidy(element: ElementTree.Element, titles: dict[str, str]) -> None:
    title = titles.get(element.attrib.pop("id", ""))
    if title:
        label = ElementTree.Element(f"{_SVG}title")
        label.text = title
        element.insert(0, label)
    if found := element.get("style"):
        kept = [part for part in found.split("; ") if not part.startswith("font-family")]
        text = "; ".join(kept)
        for name, colour in _COLOUR.items():
            text = text.replace(colour, f"var(--{name})")
        element.set("style", text)
    for child in list(element):
        # Empty groups and invisible backgrounds.
        if not len(child) and (child.tag == f"{_SVG}g" or child.get("style") == "fill: none"):
            element.remove(child)
    element.text = (element.text or "").strip() or None
    element.tail = None
