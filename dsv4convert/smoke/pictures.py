"""Pictures to ask about, computed: plain colours, shapes and numbers. None is shipped, all are small files.

A server enlarges every picture below 147,456 pixels, so small ones cost as many tokens as those of 384 x 384.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Final

from dsv4convert.smoke.answers import Picture

if TYPE_CHECKING:
    from PIL.Image import Image

Colour = tuple[int, int, int]

#: Colours with one undisputed name each.
COLOURS: Final[dict[str, Colour]] = {
    "red": (220, 20, 20),
    "green": (20, 160, 40),
    "blue": (20, 40, 220),
    "yellow": (250, 220, 20),
}
SHAPES: Final = ("circle", "square", "triangle")
#: Width and height: square, wide, high, and shapes whose blocks are of other lengths.
SIZES: Final = ((64, 64), (96, 48), (48, 96), (80, 60), (60, 80), (120, 40))
_WHITE: Final = (255, 255, 255)
_BLACK: Final = (0, 0, 0)


@cache
def plain(colour: str, width: int = 64, height: int = 64) -> Picture:
    """Return a picture of one colour."""
    return _picture(f"plain {colour}", _canvas(width, height, COLOURS[colour]))


def marked(colour: str, number: int, width: int = 64, height: int = 64) -> Picture:
    """Return a picture of one colour with dots that spell a number: no cache of a server holds it yet."""
    image = _canvas(width, height, COLOURS[colour])
    for bit in range(32):
        if number >> bit & 1:
            image.putpixel((bit % 8 * 2, bit // 8 * 2), _WHITE)
    return _picture(f"marked {colour}", image)


@cache
def shape(name: str, colour: str = "blue", side: int = 256) -> Picture:
    """Return a filled circle, square or triangle on white."""
    from PIL import ImageDraw

    image = _canvas(side, side, _WHITE)
    low, high = side // 6, side - side // 6
    draw, fill = ImageDraw.Draw(image), COLOURS[colour]
    if name == "circle":
        draw.ellipse((low, low, high, high), fill=fill)
    elif name == "square":
        draw.rectangle((low, low, high, high), fill=fill)
    else:
        draw.polygon(((side // 2, low), (high, high), (low, high)), fill=fill)
    return _picture(f"a {colour} {name}", image)


@cache
def written(text: str) -> Picture:
    """Return black text on white, 48 pixels high."""
    from PIL import ImageDraw, ImageFont

    font = ImageFont.load_default(48)
    left, top, right, bottom = font.getbbox(text)
    margin = 32
    image = _canvas(int(right - left) + 2 * margin, int(bottom - top) + 2 * margin, _WHITE)
    ImageDraw.Draw(image).text((margin - left, margin - top), text, fill=_BLACK, font=font)
    return _picture(f"the text {text}", image)


def many(number: int) -> Sequence[Picture]:
    """Return so many pictures; colours and sizes go round at different paces."""
    names = tuple(COLOURS)
    return [plain(names[i % len(names)], *SIZES[i % len(SIZES)]) for i in range(number)]


def damaged() -> Sequence[Picture]:
    """Return files that are no pictures: text, one that ends early, an empty one, and an unknown kind."""
    whole = written("broken")
    return (
        Picture("text that claims to be a picture", 1, 1, b"This is no picture.\n"),
        Picture("half a picture", whole.width, whole.height, whole.data[: len(whole.data) // 2]),
        Picture("a header alone", 1, 1, whole.data[:8]),
    )


def _canvas(width: int, height: int, colour: Colour) -> Image:
    from PIL import Image

    return Image.new("RGB", (width, height), colour)


def _picture(name: str, image: Image) -> Picture:
    file = BytesIO()
    image.save(file, "PNG")
    return Picture(name, image.width, image.height, file.getvalue())
