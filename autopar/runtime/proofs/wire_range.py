"""Gradients that float16 cannot hold on the wire: beyond its largest number, or where its numbers lose their digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autopar.ops.group import Group
from autopar.runtime.proofs.probes import Seen

_HALF = torch.finfo(torch.float16)


def beyond_float16(groups: Sequence[Group], seen: Mapping[str, Seen]) -> dict[str, float]:
    """By slice, the largest element that was seen of a gradient that is sent in float16, where that is not within what
    float16 holds in full: from 6.1e-5 to 65,504. `seen`: of the mean over ranks."""
    found = {}
    for group in groups:
        if group.spec.options.get("wire") == "float16":
            for name in (str(m.slice) for m in group.members):
                largest = _largest(seen[name]) if name in seen else 0.0
                if largest > _HALF.max / 2 or 0 < largest < _HALF.tiny:
                    found[name] = largest
    return found


def _largest(seen: Seen) -> float:
    """The largest sampled element; where all of these are zeros, as in a table of which few rows are used, what no
    element is larger than."""
    return float(seen.elements.abs().max()) if seen.elements.any() else float(seen.norm)
