"""What a few measured steps on the cluster at hand say of the plans that are like them.

A Gaussian process (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, chapter 2) over the same
physical features: near a plan that was measured, a prediction is off by as much as there; far from all of them, by as
much as they are on average, and less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.cost_models.correction import CLIP, Correction, Floats

REACH = 3.0
"""How far a measured plan tells of others: the kernel's length, in standard deviations of the features."""
COMMON = 0.3
"""Part of the prior variance that all plans of a cluster share, where predictions were corrected."""
NOISE = 0.04
"""Standard deviation of a measured step, in logarithms, beside what the plan's features say. [Empirical, on trials of
the lab: 0.03 gives intervals that hold 87 % in place of 90 %, 0.06 ones that hold 94 %]"""
NOISY = 0.1
"""Standard deviation, in logarithms, of a measured step that says that it was disturbed. [Empirical, on trials of the
lab: between 0.08 and 0.15 predictions of other plans are as good]"""
FEWEST = 4
"""The fewest trials that choose among the `parts` of a prior."""
Z = 1.645
"""Half of an interval of 90 %, in standard deviations of a normal distribution."""


@dataclass(frozen=True)
class Prior:
    """How far off predictions are before anything is measured. Standard deviations, in logarithms."""

    common: float
    """Standard deviation of the error that all plans of a cluster share: compute that is as many times slower for one
    as for another."""
    own: float
    """Standard deviation of the error that plans which are unlike each other do not share."""
    along_compute: float = math.inf
    """By how much the part of a step that is compute differs between plans which share little of the common error:
    where compute takes longer than data sheets have it, plans that wait for the network are off by less."""
    clip: float = CLIP
    """The most by which trials may correct a prediction, in logarithms."""
    parts: tuple[float, ...] = (1.0,)
    """Of `own`, what it may be, as trials say by their marginal likelihood (Rasmussen and Williams, section 5.4.1)."""

    @classmethod
    def of(cls, correction: Correction) -> Prior:
        """The prior that the interval of a learned correction implies."""
        variance = max((correction.inside / Z) ** 2 - NOISE**2, NOISE**2)
        return cls(math.sqrt(COMMON * variance), math.sqrt((1 - COMMON) * variance))


@dataclass(frozen=True)
class OwnTrials:
    """A Gaussian process of the errors of corrected predictions, fitted to the trials of one cluster."""

    correction: Correction
    prior: Prior
    process: Any
    """A `sklearn.gaussian_process.GaussianProcessRegressor`."""

    @classmethod
    def of(
        cls,
        correction: Correction,
        rows: Floats,
        off: Floats,
        noise: Floats | float = NOISE,
        prior: Prior | None = None,
    ) -> OwnTrials:
        """`rows`: features; `off`: the logarithm of measured over predicted; `noise`: the standard deviation of each of
        these; `prior`: that of the correction, where none is given."""
        from sklearn.gaussian_process import GaussianProcessRegressor

        prior = prior or Prior.of(correction)
        each = [replace(prior, own=part * prior.own) for part in (prior.parts if len(rows) >= FEWEST else (1.0,))]
        scaled, alpha = _scaled(correction, rows), np.square(noise)
        kernels = [_kernel(p, correction) for p in each]
        fitted = [GaussianProcessRegressor(kernel, alpha=alpha, optimizer=None).fit(scaled, off) for kernel in kernels]
        best = max(range(len(each)), key=lambda i: fitted[i].log_marginal_likelihood_value_)
        return cls(correction, each[best], fitted[best])

    def residual(self, rows: Floats) -> tuple[Floats, Floats]:
        """By how much predictions are off, and half of the interval around that; in logarithms."""
        mean, deviation = self.process.predict(_scaled(self.correction, rows), return_std=True)
        return np.clip(mean, -self.prior.clip, self.prior.clip), Z * np.sqrt(deviation**2 + NOISE**2)

    def covariance(self, rows: Floats) -> Floats:
        """Of what predictions with these features are still off by, behind the trials: the covariance of each two, in
        squared logarithms."""
        return np.asarray(self.process.predict(_scaled(self.correction, rows), return_cov=True)[1])


def covariance(correction: Correction, rows: Floats, prior: Prior | None = None) -> Floats:
    """Of what predictions with these features are off by, before anything is measured: the covariance of each two, in
    squared logarithms."""
    return np.asarray(_kernel(prior or Prior.of(correction), correction)(_scaled(correction, rows)))


def most_telling(correction: Correction, rows: Floats, count: int, prior: Prior | None = None) -> list[int]:
    """Which plans to measure, of those with these features, to know most of all of them: one after the other, each the
    one that takes most from the sum of their variances (active learning after Cohn; for Gaussian processes Seo et al.,
    2000)."""
    known = _kernel(prior or Prior.of(correction), correction)(_scaled(correction, rows))
    chosen: list[int] = []
    for _ in range(min(count, len(rows))):
        gain = np.square(known).sum(0) / (np.diag(known) + NOISE**2)
        gain[chosen] = -np.inf
        chosen.append(int(gain.argmax()))
        column = known[:, chosen[-1]]
        known = known - np.outer(column, column) / (column[chosen[-1]] + NOISE**2)
    return chosen


def _scaled(correction: Correction, rows: Floats) -> Floats:
    """In standard deviations of the features."""
    return np.asarray((rows - np.asarray(correction.center)) / np.asarray(correction.spread))


def _kernel(prior: Prior, correction: Correction) -> Any:
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel

    common, own = ConstantKernel(prior.common**2, "fixed"), ConstantKernel(prior.own**2, "fixed")
    if math.isfinite(prior.along_compute):
        lengths = np.full(len(correction.features), 1e9)  # whatever the other features are
        compute = correction.features.index("compute")
        lengths[compute] = prior.along_compute / correction.spread[compute]
        common = common * RBF(lengths, "fixed")
    return common + own * RBF(REACH, "fixed")
