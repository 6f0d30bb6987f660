"""What one call costs: on each rank's device, and on the network."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """What one collective does. Plans share those of equal collectives; each is equal to itself alone."""

    seconds: float
    """Seconds on the channel, once all ranks have issued it, alone on the network."""
    taken: tuple[float, ...] = ()
    """By rank: part of its compute that the transfer takes while it runs, 0 to 1; empty for none."""
    bytes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, 0), np.int64))
    """[2, rank]: bytes that each rank sends, and those that it receives."""
    loads: Floats = field(default_factory=lambda: np.zeros(0))
    """Part of each link, and behind those of what each host can move, that it fills, on average."""
    connection: float = 0.0
    """Part of its time in which bytes of the channel's other transfers wait for its own, whatever their direction."""
    channel: Hashable = None
    """Transfers of one channel follow one another."""
    communicator: int = 0
    at_once: int = 1
    """Such transfers that a channel runs at the same time; those of another number have channels of their own."""
    in_turn: bool = False
    """Whether its messages wait for those that other ranks have sent before, as around a ring of three and more."""
    core_wait_s: float = 0.0
    """Seconds that it takes longer where ranks compute all the while."""


@dataclass(frozen=True, slots=True, eq=False)
class Price:
    """What one call costs."""

    device_s: Floats
    """By rank: seconds on the compute stream, before anything is sent."""
    transfer: Transfer | None = None
    uniform: bool = True
    """Whether all ranks' entries are equal."""
    first_s: float = field(init=False)
    """The first rank's entry."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "first_s", float(self.device_s[0]))

    def shared(self, share: float) -> Price:
        """The mean price of a call that runs in this part of the steps, 0 to 1."""
        t = self.transfer
        if t is not None:
            t = replace(
                t,
                seconds=share * t.seconds,
                core_wait_s=share * t.core_wait_s,
                bytes=np.rint(share * t.bytes).astype(np.int64),
            )
        return Price(share * self.device_s, t, self.uniform)
