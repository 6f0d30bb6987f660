"""Which buffers the loss depends on and the forward pass writes: moving averages, code books, queues."""

from __future__ import annotations

import operator

import torch
import torch.fx

from autopar.ir.capture import JointGraph

aten = torch.ops.aten

_BATCH_NORMS = frozenset(
    {
        aten._native_batch_norm_legit_functional.default,
        aten._batch_norm_with_update_functional.default,
        aten.cudnn_batch_norm.default,
    }
)
_STATISTICS = slice(3, 5)
"""Arguments of these: the running mean and variance, which in training mode none but their own new values depend on."""


def read_and_written(joint: JointGraph) -> tuple[str, ...]:
    """Names of the buffers that the graph writes, and that its outputs or gradients depend on, in the graph's order.

    Running statistics of batch normalization in training mode are not among them: nothing else reads them there.
    """
    written = [name for name, _ in joint.mutations]
    if not written:
        return ()
    placeholders = dict(zip(joint.inputs, joint.module.graph.find_nodes(op="placeholder"), strict=True))
    results = {*joint.outputs, *joint.gradients.values(), *joint.input_gradients.values()}
    return tuple(n for n in written if _reaches(placeholders["buffer", n], results))


def _reaches(start: torch.fx.Node, results: set[torch.fx.Node]) -> bool:
    found: set[torch.fx.Node] = {start}
    frontier = [start]
    while frontier:
        node = frontier.pop()
        if node in results:
            return True
        for user in node.users:
            if user.op == "output" or user in found:
                continue
            if user.target in _BATCH_NORMS and node not in _without_statistics(user):
                values = [u for u in user.users if u.target is operator.getitem and int(u.args[1]) >= 3]  # type: ignore[arg-type]
                found.update(values)
                frontier.extend(values)
                continue
            found.add(user)
            frontier.append(user)
    return False


def _without_statistics(norm: torch.fx.Node) -> tuple[object, ...]:
    """What a batch normalization's result depends on: in training mode all but the running statistics."""
    args = list(norm.args)
    if norm.target is aten._batch_norm_with_update_functional.default or args[5] is True:
        args[_STATISTICS] = [None, None]
    return tuple(args)
