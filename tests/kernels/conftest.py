"""What the tests on a GPU get: the device, and each kernel in two codes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(params=["native", "sm80"])
def code(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test twice: with code for the card that is here, and with the PTX for SM80 of the gate."""
    if request.param == "native":
        yield "native"
        return
    from kernels_ref.sm80.gate import sm80_code

    with sm80_code():
        yield "sm80"
