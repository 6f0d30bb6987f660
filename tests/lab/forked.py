"""What forked ranks do in `test_forks`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from autopar.lab import serve

if sys.argv[-1] == "cannot be imported":
    raise ImportError("no such luck")
print("hello")
subprocess.Popen(["true"])

IMPORTED_BY = os.getpid()


def main() -> None:
    what, rank = sys.argv[-1], os.environ["RANK"]
    if what == "answer":
        known = {"rank": rank, "forked": os.getppid() == IMPORTED_BY, "hash": hash("a")}
        serve(lambda request: {**known, "asked": request})
    elif what == "leave":
        sys.stdin.close()
    elif what == "say":
        print(f"rank {rank} of {os.environ['WORLD_SIZE']}", sorted(name for _, name in socket.if_nameindex()))
        print(sorted(p.name for p in Path("/sys/class/net").iterdir()), file=sys.stderr)
        print("cores", len(os.sched_getaffinity(0)), "leads", os.getsid(0) == os.getpid(), file=sys.stderr)
    elif rank == "1" and what == "raise":
        raise ValueError("not today")
    elif rank == "1" and what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        time.sleep(600)
