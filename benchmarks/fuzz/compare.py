"""Judges one training against another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from benchmarks.fuzz.source import Built, Tree, build
from benchmarks.fuzz.training import Record, Weighting, eager

EXACT = 1e-9
"""Largest difference in float64, relative to the largest value of a tensor, or to 1."""
_NOISE = 1e-13
_OF_NOISE = 200.0
"""How many times as far as two eager trainings a training may differ, whose parameters differ by `_NOISE`."""
_ROUNDINGS = 64.0
"""Roundings of a value, in units of its dtype, that are no news. [Empirical]"""
_OF_EAGER = 8.0
"""How many times as far from float64 as the eager training another one may be."""
_TRIALS = 4
"""Eager trainings by which it is measured how far a rounding moves the later steps."""
_OF_ROUNDING = 4.0
"""How many times as far as these a training may be. [Empirical]"""


@dataclass(frozen=True)
class Difference:
    """Where two trainings differ most beyond what is allowed."""

    where: str
    size: float


def difference(found: Record, expected: Record, limit: float, buffers: bool) -> Difference | None:
    """The first step's largest difference beyond `limit`, or `None`."""
    for pairs in _by_step(found, expected, buffers):
        worst = max(((_off(a, b), where) for where, a, b in pairs), default=(0.0, ""))
        if worst[0] > limit:
            return Difference(worst[1], worst[0])
    return None


Pair = tuple[str, torch.Tensor, torch.Tensor]


def _by_step(found: Record, expected: Record, buffers: bool) -> Iterator[list[Pair]]:
    for step, loss in enumerate(expected.losses):
        pairs: list[Pair] = [(f"loss of step {step}", found.losses[step], loss)]
        for fragment, gradient in found.observed[step] if found.observed else ():
            whole = expected.gradients[step].get(fragment.name)
            if whole is None:
                pairs.append((f"gradient of '{fragment.name}', which has none eagerly", gradient, gradient * 0))
            else:
                cut = whole if fragment.whole else fragment.cut(whole)
                pairs.append((f"gradient of '{fragment.name}' in step {step}", gradient.reshape(cut.shape), cut))
        trees = [(found.inputs, expected.inputs, "gradient of input"), (found.outputs, expected.outputs, "")]
        if found.gradients:
            trees.append((found.gradients, expected.gradients, "gradient of"))
        if len(found.parameters) > 1:
            trees.append((found.parameters, expected.parameters, "parameter"))
        if buffers and found.buffers:
            trees.append((found.buffers, expected.buffers, "buffer"))
        for mine, theirs, what in trees:
            pairs += _pairs(mine[step], theirs[step], f"{what} {{}} in step {step}")
        yield pairs
    if len(found.parameters) == 1 and len(expected.parameters) > 1:
        yield _pairs(found.parameters[0], expected.parameters[-1], "parameter {} after the last step")


def _pairs(found: Tree, expected: Tree, where: str) -> list[Pair]:
    if not found and "gradient of input" not in where:
        return []
    pairs = [(where.format(n), found[n], e) for n, e in expected.items() if n in found]
    pairs += [(where.format(n) + ": missing", e.new_zeros(()), e) for n, e in expected.items() if n not in found]
    return pairs + [(where.format(n) + ": too many", f, f * 0) for n, f in found.items() if n not in expected]


