"""Every exact strategy and every AutoDist builder trains as one process would, to 1e-10 in float64, after ten steps."""

from __future__ import annotations

import os
from functools import partial
from itertools import product
from typing import Any

import pytest

from autopar.search import AUTODIST
from autopar.testing.training import TRAININGS
from tests.gloo.equality import Case, capture_all, run_cases
from tests.gloo.ranks import run_worlds
from tests.tiers import ALL

MODELS = ("tied-mlp", "gpt2", "resnet", "bag-of-words")
STRATEGIES = ("ddp", "zero1", "mixed", "late", "hierarchical", "servers", "sharded", *AUTODIST)
TRAINED = [t for t in TRAININGS if t != "plain"]
CASES = [
    Case(model, strategy, training, ("equal", "unequal")[(i + i // len(TRAINED)) % 2])
    for i, (model, strategy, training) in enumerate(product(MODELS, STRATEGIES, TRAINED))
]
"""Every model with every strategy and every training; each pair of them with equal and with unequal batches."""
OF_ALL, EVERYTHING = len(CASES), os.environ.get("AUTOPAR_EQUALITY") == "all"
CASES += [
    Case(model, "parts", training, ("equal", "unequal")[i % 2])
    for i, (model, training) in enumerate(product(("gpt2", "bag-of-words", "lookups", "lookups"), TRAININGS))
]
"""What gradients are made of, where there is structure; `plain` SGD leaves rows alone that no rank has looked up."""
CASES += [
    Case(model, "heads", training, ("unequal", "equal")[i % 2])
    for i, (model, training) in enumerate(product(("classes", "few-classes", "resnet", "smoothed"), TRAINED))
]
"""Classes that ranks share out: some do not count, some ranks have none that count, there are fewer than ranks, and
labels are smoothed."""
CASES += [
    Case(model, "shares", training, ("equal", "unequal")[i % 2])
    for i, (model, training) in enumerate(product(("gpt2", "bag-of-words", "lookups", "lookups"), TRAININGS))
]
"""Rows of tables that ranks share out, tied to a head or not."""
CASES += [
    Case(model, "layers", training, ("unequal", "equal")[i % 2])
    for i, (model, training) in enumerate(product(("bag-of-words", "classes", "few-classes", "smoothed"), TRAINED))
]
"""Outputs of linear layers that ranks share out, more than ranks or fewer, with a bias or without."""


def runs_on(world_size: int, index: int) -> bool:
    """Every model comes with every strategy, and every strategy with every training: of three such, half are trained.
    Each of them comes once with several ranks: half of them with two, a quarter each with three and four. One rank,
    where no collective is left, takes a quarter as well. `make test` leaves out every other
    one of these, by pairs; all on all, where asked for."""
    if not EVERYTHING and index < OF_ALL and (sum(divmod(index // len(TRAINED), len(STRATEGIES))) // 2 + index) % 2:
        return False
    if CASES[index].strategy == "hierarchical" and world_size < 4:  # two and three ranks do not divide into teams
        return False
    if not (EVERYTHING or ALL or CASES[index].strategy == "hierarchical") and (index // len(TRAINED) + index // 2) % 2:
        return False
    if EVERYTHING or CASES[index].strategy == "hierarchical":
        return True
    kind = (index % len(TRAINED) + index // len(TRAINED)) % 4
    return kind in {1: (0,), 2: (0, 1), 3: (2,), 4: (3,)}[world_size]


RUNS = {n: [c for i, c in enumerate(CASES) if runs_on(n, i)] for n in (1, 2, 3, 4)}


@pytest.fixture(scope="module")
def outcomes() -> dict[int, Any]:
    """What each world size has found, run once when the first test asks for it, in the same processes, which have the
    graphs of all from the one that they are forked from."""
    return run_worlds(run_cases, {n: (cases,) for n, cases in RUNS.items()}, partial(capture_all, RUNS))


@pytest.mark.timeout(5400)
@pytest.mark.parametrize(("world_size", "case"), [(n, c) for n, cases in RUNS.items() for c in cases], ids=str)
def test_trains_as_one_process_would(world_size: int, case: Case, outcomes: dict[int, Any]) -> None:
    found = [rank[RUNS[world_size].index(case)] for rank in outcomes[world_size]]
    (compared,) = (f for f in found if "parameters" in f)
    assert max(compared["parameters"], compared["loss"]) <= 1e-10, compared
    assert len({f["digest"] for f in found}) == 1, "replicas differ, if only in their last bits"
