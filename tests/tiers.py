"""What `make test` leaves out, and `make test-all` runs: further numbers of ranks, further plans, tests of minutes.

Set `AUTOPAR_TESTS=all` to run all of it by hand.
"""

from __future__ import annotations

import os

import pytest
import torch

ALL = os.environ.get("AUTOPAR_TESTS") == "all"
"""Whether everything is run."""

thorough = pytest.mark.thorough
"""Of a test that takes long, and most of whose code others run as well: `make test` leaves it out."""

newer = pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch captures it from 2.13 on")
"""Of a test whose model the oldest versions of PyTorch do not capture: it runs eagerly with them."""


def sizes(*always: int, also: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of ranks that are tried, ascending. `also`: those that only `make test-all` tries."""
    return tuple(sorted((*always, *also) if ALL else always))
