"""The proof of a compiled region: what it returns, beside what its operators return one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx

from autopar.errors import VerificationError
from autopar.runtime.proofs.differences import TOLERANCE
from autopar.runtime.proofs.proof import ROUNDING
from autopar.runtime.replay import as_captured


class RegionProof:
    """Compares a compiled function with the operators that it was compiled from, on its first inputs."""

    def __init__(self, part: torch.fx.GraphModule) -> None:
        self._part: torch.fx.GraphModule | None = part

    def once(self, inputs: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> None:
        """Compares what the function has returned for `inputs`; does nothing when it is called again. Raises
        `VerificationError`, on this rank alone."""
        part, self._part = self._part, None
        if part is None:
            return
        with as_captured():
            expected: Sequence[torch.Tensor] = part(*inputs)
            allowed = _tolerance(part)
            off = [_distance(a, b) / allowed for a, b in zip(found, expected, strict=True)]
            if max(off, default=0.0) <= 1:
                return
            moved: Sequence[torch.Tensor] = part(*(_rounded(t, seed) for seed, t in enumerate(inputs)))
            noise = [ROUNDING * _distance(a, b) / allowed for a, b in zip(moved, expected, strict=True)]
        wrong = [(times, i) for i, times in enumerate(off) if not times <= max(1.0, noise[i])]
        if wrong:
            times, place = max(wrong)
            outputs = part.graph.output_node().args[0]
            raise VerificationError(
                f"a part of the step that PyTorch's compiler has compiled returns something else than its operators, "
                f"by {times:.3g} times what is allowed: result {place} of {len(expected)}, of the operator "
                f"{outputs[place].target}. Leave compile=True out, and please report it. With check='never', nothing "  # type: ignore[index, union-attr]
                "is compared"
            )


def _tolerance(part: torch.fx.GraphModule) -> float:
    """What a difference may be, by the narrowest dtype that a region computes in."""
    dtypes = {v.dtype for n in part.graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor)}
    return max((TOLERANCE[d] for d in dtypes if d in TOLERANCE), default=TOLERANCE[torch.float32])


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of floating-point values, relative to the size of those expected: infinite where one is not finite that should
    be. Other values may be another one's by a rounding, and are not compared."""
    if not expected.is_floating_point() or not expected.numel():
        return 0.0
    there = torch.isfinite(expected)
    mine, theirs = found.double()[there], expected.double()[there]
    difference, size = float((mine - theirs).norm()), float(theirs.norm())
    if difference == 0.0:
        return 0.0
    return difference / size if size > 0 and difference == difference else float("inf")


def _rounded(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """The values, each up or down by a rounding."""
    if not tensor.is_floating_point():
        return tensor
    draw = torch.Generator(tensor.device).manual_seed(seed)
    signs = torch.randn(tensor.shape, generator=draw, dtype=torch.float32, device=tensor.device).sign()
    return tensor * (1 + 2 * torch.finfo(tensor.dtype).eps * signs.to(tensor.dtype))
