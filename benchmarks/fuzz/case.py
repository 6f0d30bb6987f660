"""A case: a model, its data, its training, and a plan, as plain data that can be stored, run again, and shrunk."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Entry = Literal["step", "module", "optimize"]
"""How autopar is used: a `Program`; the drop-in module with an optimizer of its own; `optimize` with a plan, on several
ranks. With one rank, `step` goes through `autopar.optimize` as well."""
Form = Literal["loss_fn", "loss_module", "tensor", "dict", "attribute"]
"""Where the loss is computed: by a function or a module beside the model, or by the model, which returns it so."""


@dataclass(frozen=True)
class Case:
    """One model and how it is trained. Sequences are lines of Python, or what their names say."""

    name: str
    """SEED/case, as `--only` takes it."""
    init: tuple[str, ...] = ()
    """Lines of the model's `__init__`: parameters and buffers."""
    inputs: tuple[tuple[str, str], ...] = ()
    """The model's inputs: name, and expression in `n`, the number of samples, and `seed`."""
    targets: tuple[tuple[str, str], ...] = ()
    """What the loss compares with, likewise."""
    forward: tuple[str, ...] = ()
    """Statements of the model's `forward`; one may have several lines."""
    output: str = "x"
    """Expression of the output."""
    loss: str = "out.mean()"
    """Expression in `out` and the targets."""
    form: Form = "loss_fn"
    optimizer: str = "torch.optim.SGD(grouped(parameters, 1, 0.1))"
    """Expression in `parameters`, the list of trainable ones."""
    schedule: str = ""
    """Expression in `optimizer` of a learning-rate scheduler; empty for none."""
    dtype: str = "float64"
    steps: int = 3
    samples: tuple[tuple[int, ...], ...] = ((4,),)
    """Of each rank's micro-batches."""
    events: tuple[tuple[int, str], ...] = ()
    """Before which step, and a line in `model`, `loss`, `optimizer` and `program`, which eagerly is the model."""
    twist: str = ""
    """What is hostile about the script, in words; see `benchmarks.fuzz.twists`."""
    must_refuse: bool = False
    """Whether autopar has to refuse it."""
    clip: float | None = None
    entry: Entry = "step"
    unused: Literal["error", "freeze"] = "error"
    sums: bool = False
    """Whether the loss is a sum over the samples: ranks' losses are then averaged, as by DDP."""
    input_gradients: bool = False
    """Whether floating-point inputs require gradients, which are compared; for the drop-in module."""
    groups: str = ""
    """JSON of the plan's sync groups; empty: drawn from `plan_seed`."""
    plan_seed: int = 0
    """0 for one rank without a plan of its own."""
    recompute: Literal["none", "selective", "full"] = "none"
    late: bool = False
    """Whether parameters may be on their way between steps."""
    eager: bool = False
    """Whether the model runs eagerly, with `capture="never"`."""
    data_seed: int = 0

    @property
    def world_size(self) -> int:
        return len(self.samples)

    @property
    def counts_samples(self) -> bool:
        """Whether batches count by their samples: all that is known of a model that runs eagerly."""
        counted = "t" in dict(self.targets) or "m" in dict(self.targets)
        return sum(map(len, self.samples)) == 1 or not (counted or self.sums or "parameters()" in self.loss)

    @property
    def unfused(self) -> bool:
        """Whether autopar does not follow `fused=True`, where PyTorch's implementation on CPUs is wrong."""
        narrow = "SGD" in self.optimizer and self.dtype in ("bfloat16", "float16")
        return self.entry != "module" and (narrow or any('layout="strided"' in line for line in self.init))

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Case:
        told = json.loads(text)
        return cls(**{f.name: _tuples(told[f.name]) for f in fields(cls) if f.name in told})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
