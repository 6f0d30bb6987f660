"""What a user asks of a plan besides speed: memory that is kept free, parameters whose strategy is given, and
strategies that are not to be used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autopar.errors import PlanError
from autopar.search.strategy_text import strategy_and_options
from autopar.spec.plan import OptionValue
from autopar.strategies import strategy_named

MEMORY_RESERVE = 0.1
"""Part of each device's memory that plans keep free: for fragmentation, the libraries' own buffers and workspaces,
which the memory model leaves out. [Empirical: the field keeps 5 to 20 %.]"""

Pinned = str | tuple[str, Mapping[str, OptionValue]]
"""A strategy, `parameter_server` or `parameter_server(owner=1)`; or its name, and options of it."""


@dataclass(frozen=True, slots=True)
class Pin:
    """Parameters that are synchronized by one strategy, whatever the search would choose."""

    pattern: str
    """A pattern of the parameters' names: `embed.weight`, `layers.*.bias`."""
    strategy: str
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    """Options of the strategy; the search may choose those that are left out."""

    @classmethod
    def of(cls, pattern: str, said: Pinned) -> Pin:
        """A pin, from a pattern and what a user gives for it. Raises `PlanError` where there is no such strategy, or
        the options cannot be read."""
        if isinstance(said, str):
            try:
                name, options = strategy_and_options(said)
            except PlanError as e:
                raise PlanError(f"pin '{pattern}': {e}") from e
        else:
            name, options = said[0], dict(said[1])
        try:
            strategy_named(name)
        except PlanError as e:
            raise PlanError(f"pin '{pattern}': {e}") from e
        return cls(pattern, name, options)

    def __str__(self) -> str:
        shown = ", ".join(f"{k}={v}" for k, v in self.options.items())
        return f"{self.pattern}={self.strategy}" + (f"({shown})" if shown else "")


@dataclass(frozen=True, slots=True)
class Constraints:
    """What plans have to keep to: memory that stays free, pinned and forbidden strategies."""

    memory_reserve: float = MEMORY_RESERVE
    """Part of each device's memory that is kept free, from 0 to less than 1."""
    pins: tuple[Pin, ...] = ()
    """Of several whose patterns match a parameter, the last one counts."""
    forbidden: frozenset[str] = frozenset()
    """Strategies, by name, that no group may use."""

    def __post_init__(self) -> None:
        if not 0 <= self.memory_reserve < 1:
            raise PlanError(
                f"memory_reserve is {self.memory_reserve}, expected a part of each device's memory, from 0 to less "
                "than 1: 0.1 keeps a tenth free"
            )

    @classmethod
    def of(
        cls,
        memory_reserve: float = MEMORY_RESERVE,
        pin: Mapping[str, Pinned] | None = None,
        forbid: Iterable[str] = (),
    ) -> Constraints:
        """The constraints, from what `autopar.plan` and `autopar.optimize` take. Raises `PlanError` with the nearest
        name where there is no such strategy, and where a value cannot be used."""
        named = [forbid] if isinstance(forbid, str) else list(forbid)
        for name in named:
            try:
                strategy_named(name)
            except PlanError as e:
                raise PlanError(f"forbid: {e}") from e
        pins = tuple(Pin.of(pattern, said) for pattern, said in (pin or {}).items())
        for one in pins:
            if one.strategy in named:
                raise PlanError(f"pin '{one}': {one.strategy} is forbidden; leave one of the two out")
        return cls(memory_reserve, pins, frozenset(named))


NONE = Constraints()
"""The constraints where a user asks for none: a tenth of the memory is kept free."""
