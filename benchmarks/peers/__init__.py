"""autopar beside its peers: the same model, batches, optimizer and seeds, on the same ranks, in turn.

`python -m benchmarks.peers --help`. A `Peer` is one way to train; `case` is a workload on a cluster, `ranks` the
living ranks, `entrants` tunes who takes part, `measure` has all of them take turns, `outcome` and `table` say what
came of it, `cases` is what the suites consist of.
"""

from __future__ import annotations

from autopar.search import AUTODIST
from autopar.spec.plan import FIDELITIES
from benchmarks.peers.base import Options, Peer, Step
from benchmarks.peers.compressed import PowerSgd
from benchmarks.peers.ddp import BestBuckets, Ddp, Float16, SparseEmbeddings, StaticGraph
from benchmarks.peers.fsdp import Fsdp2
from benchmarks.peers.local_sgd import LocalSgd
from benchmarks.peers.planned import Autopar, Builder
from benchmarks.peers.zero import DeepSpeedZero, ZeroRedundancy

__all__ = ["OURS", "PEERS", "Options", "Peer", "Step", "peer_named"]

OURS: dict[str, Autopar] = {p.name: p for p in map(Autopar, FIDELITIES)}
"""autopar, within each fidelity."""

PEERS: dict[str, Peer] = {
    p.name: p
    for p in (
        Ddp(),
        BestBuckets(),
        StaticGraph(),
        SparseEmbeddings(),
        Fsdp2(),
        ZeroRedundancy(),
        DeepSpeedZero(),
        *map(Builder, AUTODIST),
        Float16(),
        PowerSgd(),
        LocalSgd(),
    )
}
"""The peers, by name."""


def peer_named(name: str) -> Peer:
    """A peer, or autopar within a fidelity; raises `KeyError` with the nearest right name."""
    from autopar.errors import did_you_mean

    known = OURS | PEERS
    if name not in known:
        raise KeyError(f"no peer '{name}'{did_you_mean(name, known)}; there are {', '.join(known)}")
    return known[name]
