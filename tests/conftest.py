"""What holds for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.tiers import ALL, thorough

# A shell starts what it runs in the background with SIGINT ignored, and nohup with SIGHUP, and processes inherit both:
# the programs that tests send these signals to would never see them. A handler is not inherited.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)
# torch's store looks up the name of each process that connects to it, and answers nobody meanwhile. A name server that
# does not answer would have tests wait for tens of seconds in all.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only `make test-all` runs, unless a test is asked for by its name."""
    named = any("::" in argument for argument in config.args)
    left_out = [] if ALL or named else [item for item in items if item.get_closest_marker(thorough.name)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True, scope="module")
def own_strategies_are_forgotten() -> Iterator[None]:
    """A strategy that the tests of one file make known would be tried by the search in those of the next one."""
    from autopar.strategies import STRATEGIES

    before = dict(STRATEGIES)
    yield
    STRATEGIES.clear()
    STRATEGIES.update(before)


@pytest.fixture(autouse=True)
def distributions_check_their_values() -> Iterator[None]:
    """PyTorch's compiler turns these checks off for good when it is first asked: the next test would run without."""
    from torch.distributions import Distribution

    before = bool(Distribution._validate_args)
    yield
    Distribution.set_default_validate_args(before)
