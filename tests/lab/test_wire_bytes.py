"""What a lowering declares to send is what crosses the wire, within 3 %. Needs root, for a namespace of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from autopar.lab import launch, private_namespace, unavailable_reason

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bytes_on_the_wire_are_those_declared(world_size: int) -> None:
    job = [sys.executable, str(Path(__file__).with_name("wire_job.py"))]
    with private_namespace() as host:
        output = launch([host] * world_size, job, timeout_s=200)
    found = json.loads(output[0])
    assert len(found) == (15 if world_size == 4 else 13)
    for name, bytes_per_step in found.items():
        assert bytes_per_step["seen"] == pytest.approx(bytes_per_step["declared"], rel=0.03), name
