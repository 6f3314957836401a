"""The report page in a real browser: no complaint, and a picture in light and in dark."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from dsv4convert import api
from dsv4convert.webreport import make_page
from tests.conftest import browser
from tests.samples import make_served

pytestmark = [pytest.mark.browser, pytest.mark.slow]

DARK, LIGHT = 0, 1


@pytest.fixture
def shoot(tmp_path: Path) -> Callable[..., tuple[np.ndarray, str]]:
    """Return ``shoot(page, scheme, width)``: opens a file, returns picture [H, W, 3] and the console."""

    def run(page: Path, scheme: int, width: int = 1200) -> tuple[np.ndarray, str]:
        picture = tmp_path / f"{scheme}-{width}.png"
        switches = (
            *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "hide-scrollbars"),
            *("disable-background-networking", "disable-component-update", "disable-sync"),
            *("enable-logging=stderr", "v=0", f"window-size={width},6000"),
            *(f"user-data-dir={tmp_path / 'profile'}", f"blink-settings=preferredColorScheme={scheme}"),
            f"screenshot={picture}",
        )
        command = [browser() or "", *(f"--{switch}" for switch in switches), page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
        return imread(picture)[..., :3], console

    return run


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Return a report as rich as a real one: many layers, all classes of error, wide rows, a budget."""
    api.convert(make_served(tmp_path / "source"), tmp_path / "model")
    path = tmp_path / "page.html"
    path.write_text(make_page(tmp_path / "model").html)
    return path


def test_page_opens_in_light_and_dark(shoot: Callable[..., tuple[np.ndarray, str]], page: Path) -> None:
    (light, said), (dark, said_too) = shoot(page, LIGHT), shoot(page, DARK)
    assert said + said_too == ""
    assert light.shape == dark.shape and light.shape[1] == 1200
    # Paper, not ink, fills most of a page, and it follows the reader's preference.
    assert np.median(light) > 0.9 and np.median(dark) < 0.2
    for picture in (light, dark):
        colours = np.unique((picture * 15).astype(int) @ (256, 16, 1))
        assert len(colours) > 40, "a blank page, or one without its pictures"


STYLE = (Path(__file__).parent.parent / "dsv4convert" / "webreport" / "page.css").read_text()


def area(picture: np.ndarray, name: str, scheme: int) -> int:
    """Return how many pixels have the colour of a CSS variable in one of the two schemes."""
    colour = re.findall(rf"--{name}: #([0-9a-f]{{6}});", STYLE)[{LIGHT: 0, DARK: 1}[scheme]]
    wanted = np.array([int(colour[i : i + 2], 16) for i in (0, 2, 4)])
    return int((np.rint(picture * 255) == wanted).all(axis=-1).sum())


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_pictures_are_drawn_in_the_colours_of_the_scheme(
    shoot: Callable[..., tuple[np.ndarray, str]], page: Path, scheme: int
) -> None:
    picture, said = shoot(page, scheme)
    assert said == ""
    # Squares of the heat map in most classes, both kinds of bars of the histogram, both bars of the budget.
    squares = [area(picture, f"heat-{i}", scheme) for i in range(8)]
    assert sum(size > 500 for size in squares) >= 6, squares
    assert area(picture, "safe", scheme) > 2000 and area(picture, "wide", scheme) > 10_000
    other = DARK if scheme == LIGHT else LIGHT
    assert area(picture, "wide", other) == 0, "the colours of the other scheme"


def test_page_fits_a_phone(shoot: Callable[..., tuple[np.ndarray, str]], page: Path) -> None:
    # Wide tables scroll inside their own box: nothing else may reach the right edge.
    picture, said = shoot(page, LIGHT, 500)
    assert said == ""
    assert np.ptp(picture[:, -8:].reshape(-1, 3), axis=0).max() < 0.02


def test_console_is_listened_to(shoot: Callable[..., tuple[np.ndarray, str]], tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text("<!doctype html><script>console.error('heard')</script>")
    assert "heard" in shoot(tmp_path / "bad.html", LIGHT)[1]
