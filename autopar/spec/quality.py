"""What a choice under a quality budget has found, as a plan keeps it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from autopar.formatting import duration
from autopar.spec.json_file import Record

Part = Annotated[float, Field(allow_inf_nan=False)] | None
"""Of what exact training gains: 0.01 for one per cent; `None` for no number, or one without bound."""


class Considered(Record):
    """A plan that was looked at, and what became of it."""

    name: str
    step_time_s: float
    """As predicted, in seconds, behind the exact steps that it begins with."""
    exact_steps: int = Field(default=0, ge=0)
    """That it begins with in the training."""
    training_step_s: Annotated[float, Field(gt=0)] | None = None
    """As predicted, in seconds, in the mean over the training, these steps included; `None` where it is not known."""
    expected: Part
    """What the map expects a whole training to lose, after the plan's probe."""
    bound: Part
    """What it loses at most, with the confidence of the map."""
    lost: Part = None
    """What its pilot lost of what the exact pilot gained; `None` without a pilot."""
    metric: Part = None
    """What the user's metric was behind its pilot; `None` without one, or where it was no number."""
    late: Part = None
    """Of what its pilot lost, what a training catches up with, as it was only late; `None` without a pilot."""
    apart: Part = None
    """How far its probe ended from the exact one, in what other batches make of that; `None` without a pilot."""
    method: str = ""
    """What it loses by, in the map's words; empty where that is not known."""
    divergence: Part = None
    """How far its probe ended from the exact one, as a part of the way; `None` for no number, or without a probe."""
    exactly: tuple[str, ...] | None = None
    """Parameters that it synchronizes exactly; `None` where that was not written down."""
    tried: bool = True
    """Whether it was probed; else nothing is known of what it loses."""
    verdict: str

    @property
    def text(self) -> str:
        """One line for people."""
        behind = f"{duration(self.step_time_s)} behind {self.exact_steps} exact steps"
        mean = f"{behind}, {duration(self.training_step_s)} in the mean" if self.training_step_s else behind
        found = [
            mean if self.exact_steps else duration(self.step_time_s),
        ]
        if self.tried:
            found.append(f"expected to lose {percent(self.expected)}, at most {percent(self.bound)}")
        if self.metric is not None:
            said = "its pilot says nothing" if self.lost is None else f"lost {percent(self.lost)} in its pilot"
            found.append(said)
        return f"{self.name}: {', '.join(found)}: {self.verdict}"


class QualityChoice(Record):
    """Why a plan was taken under a quality budget."""

    budget: float = Field(gt=0, lt=1)
    """What the metric may lose, as a part of what exact training gains."""
    exact_step_s: float
    """The step time of the fastest exact plan, as predicted."""
    considered: tuple[Considered, ...] = ()
    """The fastest first."""
    chance: Part = None
    """What two exact pilots on different batches differed by; `None` without pilots, or where they gained nothing."""
    steps: int = Field(ge=0)
    """That each rank trained on copies."""
    probe_s: Part = None
    """Seconds that making plans and probing them took, on rank 0; `None` where nothing was probed."""
    pilot_steps: int = Field(default=0, ge=0)
    """Of `steps`, those of pilots, and what copies trained before they were probed."""
    note: str = ""
    optimizer: str = ""
    """Its kind, which what a plan loses depends on."""

    @property
    def lines(self) -> list[str]:
        """For people: what was asked for, each plan that was looked at, and how."""
        found = [
            f"Taken under a quality budget: at most {self.budget:.2%} of what exact training gains; the fastest exact "
            f"plan takes {duration(self.exact_step_s)}",
            *(one.text for one in self.considered),
        ]
        if not self.considered:
            found.append("No plan that loses something is predicted to be faster.")
        if self.chance is not None:
            found.append(f"Two exact pilots on different batches differ by {percent(self.chance)}.")
        found += filter(None, [self.note])
        return [*found, f"{self.steps} steps were trained on copies of the model."] if self.steps else found


def percent(part: float | None) -> str:
    """A part, for people."""
    return "everything" if part is None else f"{part:.2%}"
