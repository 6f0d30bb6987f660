"""Moments: what a group's operations do in a step, where they do not do the same in each."""

from __future__ import annotations

from typing import Literal, NamedTuple

Doing = Literal["synchronize", "plain", "alone", "average", "hold", "delayed"]


class Moment(NamedTuple):
    """What a group does in one step. Steps in which all groups do the same are one program."""

    doing: Doing = "synchronize"
    """`synchronize`: what its strategy says, with this step's gradients. `plain`: a plain all-reduce of them, before
    the strategy's time has come, unless it warms up itself. `alone`: each rank updates with its own gradients.
    `average`: so, too, and then parameters are averaged, as the strategy sums. `hold`: gradients are held back for
    later steps. `delayed`: so, too, and those of an earlier step are summed as the strategy says."""
    slot: int = 0
    """Of held gradients: where they are kept; of delayed ones, how many steps they are behind. Of replicas that are
    averaged: a bit for each period of its own (`Strategy.also_every`) that ends."""
    stage: int = 0
    """Of a strategy that begins in stages (`Strategy.stages`): how many of them are left; 0 once all have gone by."""
    begins: bool = False
    """Of a strategy that trains replicas apart: whether no step of that goes before this one, so that what all ranks
    begin with is to be kept first."""


SYNCHRONIZE = Moment()