def _off(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape and a.dim():
        return float("inf")
    if not b.numel():
        return 0.0
    worst = float((a.double() - b.double()).abs().max()) / max(float(b.double().abs().max()), 1.0)
    return worst if worst == worst else float("inf")


def finite(record: Record) -> bool:
    """Whether every number is one."""
    trees = [*record.parameters, *record.gradients, *record.buffers]
    return all(bool(torch.isfinite(t).all()) for tree in trees for t in [*tree.values(), *record.losses])


def judge(
    built: Built, found: Record, expected: Record, buffers: bool, weighting: Weighting = "joined"
) -> Difference | None:
    """What of an autopar training differs from the eager one for another reason than rounding. `weighting`: of the
    eager one, `expected`."""
    dtype = getattr(torch, built.case.dtype)
    mixed = any("dtype=torch." in line for line in built.case.init)
    eps = float(torch.finfo(torch.bfloat16 if mixed else dtype).eps)
    limit = EXACT if dtype == torch.float64 else _ROUNDINGS / 16 * eps
    if dtype == torch.float64 and not mixed:
        seen = difference(found, expected, limit, buffers)
        if seen is None:
            return None
        again = eager(built, weighting, noise=_NOISE)
        return seen if seen.size > EXACT + _OF_NOISE * _largest(again, expected, buffers) else None
    exact = eager(build(built.case, "float64"), weighting, like=built.model())
    trials = cache(lambda: [t for i in range(_TRIALS) if finite(t := eager(built, weighting, rounding=i + 1))])
    if difference(found, expected, limit, buffers) is not None:
        mine, theirs = _by_step(found, exact, buffers), _by_step(_as_seen(expected, found), exact, buffers)
        for ours, eagers in zip(mine, theirs, strict=True):
            worst_of_eager = max((_off(a, b) for _, a, b in eagers), default=0.0)
            for where, a, b in ours:
                allowed = _OF_EAGER * worst_of_eager + _ROUNDINGS / 8 * eps
                if _off(a, b) > allowed:
                    moved = _moved_by_rounding(where, trials(), found, expected, buffers)
                    allowed = max(allowed, _OF_ROUNDING * moved)
                if _off(a, b) > allowed:
                    return Difference(where, _off(a, b))
    unmoved = _unmoved(found, [expected], exact)
    return None if unmoved is None else _unmoved(found, [expected, *trials()], exact)


def _moved_by_rounding(where: str, trials: list[Record], found: Record, expected: Record, buffers: bool) -> float:
    """How far a loss, gradient or value of eager training moves where each step's parameters are a rounding off: by far
    where it divides by a variance that is 0 or not."""
    bare = where.replace("'", "")  # gradients that were observed are quoted
    pairs = (p for t in trials for step in _by_step(_as_seen(t, found), expected, buffers) for p in step)
    return max((_off(a, b) for other, a, b in pairs if other.replace("'", "") == bare), default=0.0)


def _as_seen(expected: Record, found: Record) -> Record:
    """The eager record with as much as the other one has."""
    observed = [[] for _ in expected.losses] if found.observed else expected.observed
    parameters = expected.parameters[-1:] if len(found.parameters) == 1 else expected.parameters
    return Record(expected.losses, expected.gradients, parameters, expected.buffers, expected.inputs,
                  expected.outputs, observed)  # fmt: skip


def _unmoved(found: Record, eagers: Sequence[Record], exact: Record) -> Difference | None:
    """A parameter that the eager trainings have changed, and the other one has not, or by far less."""
    for name in exact.parameters[-1]:
        if name not in found.parameters[-1] or len(exact.parameters) < 2:
            continue
        ours, moved = found.parameters[-1][name].double(), exact.parameters[-1][name]
        way = float((moved - exact.parameters[0][name]).abs().sum())
        if way and float((ours - moved).abs().sum()) > 0.6 * way + 4 * max(_strays(name, e, exact) for e in eagers):
            return Difference(f"update of {name}", float((ours - moved).abs().max()))
    return None


def _strays(name: str, rounded: Record, exact: Record) -> float:
    """How far from float64 a parameter of a training was in any step: what rounding alone moves may be near again at
    the end."""
    pairs = zip(rounded.parameters, exact.parameters, strict=True)
    return max(float((r[name].double() - x[name]).abs().sum()) for r, x in pairs)


def _largest(found: Record, expected: Record, buffers: bool) -> float:
    steps = _by_step(found, expected, buffers)
    return max((_off(a, b) for pairs in steps for _, a, b in pairs), default=0.0)


def digest(record: Record) -> str:
    """Of all losses and all bits of the parameters at the end, which ranks must have alike."""
    bits = hashlib.sha256()
    for name, value in sorted(record.parameters[-1].items()) if record.parameters else ():
        bits.update(name.encode())
        dense = torch.empty(value.shape, dtype=value.dtype).copy_(value)
        bits.update(dense.reshape(-1).view(torch.uint8).numpy().tobytes())
    return bits.hexdigest()[:16]
