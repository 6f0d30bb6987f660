"""What the tests of outputs and gradient norms run on each rank: steps that hand them back, against one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.testing import classes
from tests.gloo.sharded import SHARED_OUT, batch, net, plan_for

CLIPPED = 0.05


class Whole(nn.Module):
    """A model that returns its loss among all that its output may hold: views, parameters, buffers, its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.25)
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, words: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        h = torch.relu(self.drop(self.norm(self.table(words))))
        self.count.add_(1.0)
        loss = nn.functional.cross_entropy(h, target)
        held = [h, (h[1:], self.table.weight, self.norm.weight.view(2, 2))]
        return {"loss": loss, "words": words, "held": held, "count": self.count, "best": h.argmax(-1), "name": "whole"}


def tensors(output: Any) -> list[torch.Tensor]:
    return [t.detach().clone() for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]


def apart(found: Any, expected: Any) -> float:
    pairs = list(zip(tensors(found), tensors(expected), strict=True))
    assert pairs and all(not a.requires_grad and a.shape == b.shape for a, b in pairs)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel())


def steps(rank: int, n: int, strategy: str, clip: float | None, parts: int) -> list[float]:
    """How far outputs and norms, losses, and parameters are from those of one process, over two steps."""
    model, eager = net(), net()
    plan = plan_for(n, strategy) if strategy in SHARED_OUT else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(eager.parameters(), lr=1e-2)
    program = autopar.optimize(
        model,
        example_inputs=batch(0, rank),
        loss_fn=classes.loss,
        optimizer=optimizer,
        plan=plan,
        strategy=None if plan else strategy,
        clip_grad_norm=clip,
    )
    outputs = strategy != "class_sharded_head"
    worst = [0.0, 0.0, 0.0]
    for step in range(2):
        own = [batch(10 * step + k, rank) for k in range(parts)]
        every = [batch(10 * step + k, r) for r in range(n) for k in range(parts)]
        given: dict[str, Any] = {"micro_batches": own} if parts > 1 else {"batch": own[0]}
        result = program.step(**given, outputs=outputs, grad_norm=step > 0)
        before = [eager(b[0]) for b in own]
        theirs.zero_grad()
        loss = classes.loss(eager(torch.cat([b[0] for b in every])), torch.cat([b[1] for b in every]))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(eager.parameters(), clip or float("inf"))
        theirs.step()
        assert isinstance(result, autopar.StepResult) or (step == 0 and not outputs)
        if not isinstance(result, autopar.StepResult):
            continue
        worst[1] = max(worst[1], abs(result.loss.item() - loss.item()))
        assert (result.grad_norm is None) == (step == 0) and (result.output is None) != outputs
        if result.grad_norm is not None:
            worst[0] = max(worst[0], abs(result.grad_norm.item() - norm.item()))
        if outputs:
            worst[0] = max(worst[0], apart(result.output, before if parts > 1 else before[0]))
    with program.gathered():
        worst[2] = apart([p.data for p in model.parameters()], [p.data for p in eager.parameters()])
    assert isinstance(program.step(**given), torch.Tensor) and program._runs.take_outputs() == []
    return worst


def whole(rank: int, n: int) -> float:
    """How far all that an output may hold is from what the model returns eagerly, on one rank with its dropout."""
    torch.manual_seed(1)
    model, eager = Whole().double(), Whole().double()
    eager.load_state_dict(model.state_dict())
    data = {"words": torch.tensor([1, 2, 3 + rank, 2]), "target": torch.tensor([0, 1, 2, 3])}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.manual_seed(2)
    program = autopar.optimize(model, example_inputs=data, optimizer=optimizer, strategy="ddp", outputs=True)
    program.step(data, outputs=True)
    eager.load_state_dict(model.state_dict())
    result = program.step(data, outputs=True)
    model.load_state_dict(eager.state_dict())
    if n == 1:
        torch.manual_seed(2)
        eager(**data)
        eager.load_state_dict(model.state_dict())
    else:
        eager.drop.p = 0.0
    expected = eager(**data)
    assert result.output["name"] == "whole" and list(result.output) == list(expected)
    pairs = [(result.output["words"], data["words"]), (result.output["count"], expected["count"])]
    if n == 1:
        pairs += [(result.output, expected)]
    else:
        pairs += [(result.output["held"][1][1:], expected["held"][1][1:])]
    return max(apart(a, b) for a, b in pairs)


def refused(n: int) -> list[str]:
    """What is said of outputs that no rank has, and of a norm that not all ranks ask for."""
    said = []
    asked: list[dict[str, Any]] = [{"outputs": True}, {"grad_norm": True}]
    for ask in asked:
        model = net()
        program = autopar.optimize(
            model,
            example_inputs=batch(0, 0),
            loss_fn=classes.loss,
            optimizer=torch.optim.AdamW(model.parameters()),
            plan=plan_for(n, "class_sharded_head"),
        )
        try:
            program.step(batch(0, 0), **({} if "grad_norm" in ask and program.rank else ask))
            said.append("")
        except AutoparError as e:
            said.append(str(e))
    return said


CASES: dict[int, tuple[tuple[str, float | None, int], ...]] = {
    1: (("zero1", None, 2), ("ddp", CLIPPED, 1)),
    2: (("ddp", None, 1), ("zero1", CLIPPED, 1), ("structured", None, 2), ("sharded", None, 1)),
    3: (("zero1", None, 1), ("PSLoadBalancing", None, 2), *((s, None, 1) for s in SHARED_OUT)),
}
"""By the number of ranks: a strategy, by which norm gradients are clipped, and the number of micro-batches."""


def everything(rank: int, n: int) -> dict[str, Any]:
    found = {str(case): steps(rank, n, *case) for case in CASES[n]}
    return {"steps": found, "whole": whole(rank, n), "refused": refused(n) if n == 2 else []}
