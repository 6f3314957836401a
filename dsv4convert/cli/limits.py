"""The options of `convert` that say how its arithmetic is done, and which losses are still acceptable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

#: Decides where the arithmetic is done; the bytes are the same.
device_option = click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="What does the arithmetic; the bytes are the same. `cuda` needs a GPU and Triton.",
)


def limit_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say which losses are still acceptable."""
    for option in reversed(
        (
            click.option(
                "--allow-rounding",
                is_flag=True,
                help="Accept blocks that leave BF16's exact range; the manifest lists them.",
            ),
            click.option(
                "--max-relative-error",
                type=click.FloatRange(0),
                help="Refuse a repacked matrix above this relative error.",
            ),
            click.option(
                "--min-exact",
                type=click.FloatRange(0, 1),
                help="Refuse a repacked matrix with a smaller share of exact codes.",
            ),
        )
    ):
        function = option(function)
    return function
