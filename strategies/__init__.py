"""The family of synchronization strategies: one file each, listed here."""

from __future__ import annotations

if __name__ != "autopar.strategies":
    raise ImportError("import autopar.strategies, not strategies: this folder ships as a subpackage of autopar")

from autopar.errors import PlanError, among
from autopar.ops.base import Call
from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.strategies.all_reduce import AllReduce
from autopar.strategies.base import Options, Strategy
from autopar.strategies.class_sharded_head import ClassShardedHead
from autopar.strategies.column_parallel_linear import ColumnParallelLinear
from autopar.strategies.des_loc import DesLoc
from autopar.strategies.dgc import DGC
from autopar.strategies.diloco import DiLoCo
from autopar.strategies.emitter import Emitter
from autopar.strategies.hierarchical_all_reduce import HierarchicalAllReduce
from autopar.strategies.local_adam import LocalAdam
from autopar.strategies.one_bit_adam import OneBitAdam
from autopar.strategies.parameter_server import ParameterServer
from autopar.strategies.partitioned_parameter_server import PartitionedParameterServer
from autopar.strategies.power_sgd import PowerSGD
from autopar.strategies.qsgd import Qsgd
from autopar.strategies.quantized import Quantized
from autopar.strategies.random_k import RandomK
from autopar.strategies.row_sharded_table import RowShardedTable
from autopar.strategies.scaled_sign import ScaledSign
from autopar.strategies.sharded_parameters import ShardedParameters
from autopar.strategies.sparse_rows import SparseRows
from autopar.strategies.sufficient_factors import SufficientFactors
from autopar.strategies.summation_servers import SummationServers
from autopar.strategies.terngrad import TernGrad
from autopar.strategies.top_k import TopK
from autopar.strategies.weight_differences import WeightDifferences

__all__ = [
    "DGC",
    "STRATEGIES",
    "AllReduce",
    "Call",
    "ClassShardedHead",
    "ColumnParallelLinear",
    "Context",
    "DesLoc",
    "DiLoCo",
    "Emitter",
    "Group",
    "HierarchicalAllReduce",
    "LocalAdam",
    "Member",
    "OneBitAdam",
    "Options",
    "ParameterServer",
    "PartitionedParameterServer",
    "PowerSGD",
    "Qsgd",
    "Quantized",
    "RandomK",
    "RowShardedTable",
    "ScaledSign",
    "ShardedParameters",
    "SparseRows",
    "Strategy",
    "SufficientFactors",
    "SummationServers",
    "TernGrad",
    "TopK",
    "WeightDifferences",
    "register",
    "strategy_named",
]

STRATEGIES: dict[str, Strategy] = {
    s.name: s
    for s in (
        AllReduce(),
        ClassShardedHead(),
        ColumnParallelLinear(),
        DGC(),
        DesLoc(),
        DiLoCo(),
        HierarchicalAllReduce(),
        LocalAdam(),
        OneBitAdam(),
        ParameterServer(),
        PartitionedParameterServer(),
        Qsgd(),
        Quantized(),
        RandomK(),
        PowerSGD(),
        RowShardedTable(),
        ScaledSign(),
        ShardedParameters(),
        SparseRows(),
        SufficientFactors(),
        SummationServers(),
        TernGrad(),
        TopK(),
        WeightDifferences(),
    )
}


def strategy_named(name: str) -> Strategy:
    """Looks a strategy up; raises `PlanError` with the nearest name where there is none."""
    if name not in STRATEGIES:
        raise PlanError(
            f"unknown strategy '{name}'{among(name, STRATEGIES)}. One of your own is made known, in every process, by "
            "autopar.strategies.register(...) in a module that the script, or the model's file, imports"
        )
    return STRATEGIES[name]


def register(strategy: Strategy) -> None:
    """Makes a strategy of your own known: plans may name it, and the search tries it where it applies. To be called in
    every process that makes or runs such plans. Raises `PlanError` where another strategy has its name."""
    known = STRATEGIES.get(strategy.name)
    if known is not None and _place(known) != _place(strategy):
        raise PlanError(f"there is a strategy '{strategy.name}' already: {type(known).__qualname__}")
    STRATEGIES[strategy.name] = strategy


def _place(strategy: Strategy) -> tuple[str, str]:
    """Where a strategy is defined: a file that is run twice defines the same one twice."""
    return type(strategy).__module__, type(strategy).__qualname__
