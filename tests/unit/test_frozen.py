"""Which strategies move a parameter that is frozen for a while: those that keep something that is in a later update."""

from __future__ import annotations

from autopar.strategies import STRATEGIES
from autopar.strategies.base import Options

MOVE = {
    "diloco", "dgc", "one_bit_adam", "power_sgd", "quantized", "random_k", "scaled_sign", "top_k", "weight_differences"
}  # fmt: skip


def _plainest(name: str) -> Options:
    return STRATEGIES[name].options_type()


def test_strategies_that_keep_something_say_so() -> None:
    """DES-LOC does not: what its ranks have of a frozen parameter is averaged, as under any strategy's `every`."""
    found = {name for name in STRATEGIES if STRATEGIES[name].moves_frozen(_plainest(name))}
    assert found & (MOVE | {"all_reduce", "des_loc", "qsgd", "terngrad", "partitioned_parameter_server"}) == MOVE
