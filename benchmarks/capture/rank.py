"""The life of a rank's process: it is told names of models on its input, one a line, and answers with outcomes."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from autopar.runtime.job.process_group import Group, join
from autopar.runtime.job.servers import serve_here
from autopar.testing.cases import SERVERS
from benchmarks.capture.families import chosen
from benchmarks.capture.outcome import Outcome
from benchmarks.capture.trial import attempt, said

PATIENCE_S = 60.0
"""How long a rank waits for another one."""


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing but outcomes goes to the one who reads them
    group = _joined()
    for line in sys.stdin:
        name = line.strip()
        try:
            (entry,) = chosen([name])
        except Exception as e:
            outcome = Outcome(name, failure=said(e), unusable=True)
        else:
            outcome = attempt(entry, group)
        print(json.dumps(outcome.as_dict()), file=answers, flush=True)
    os._exit(0)


def _joined() -> Group:
    if os.environ["WORLD_SIZE"] == "1":
        return Group(0, 1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=2 * PATIENCE_S))
    if dist.get_rank() == 0:
        serve_here(SERVERS)
    return join(PATIENCE_S)


if __name__ == "__main__":
    main()
