"""The journal: every plan that a search priced, one JSON object a line, appended and never rewritten.

The first line of a search says what was searched; the lines that follow carry its number, so that several searches may
write to one journal at the same time. A line is written at once: a search that is cut short leaves what it knew, and
one that resumes it takes the prices from there. `autopar.spec.lines.read_lines` reads the lines back, and passes a
half-written one over.
"""

from __future__ import annotations

import json
import secrets
import warnings
from collections.abc import Sequence
from itertools import chain, groupby, repeat
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from autopar.cost_models.base import Estimate
from autopar.errors import AutoparWarning, SpecError
from autopar.formatting import number_of
from autopar.search.base import Candidate
from autopar.spec.lines import Lines, read_lines
from autopar.spec.plan import Prediction, SyncGroup

FORMAT = 2

_DIGESTS = {"model": "another model", "cluster": "another cluster", "lessons": "other trials to learn from"}
"""What is said of headers' entries that tell people nothing."""
_MOST_SHOWN = 80
"""Characters of an entry that are shown at most."""
_BY_RANK = ("sent_bytes", "received_bytes", "peak_memory_bytes")


class Journal:
    """Appends to a JSONL file; use it as a context manager. `header`: what tells one search from another."""

    def __init__(self, path: str | Path, **header: Any) -> None:
        self.path = Path(path)
        self.header = {"format": FORMAT, **header}
        self._lines = Lines(path, "journal")
        self._number = secrets.token_hex(4)

    def __enter__(self) -> Self:
        self._lines.__enter__()
        self._line({"search": self.header})
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._lines.__exit__(kind, error, tb)

    def write(self, candidate: Candidate, elapsed_s: float) -> None:
        """Appends one priced plan, and for how long the search has run by then."""
        estimate = candidate.estimate
        self._line(
            {
                "candidate": candidate.name,
                "prediction": estimate.prediction().model_dump(),
                "communication_s": estimate.communication_s,
                "by_rank": {name: _runs(getattr(estimate, name)) for name in _BY_RANK},
                "overflow_bytes": candidate.overflow_bytes,
                "elapsed_s": round(elapsed_s, 3),
                "groups": [g.model_dump(mode="json", exclude_defaults=True) for g in candidate.groups],
            }
        )

    def _line(self, record: dict[str, Any]) -> None:
        self._lines.append({"of": self._number, **record})


def known(path: str | Path, world_size: int, **header: Any) -> list[tuple[Candidate, float]]:
    """What searches of this header have priced, as far as the journal tells, each with the seconds for which its search
    had run by then. Nothing where there is no journal yet; lines of another number of ranks are passed over.

    Raises `SpecError` where the line that says what was searched is lost, and, with what differs, where the journal
    holds other searches alone. Not where one of them differs in `recompute` alone, with which one command searches
    several times: it was cut short before it came to this. Nor where only the lessons of trials differ, which a search
    with trials learns as it goes: it warns that nothing can be taken from the journal."""
    path, wanted = Path(path), {"format": FORMAT, **header}
    if not path.is_file():
        return []
    searches: dict[object, dict[str, Any]] = {}
    found: list[tuple[Candidate, float]] = []
    lost = 0
    for record in read_lines(path):
        number = str(record.get("of"))
        if isinstance(record.get("search"), dict):
            searches[number] = record["search"]
        elif number not in searches:
            lost += "candidate" in record
        elif searches[number] == wanted and (candidate := _candidate(record, world_size)) is not None:
            found.append((candidate, float(record["elapsed_s"])))
    same = wanted in searches.values()
    others = [search for search in searches.values() if search != wanted]
    if others and not same:
        nearest = min((_differing(other, wanted) for other in others), key=len)
        if nearest.keys() == {"lessons"}:
            warnings.warn(
                f"{path}: trials have changed what plans are predicted to take since the search in this journal was "
                "cut short, so the search begins anew, with what they have taught",
                AutoparWarning,
                stacklevel=2,
            )
        elif not nearest.keys() <= {"recompute", "lessons"}:
            raise SpecError(
                f"{path}: the journal cannot be resumed: it holds no search like this one. The nearest one has "
                f"{', '.join(nearest.values())}. Leave --resume out, which adds this search to it, or begin another "
                "journal"
            )
    if lost and not same:
        raise SpecError(
            f"{path}: the journal cannot be resumed: it holds {number_of(lost, 'plan')} of a search whose first line, "
            "which says what was searched, is lost. Leave --resume out, which adds this search to it, or begin another "
            "journal"
        )
    return found


def _differing(there: dict[str, Any], here: dict[str, Any]) -> dict[str, str]:
    """What differs in the header of another search, by name, in words."""
    differing = [k for k in here if k not in there or there[k] != here[k]]
    differing += sorted(there.keys() - here.keys())
    return {
        k: _DIGESTS.get(k, f"{k} {_short(there.get(k))} where this one has {_short(here.get(k))}") for k in differing
    }


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _candidate(record: dict[str, Any], world_size: int) -> Candidate | None:
    """What a line says; `None` where it says something else."""
    try:
        prediction = Prediction.model_validate(record["prediction"])
        sent, received, peak = (_unrolled(record["by_rank"][name], world_size) for name in _BY_RANK)
        estimate = Estimate(
            step_time_s=prediction.step_time_s,
            compute_s=prediction.compute_s,
            exposed_communication_s=prediction.exposed_communication_s,
            communication_s=float(record["communication_s"]),
            relative_error=prediction.relative_error,
            provenance=prediction.provenance,
            sent_bytes=sent,
            received_bytes=received,
            peak_memory_bytes=peak,
        )
        groups = tuple(SyncGroup.model_validate(g) for g in record["groups"])
        float(record["elapsed_s"])
        return Candidate(str(record["candidate"]), groups, estimate, int(record["overflow_bytes"]))
    except (KeyError, TypeError, ValueError, ValidationError):
        return None


def _runs(values: Sequence[int]) -> list[list[int]]:
    """Equal neighbours as [value, how many]: ranks are mostly alike."""
    return [[value, len(list(run))] for value, run in groupby(values)]


def _unrolled(runs: Sequence[Sequence[int]], world_size: int) -> tuple[int, ...]:
    """The values of all ranks. Raises `ValueError` where they are not as many."""
    if sum(int(count) for _, count in runs) != world_size or any(int(count) < 1 for _, count in runs):
        raise ValueError(f"values of {world_size} ranks were expected")
    return tuple(chain.from_iterable(repeat(int(value), int(count)) for value, count in runs))
