"""Lightning: a strategy by the name "autopar".

    import autopar.integrations.lightning

    trainer = Trainer(accelerator="cpu", devices=2, strategy="autopar")
    trainer.fit(model, loader)

`training_step` runs as the Python that it is: modules with parameters that it calls are captured and planned. For a
description of the cluster, or other options: `strategy=AutoparStrategy(cluster, fidelity="rounded")`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn

from autopar.errors import SpecError
from autopar.integrations.calls import CapturedCalls
from autopar.integrations.options import check_options
from autopar.integrations.ranks import Weight, equal, samples, share, sums
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan_variable import PLAN_VARIABLE

_OF_DDP = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
    "timeout",
    "start_method",
)


class AutoparStrategy(DDPStrategy):
    """Trains on several processes, started as `DDPStrategy` starts them; autopar's plans synchronize their gradients.

    The loss that `training_step` returns counts on each rank by the samples of its batch, or as `weight` says, in
    automatic optimization: where it is a mean over them, gradients are those of one process on all ranks' batches.
    """

    strategy_name = "autopar"

    def __init__(self, cluster: ClusterSpec | None = None, *, weight: Weight = samples, **options: Any) -> None:
        """
        Args:
            cluster: what to plan for; by default what `ClusterSpec.detect()` sees.
            weight: from a batch, as `training_step` is given it, to how much its loss counts.
            options: further arguments of `autopar.optimize`, such as `fidelity` or `compile`, and those of
                `DDPStrategy` that say how processes run: `process_group_backend`, `timeout`, `start_method`.
        """
        super().__init__(**{name: options.pop(name) for name in _OF_DDP if name in options})
        hooks = [name for name in options if name.startswith("ddp_comm") or name == "model_averaging_period"]
        if hooks:
            raise SpecError(
                f'{hooks[0]} is of DistributedDataParallel: leave it out; fidelity="rounded" allows 16 bits on the wire'
            )
        check_options(options)
        self._cluster, self._weight, self._options = cluster, weight, options
        self._calls: CapturedCalls | None = None
        self._plans: dict[str, Any] = {}
        """Of a fit that has ended."""
        self._share = 1.0
        self._follows_synchronized = True
        """Whether gradients of the last step were synchronized; before the first one, too."""
        self._evaluates_first = False
        """Whether the next step of an evaluation is its first one."""

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        if getattr(model, "_compiler_ctx", None):
            raise SpecError(
                "the LightningModule was compiled with torch.compile: pass it as it was, and compile=True to the "
                "strategy, which compiles what autopar captures"
            )
        if self.world_size > 1:
            self._calls = CapturedCalls(model, self._cluster or self._detected(), self._options)
        return model

    def _detected(self) -> ClusterSpec | None:
        """What `ClusterSpec.detect()` sees, with the Trainer's numbers of hosts and processes: Lightning's own launcher
        does not say them as torchrun does. `None` where a plan was given, which says what it is for."""
        if self._options.get("plan") is not None or PLAN_VARIABLE in os.environ:
            return None
        said = {
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.world_size // self.num_nodes,
            "GROUP_WORLD_SIZE": self.num_nodes,
        }
        return ClusterSpec.detect({**os.environ, **{name: str(number) for name, number in said.items()}})

    @property
    def plans(self) -> dict[str, Any]:
        """The plan of each module that was captured so far, by its name; "" is the LightningModule itself. They
        stay once `fit` has returned."""
        return self._plans if self._calls is None else {name: unit.plan for name, unit in self._calls.units.items()}

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._calls is None:
            return super().training_step(*args, **kwargs)
        batch = args[0] if args else next(iter(kwargs.values()))
        self._share = self._share_of(batch)
        if self._follows_synchronized:
            self._calls.share_buffers()
        module = self.lightning_module
        assert module is not None, "a step is one of a module"
        # In manual optimization DDP leaves each rank its buffers.
        self._follows_synchronized = self._calls.synchronizes and module.automatic_optimization
        with self._calls:
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        scaled = closure_loss if self._share == 1.0 else closure_loss * self._share
        with contextlib.nullcontext() if self._calls is None else self._calls.passing_back():
            return self._backward(scaled, optimizer, *args, **kwargs)

    def _backward(self, loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As any strategy's, but that all gradients are synchronized before hooks behind the backward pass run."""
        module, plugin = self.lightning_module, self.precision_plugin
        assert module is not None, "a backward pass is one of a module"
        self.pre_backward(loss)
        loss = plugin.pre_backward(loss, module)
        plugin.backward(loss, module, optimizer, *args, **kwargs)
        if self._calls is not None:
            self._calls.finish()
        loss = plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None]:
        with contextlib.nullcontext() if self._calls is None else self._calls.no_sync():
            yield

    def on_validation_start(self) -> None:
        self._evaluates_first = True

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._evaluates_first:  # and not before, as a callback may have put averaged weights in place
            self._evaluates_first = False
            self._share_buffers()
        return super().validation_step(*args, **kwargs)

    def on_train_end(self) -> None:
        self._share_buffers()  # for what is tested

    def teardown(self) -> None:
        self._plans = self.plans
        self._calls = None
        super().teardown()

    def _register_ddp_hooks(self) -> None:
        """There is no `DistributedDataParallel` to register them with."""

    def _share_buffers(self) -> None:
        if self._calls is not None:
            self._calls.share_buffers()

    def _share_of(self, batch: Any) -> float:
        """What this rank's loss is multiplied with."""
        if self._weight is equal:
            return 1.0
        own = self._weight(batch)
        return share(own, *sums([own], self.root_device))


StrategyRegistry.register("autopar", AutoparStrategy, "autopar's plans in the place of DistributedDataParallel")
