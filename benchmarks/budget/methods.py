"""The methods whose cost in quality is measured: plans by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from autopar.spec.plan import Fidelity
from autopar.strategies import local_adam

WARM_UP = 0.1
"""Part of the steps that is exact before a compressed method begins, as PowerSGD's manual in torch advises."""


@dataclass(frozen=True)
class Method:
    """One way to synchronize all gradients, by the name of its plan."""

    name: str
    strategy: str
    """A plan's name, without the step that it begins with."""
    fidelity: Fidelity
    warm_up: float = 0.0
    """Part of the steps before it, which are exact."""
    of_moments: bool = False
    """Whether it begins with the first step under SGD, as `Strategy.exact_steps` has it, and warms up under others."""
    own_momentum: bool = False
    """Whether it takes over SGD's momentum, and needs an optimizer without."""
    other_batches: bool = False
    """Whether it trains on other batches than the rest."""
    of_adam: bool = False
    """Whether it goes on from the variance that exact steps of Adam or AdamW leave; a probe of it has one, too."""
    needs_moments: bool = False
    """Whether it averages, or corrects, the moments of Adam or AdamW."""
    of_layers: bool = False
    """Whether what it does depends on the model's layers: its lessons are called by what its plan does on each task."""

    @property
    def probed(self) -> bool:
        """Whether a probe says something of it: what needs another optimizer has no exact training beside it, and of
        what begins late, the probe is that of what begins at once."""
        begins_at_once = self.warm_up <= WARM_UP or self.of_adam
        return self is not EXACT and not self.own_momentum and not self.other_batches and begins_at_once

    @property
    def probe(self) -> str:
        """The name of the plan that is probed, which begins as early as it can."""
        return self.strategy + "+from_step=1" * self.of_adam

    def plan(self, steps: int, optimizer: Optimizer) -> str:
        """The plan's name for so many steps."""
        at_once = self.of_moments and isinstance(optimizer, torch.optim.SGD)
        first = 0 if at_once else round(self.warm_up * steps)
        return self.strategy + (f"+from_step={first}" if first else "")

    def takes(self, optimizer: Optimizer) -> bool:
        """Whether the method is defined for the optimizer."""
        return (not self.own_momentum or isinstance(optimizer, torch.optim.SGD)) and (
            not (self.of_adam or self.needs_moments) or isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
        )

    def prepare(self, optimizer: Optimizer) -> None:
        """Leaves momentum to the method where it has its own."""
        if self.own_momentum:
            for group in optimizer.param_groups:
                group["momentum"] = 0.0


EXACT = Method("exact", "ddp", "exact")


def _compressed(name: str, strategy: str, own_momentum: bool = False) -> Method:
    return Method(name, strategy, "compressed", WARM_UP, own_momentum=own_momentum)


METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        EXACT,
        Method("exact, other batches", "ddp", "exact", other_batches=True),
        Method("bf16", "ddp+bf16", "rounded"),
        Method("bf16 forward", "column_parallel+bf16", "rounded", of_layers=True),
        *(_compressed(f"power_sgd {rank}", f"power_sgd(rank={rank})") for rank in (1, 2, 4)),
        *(_compressed(f"top_k {density:.0%}", f"top_k(density={density},chunk=8)") for density in (0.01, 0.1)),
        _compressed("random_k 10%", "random_k(density=0.1,chunk=8)"),
        _compressed("dgc 1%", "dgc(density=0.01,chunk=8)", own_momentum=True),
        Method("quantized 8", "quantized(bits=8)", "compressed"),
        Method("quantized 4", "quantized(bits=4)", "compressed", WARM_UP, of_moments=True),
        Method("quantized 4 rotated", "quantized(bits=4,rotated=true)", "compressed", WARM_UP, of_moments=True),
        _compressed("scaled_sign", "scaled_sign"),
        _compressed("qsgd 4", "qsgd(bits=4)"),
        _compressed("terngrad", "terngrad"),
        Method("one_bit_adam", "one_bit_adam", "compressed", warm_up=0.2, of_adam=True),
        *(_compressed(f"weight_differences {b}", f"weight_differences(bits={b},wire=bfloat16)") for b in (8, 4)),
        *(Method(f"local {k}", f"ddp+every={k}", "local") for k in (4, 16)),
        Method("post-local 16", "ddp+every=16", "local", warm_up=0.5),
        Method("post-local 16 at 25%", "ddp+every=16", "local", warm_up=0.25),
        Method("diloco 16", "diloco+every=16", "local"),
        Method("des_loc 16", "des_loc+every=16", "local", needs_moments=True),
        *(
            Method(f"local_adam {k}", f"local_adam+every={k}", "local", local_adam.WARM_UP, needs_moments=True)
            for k in (4, 8, 16)
        ),
        *(
            Method(
                f"local_adam 4 {w}", f"local_adam(wire={w})+every=4", "local", local_adam.WARM_UP, needs_moments=True
            )
            for w in ("int8", "int4")
        ),
        Method("delayed", "ddp+delay=1", "stale"),
    )
}
"""By name; exact training first, which all are paired with."""
