"""The predicted timeline as a Chrome trace, which chrome://tracing and Perfetto open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import SpecError
from autopar.spec.files import write_file

if TYPE_CHECKING:
    from autopar.cost_models.base import Estimate


def write_trace(estimate: Estimate, path: str | Path) -> None:
    """Writes the estimate's spans; raises `SpecError` where it has none, since it was made without a timeline."""
    write_file(path, json.dumps(trace(estimate), separators=(",", ":")) + "\n", "trace")


def trace(estimate: Estimate) -> dict[str, Any]:
    """The trace as data: one thread a lane, times in microseconds, as the Trace Event Format has it."""
    if not estimate.spans:
        raise SpecError("the estimate has no timeline: ask the cost model for one with predict(..., timeline=True)")
    lanes = list(dict.fromkeys(span.lane for span in estimate.spans))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "predicted step"}}
    ]
    for tid, lane in enumerate(lanes):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": lane}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": tid, "args": {"sort_index": tid}})
    for span in estimate.spans:
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": category(span.name),
                "pid": 0,
                "tid": lanes.index(span.lane),
                "ts": span.start_s * 1e6,
                "dur": (span.stop_s - span.start_s) * 1e6,
            }
        )
    about = {
        "step_time_s": estimate.step_time_s,
        "relative_error": estimate.relative_error,
        "provenance": estimate.provenance,
    }
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def category(name: str) -> str:
    """What kind of work a span is: the first word of its name (`all_reduce group 3`)."""
    return name.split(" ", 1)[0]
