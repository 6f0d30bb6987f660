"""One case of `benchmarks.planning`, in a process of its own: its name, and seconds for the search. Prints JSON."""

from __future__ import annotations

import json
import sys

from benchmarks.planning import measured

if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1], float(sys.argv[2]))))
