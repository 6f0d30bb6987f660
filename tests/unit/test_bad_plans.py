"""Plan files that cannot be used: whatever they hold, the user gets a PlanError."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from autopar import Plan
from autopar.errors import PlanError
from tests.unit.plans import small_plan


def text() -> str:
    return small_plan().model_dump_json()


def changed(change: Any) -> str:
    data = json.loads(text())
    change(data)
    return json.dumps(data)


def test_a_device_without_memory() -> None:
    parts = "parameters", "gradients", "optimizer", "activations", "communication", "other", "reserve"
    use = {"rank": 0, "device": "cpu", "device_bytes": 0, **{f"{part}_bytes": 0 for part in parts}}
    with pytest.raises(PlanError, match=r"memory\.device_bytes.*greater than 0"):
        Plan.loads(changed(lambda data: data.update(memory=use)))


def test_a_plan_survives_the_disk(tmp_path: Path) -> None:
    plan = small_plan()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read the plan"):
        Plan.load(tmp_path / "none.json")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file(share: float) -> None:
    whole = text()
    with pytest.raises(PlanError, match="truncated"):
        Plan.loads(whole[: int(share * len(whole))])


@pytest.mark.parametrize(
    "hostile",
    [
        *("[]", "3", "null", '"x"', "NaN", "[" * 100_000, "\x00", "{}"),
        '{"schema_version": 1}',
        '{"schema_version": 1e999}',
    ],
    ids=lambda h: h[:24],
)
def test_what_is_no_plan(hostile: str) -> None:
    with pytest.raises(PlanError):
        Plan.loads(hostile)


def test_another_schema_version() -> None:
    with pytest.raises(PlanError, match="schema version 2, this autopar reads version 1"):
        Plan.loads(changed(lambda d: d.update(schema_version=2)))


def test_an_unknown_field() -> None:
    with pytest.raises(PlanError, match="wire_type"):
        Plan.loads(changed(lambda d: d["groups"][0].update(wire_type="x")))


def test_a_parameter_in_two_groups_and_one_in_none() -> None:
    with pytest.raises(PlanError, match="more than one group"):
        Plan.loads(changed(lambda d: d["groups"].append(d["groups"][0])))
    with pytest.raises(PlanError, match=r"is in no group|slices end at"):
        Plan.loads(changed(lambda d: d["groups"].pop()))


def test_slices_that_overlap() -> None:
    def cut(data: Any) -> None:
        group = data["groups"][0]
        name = group["members"][0]["name"]
        group["members"][0] = {"name": name, "dim": 0, "start": 0, "stop": 2}
        group["members"].append({"name": name, "dim": 0, "start": 1, "stop": 3})

    with pytest.raises(PlanError, match="gap or overlap"):
        Plan.loads(changed(cut))


def test_nothing_but_a_plan_error_comes_of_random_damage() -> None:
    """Two thousand damaged files: cut, doubled and replaced pieces. Some still are plans; none does anything else."""
    rng, whole = random.Random(0), text()
    junk = ['"', "{", "}", "[", "]", "null", "-1", "1e400", "NaN", '"__class__"', "\\u0000", "true", "\ud800"]
    for _ in range(2000):
        a, b = sorted(rng.randrange(len(whole)) for _ in range(2))
        b = min(b, a + 40)
        damaged = whole[:a] + rng.choice([*junk, "", whole[a:b] * 2]) + whole[b:]
        try:
            Plan.loads(damaged)
        except PlanError:
            continue
