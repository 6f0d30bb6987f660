"""Gloo, for CPUs.

Its reduce-scatter moves as much as a whole all-reduce, so the sum is taken after an all-to-all; its all-gather refuses
unequal parts, so those go through an all-to-all as well; neither is fast, so that large ones go in rounds of our own,
in a ring where parts are alike (`exchange`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.backends.base import Backend, Begun
from autopar.backends.exchange import AllGather, AllToAll, ReduceScatter, alike, in_rounds
from autopar.ir.dtypes import EXACT_BYTES


@dataclass(frozen=True)
class Gloo(Backend):
    """Large exchanges among CPUs go in rounds."""

    def reduce_scatter(self, x: torch.Tensor, sizes: Sequence[int], rank: int, pg: Any) -> Begun:
        if not in_rounds(x, sizes):
            return super().reduce_scatter(x, sizes, rank, pg)
        mine, parts = sizes[rank], torch.split(x, list(sizes))
        if alike(sizes) and x.element_size() >= EXACT_BYTES:
            out = x.new_empty(mine)
            return out, ReduceScatter(parts, out, rank, pg).begin()
        out = x.new_empty(len(sizes), mine)
        return out, AllToAll(parts, out.unbind(), rank, pg).begin()

    def all_gather(self, x: torch.Tensor, sizes: Sequence[int], rank: int, pg: Any) -> Begun:
        if not in_rounds(x, sizes):
            return super().all_gather(x, sizes, rank, pg)
        out = x.new_empty(sum(sizes))
        parts = torch.split(out, list(sizes))
        if alike(sizes):
            return out, AllGather(x, parts, rank, pg).begin()
        return out, AllToAll([x] * len(sizes), parts, rank, pg).begin()

    def all_to_all(
        self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int], pg: Any, large: bool = False
    ) -> Begun:
        if not large or x.device.type != "cpu":
            return super().all_to_all(x, sent, received, pg)
        out = x.new_empty(sum(received))
        return out, AllToAll(torch.split(x, list(sent)), torch.split(out, list(received)), pg.rank(), pg).begin()


GLOO = Gloo(
    "gloo",
    # An all-reduce of 4 bytes takes 0.1 to 0.4 ms over 2 to 4 ranks of one machine, torch 2.13. [Empirical]
    call_s=60e-6,
    hop_s=20e-6,
    issue_s=100e-6,
    # Four hosts, each with 0.2 or 1 Gbit/s, messages from 1 MB, torch 2.13. [Empirical] All-reduce: 0.955 of the line
    # rate; all-gather, and the rounds that a reduce-scatter is made of, 0.92; gloo's all-to-all 0.56, as all senders
    # meet at a receiver.
    fraction={
        "all_reduce": 0.955,
        "all_gather": 0.92,
        "reduce_scatter": 0.92,
        "all_to_all": 0.56,
        "reduce": 0.955,
        "broadcast": 0.955,
        "served_sum": 0.92,
    },
    # Sockets of one machine, copied in and out of the kernel and added up. [Empirical, of the right order]
    host_bytes_per_s=2e9,
    # Processor time of a rank that only waits for a collective of 64 KiB to 4 MiB, on two and three ranks, over
    # loopback and links of 0.2 and 1 Gbit/s, torch 2.13. A MB moved takes 0.3 to 0.4 ms in an all-reduce, 0.45 to 0.65
    # in an exchange of autopar's own messages. Beside its bytes, between two ranks, an all-reduce takes 0.35 to 1.0 ms,
    # such an exchange 0.7 to 1.3 ms. [Empirical]
    host_lead={"all_reduce": 1.4},
    round_processor_s=250e-6,
    exchange_processor_s=500e-6,
    # The thread that runs the collective, and the one that reads and writes the sockets.
    host_threads=2,
    # The threads of a process group, unless its options say otherwise (ProcessGroupGloo, torch 2.13).
    at_once=2,
    # A rank says over the same connection that it is ready to receive, behind what it sends itself: of two collectives
    # the second waits for the first, though its bytes go the other way. Two reduces or broadcasts, with two owners,
    # 1 to 20 MB between two hosts at 300 Mbit/s, take 0.94 to 1.00 of the sum of both; between four hosts, where
    # connections are several, 0.8 and less. [Empirical]
    two_alternate=True,
    # What 1 to 64 MiB over four hosts and two servers take longer than their bytes. [Empirical]
    served_call_s=3e-3,
    rounds=True,
)
