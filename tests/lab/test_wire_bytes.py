"""What a lowering declares to send is what crosses the wire, within 3 %. Needs root, for a namespace of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from autopar.lab import launch, private_namespace, unavailable_reason
from tests.tiers import sizes

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))


WORLDS = sizes(3, also=(2, 4))


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, dict[str, float]]]:
    """By number of ranks and plan: bytes seen and declared. The same processes take part in all."""
    job = [sys.executable, str(Path(__file__).with_name("wire_job.py")), *map(str, WORLDS)]
    with private_namespace() as host:
        output = launch([host] * max(WORLDS), job, timeout_s=280)
    return json.loads(output[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("world_size", WORLDS)
def test_bytes_on_the_wire_are_those_declared(found: dict[str, dict[str, dict[str, float]]], world_size: int) -> None:
    plans = found[str(world_size)]
    assert len(plans) == (20 if world_size == 4 else 18)
    for name, bytes_per_step in plans.items():
        assert bytes_per_step["seen"] == pytest.approx(bytes_per_step["declared"], rel=0.03), name
