"""The parameters that an optimizer held when its program was made, and whether it still does."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from autopar.errors import OptimizerError


class ParameterGroups:
    """The parameters that an optimizer held when its program was made, group by group."""

    def __init__(self, optimizer: Optimizer, parameters: dict[str, nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._held = self._now()

    def check(self) -> None:
        """Raises `OptimizerError` where the optimizer's groups hold other parameters by now."""
        now = self._now()
        if now == self._held:
            return
        before, names = {p for g in self._held for p in g}, {id(p): n for n, p in reversed(self._parameters.items())}
        added = [p for g in now for p in g if p not in before]
        strangers = [p for p in added if p not in names]
        shown = ", ".join(f"'{names[p]}'" for p in added[:3] if p in names)
        if strangers:
            what = f"{len(strangers)} parameter(s) that are not the model's were added: give them their own optimizer"
        elif added:
            what = (
                f"{len(added)} parameter(s) were added to it, {shown}: call autopar.optimize again with this optimizer"
            )
        else:
            what = "parameters were removed, or moved to another group: call autopar.optimize again with this optimizer"
        raise OptimizerError(f"the optimizer's parameter groups have changed since the program was made: {what}")

    def _now(self) -> list[list[int]]:
        return [list(map(id, g["params"])) for g in self._optimizer.param_groups]
