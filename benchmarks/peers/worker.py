"""One rank. Holds every system that it was told to build, and takes steps of the one that it is asked for.

All systems of a workload live in the same processes: they share the imports and the processor's caches, and a system
whose turn it is not takes memory and nothing else.
"""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from autopar.lab.memory import release
from benchmarks.interleaved import serve_requests, time_steps
from benchmarks.peers import Step, peer_named
from benchmarks.zoo.named import any_workload
from benchmarks.zoo.workload import Workload


@dataclass(frozen=True)
class _Built:
    workload: Workload
    step: Step


class Worker:
    """Answers the requests of `benchmarks.peers.ranks.Ranks`."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._built: dict[str, _Built] = {}

    def answer(self, request: dict[str, Any]) -> Mapping[str, Any]:
        """Does what `do` says; an exception is the answer `error`, after which the job is not used any more."""
        try:
            match request["do"]:
                case "build":
                    self._build(request)
                case "run":
                    return self._run(request["key"], range(request["first"], request["first"] + request["count"]))
                case "drop":
                    self._drop(request["key"])
        except Exception as e:
            traceback.print_exc()
            return {"error": f"rank {self.rank}: {type(e).__name__}: {e}"}
        return {}

    def _build(self, request: dict[str, Any]) -> None:
        workload = any_workload(request["workload"])
        peer = peer_named(request["peer"])
        step = peer.build(workload, self.rank, self.world_size, request["options"])
        self._built[request["key"]] = _Built(workload, step)
        gc.collect()
        gc.freeze()  # the graphs of other systems would be looked through in everybody's steps

    def _run(self, key: str, numbers: range) -> Mapping[str, Any]:
        built = self._built[key]
        return time_steps(built.step, [built.workload.batch(n, self.rank) for n in numbers])

    def _drop(self, key: str) -> None:
        del self._built[key]
        gc.unfreeze()
        release()
        gc.freeze()


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    serve_requests(lambda: Worker().answer)


if __name__ == "__main__":
    main()
