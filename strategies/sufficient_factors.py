"""Sufficient factors: ranks exchange the two thin matrices whose product is a linear layer's gradient.

The gradient of an (a x b) weight is the product of the output's gradient and the input, t x a and t x b for t tokens.
Each rank sends (n-1) t (a + b) elements where an all-reduce sends 2 (n-1)/n a b, and forms the sum of all ranks'
products itself, as one product over all tokens: Xie et al., UAI 2016; Zhang et al., "Poseidon", ATC 2017.
"""

from __future__ import annotations

from autopar.strategies.gathered_parts import GatheredParts


class SufficientFactors(GatheredParts):
    name = "sufficient_factors"
    summary = "exchange the factors of the gradient; every rank forms it and updates its replica"
    kind = "factors"
    otherwise = "its gradient is not a product of two matrices"
    of_a_slice = "the factors of a slice are not found by themselves"
