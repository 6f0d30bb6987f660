"""What is said where a checkpoint holds, or lacks, what strategies keep from step to step."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence

from autopar.errors import AutoparWarning
from autopar.ops.step_count import STEP_COUNT
from autopar.runtime.states import STATE


def say_dropped(of: Collection[str], may_be_asked_for: bool, stacklevel: int = 4) -> None:
    """Warns of what strategies have kept and this plan does not keep, by the names of the tensors; how many steps were
    counted is nothing to lose. `may_be_asked_for`: whether later steps may keep them."""
    names = sorted(name for name in of if not name.startswith(f"{STATE}.{STEP_COUNT}."))
    if names:
        unless = ", unless a later step of this plan keeps it" if may_be_asked_for else ""
        warnings.warn(
            f"the checkpoint holds {len(names)} tensors that strategies keep from step to step and that this plan does "
            f"not keep, such as '{names[0]}': what they held back of earlier steps is lost{unless}",
            AutoparWarning,
            stacklevel=stacklevel,
        )


def say_lacking(names: Sequence[str]) -> None:
    """Warns of what strategies had kept when the checkpoint was saved, and what the checkpoint lacks now."""
    if names:
        warnings.warn(
            f"the checkpoint was saved with {len(names)} tensors that strategies keep from step to step, such as "
            f"'{names[0]}', which are missing here: what they held back of earlier steps is lost. "
            "torch.distributed.checkpoint.load loads only into what a state dict has, and a program has these from its "
            "first step on: take that step before, or save and load with program.save and program.load",
            AutoparWarning,
            stacklevel=4,
        )
