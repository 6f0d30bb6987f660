"""Plans that send what gradients are made of, wherever that is less than the gradient: rows of tables, factors of
products. All else goes in buckets."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.training_graph import Parameter
from autopar.ops.parts import index_elements
from autopar.search.builders.by_hand import DDP_BUCKET_BYTES, buckets
from autopar.search.builders.common import Builder, alone, applies, group, issue_order, one_dtype_each, others, whole
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import SyncGroup
from autopar.strategies import Context, strategy_named

_HEAD, _TABLE, _LAYER = "class_sharded_head", "row_sharded_table", "column_parallel_linear"
_STRATEGY = {"rows": "sparse_rows", "factors": "sufficient_factors"}


def structured(dense: str, heads: bool = False, tables: bool = False, layers: bool = False) -> Builder:
    """A builder that puts dense gradients through the strategy of this name, or through all-reduces where that has no
    use here; with `heads`, classes are shared out, with `tables`, rows of tables, with `layers`, outputs of linear
    layers."""

    def build(parameters: Sequence[Parameter], context: Context, cluster: ClusterSpec) -> tuple[SyncGroup, ...]:
        if context.world_size == 1:
            return alone(parameters)
        headed = [p for p in parameters if heads and _is_head(p, context)]
        outputs = [p for p in others(parameters, headed) if layers and _is_layer(p, context)]
        sent = [p for p in others(parameters, headed, outputs) if _is_less(p, context)]
        shared = [p for p in sent if tables and applies(_TABLE, p, context)]
        groups = [group(_TABLE, pieces) for pieces in one_dtype_each([whole(p) for p in shared])]
        rows = [whole(p) for p in others(sent, shared) if p.structure == "rows"]
        groups += [group(_STRATEGY["rows"], pieces) for pieces in one_dtype_each(rows)]
        groups += [group(_STRATEGY["factors"], [whole(p)]) for p in sent if p.structure == "factors"]
        groups += [group(_LAYER, [whole(p)]) for p in outputs]
        for head in dict.fromkeys(p.head for p in headed):
            groups.append(group(_HEAD, [whole(p) for p in headed if p.head == head]))
        rest = others(parameters, sent, headed, outputs)
        used = dense if strategy_named(dense).options(context) else "all_reduce"
        groups += [group(used, pieces) for pieces in buckets(rest, DDP_BUCKET_BYTES)]
        return issue_order(groups, parameters)

    return build


def _is_head(parameter: Parameter, context: Context) -> bool:
    """Whether what a head is given, its gradient, and three sums a sample and rank are less than its weight's gradient
    in a ring's all-reduce."""
    head, n = parameter.head, context.world_size
    if head is None or not applies(_HEAD, parameter, context):
        return False
    return n * head.samples * (2 * head.width + 3 * n) < 2 * head.classes * head.width


def _is_layer(parameter: Parameter, context: Context) -> bool:
    """Whether what a layer is given, its outputs, and their gradients are less than its weight's gradient in a ring's
    all-reduce."""
    layer, n = parameter.layer, context.world_size
    if layer is None or not applies(_LAYER, parameter, context):
        return False
    return layer.samples * (n * layer.width + layer.outputs) < layer.width * layer.outputs


def _is_less(parameter: Parameter, context: Context) -> bool:
    """Whether a rank sends less than in a ring's all-reduce: (n-1) of its parts against 2 (n-1)/n of the gradient."""
    parts = parameter.parts
    if parts is None or not applies(_STRATEGY[parts.kind], parameter, context):
        return False
    elements = parts.distinct * (parts.row_width + index_elements(parts, parameter.spec.dtype))
    return elements * context.world_size < 2 * parameter.numel
