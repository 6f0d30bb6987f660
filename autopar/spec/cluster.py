"""The cluster: hosts, their devices, and the network between them, as described in `cluster.yaml`.

    hosts:
      - name: worker
        count: 4
        devices: 1 x cpu
    network: {bandwidth: 1 Gbit/s, latency: 50 us}

A `ClusterSpec` holds what was written. What was left out is filled in on the way to `all_hosts`, `cables` and `ranks`,
where each figure says whether it was measured, looked up or guessed. Ranks are numbered through hosts and their
devices in the order of the description.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from autopar.errors import ClusterSpecError, SpecError
from autopar.spec import cluster_checks, cluster_resolve, cluster_words, detect
from autopar.spec.cluster_checks import MAX_RANKS
from autopar.spec.cluster_parts import (
    ClusterParts,
    DeviceSpec,
    DuplexSpec,
    HostSpec,
    InterconnectSpec,
    LinkSpec,
    NetworkSpec,
    PeakFlopsSpec,
    SwitchSpec,
)
from autopar.spec.files import read_file
from autopar.spec.json_file import Record
from autopar.spec.machines import Cable, Device, Host, RankPlace
from autopar.spec.validation import Problems, explain
from autopar.spec.yaml_source import MAX_BYTES, read_yaml

__all__ = [
    "MAX_RANKS",
    "Cable",
    "ClusterFingerprint",
    "ClusterSpec",
    "Device",
    "DeviceSpec",
    "DuplexSpec",
    "Host",
    "HostSpec",
    "InterconnectSpec",
    "LinkSpec",
    "NetworkSpec",
    "PeakFlopsSpec",
    "RankPlace",
    "SwitchSpec",
]

_SHORTEST = "write for example:\n  hosts:\n    - {name: worker, count: 4, devices: 1 x cpu}\n  network: 1GbE"


class ClusterSpec(ClusterParts):
    """Hosts and the network between them. Raises `ClusterSpecError` where they cannot be used."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        found = cluster_checks.problems(self)
        if found:
            raise Problems(found)
        return self

    @classmethod
    def load(cls, path: str | Path) -> ClusterSpec:
        """Reads a YAML file; raises `ClusterSpecError` with file and line for everything that is wrong with it."""
        return cls.loads(read_file(path, "cluster description", MAX_BYTES, ClusterSpecError), str(path))

    @classmethod
    def loads(cls, text: str, source: str = "cluster") -> ClusterSpec:
        """Reads YAML from a string; `source` stands for the file in errors."""
        found = read_yaml(text, source)
        if found.data is None:
            raise ClusterSpecError(f"{source}:1: there is nothing in it; {_SHORTEST}")
        if not isinstance(found.data, dict):
            kind = "a list" if isinstance(found.data, list) else "a single value"
            raise ClusterSpecError(f"{source}:{found.line(())}: {kind} is no cluster; {_SHORTEST}")
        try:
            return cls.model_validate(found.data)
        except ValidationError as e:
            raise ClusterSpecError(explain(e, cls, found)) from None

    @classmethod
    def local(cls, n_ranks: int) -> ClusterSpec:
        """`n_ranks` CPU ranks on this host, which talk over loopback and share its cores and memory."""
        return cls(hosts=(detect.local(n_ranks),))

    @classmethod
    def detect(cls, environment: Mapping[str, str] | None = None) -> ClusterSpec:
        """The cluster that this process is part of: under torchrun the job's hosts and ranks, else this machine with
        its GPUs, or as one CPU rank. It sees this host only and takes the others for equal. Figures that hosts report
        of themselves may differ a little between them: let all ranks use rank 0's (`to_yaml`, `loads`).

        `environment`: torchrun's variables, where this process has them from elsewhere than its environment."""
        return cls(hosts=(detect.detect(os.environ if environment is None else environment),))

    @property
    def all_hosts(self) -> tuple[Host, ...]:
        """Every host by itself. Made anew on each call: keep it where it is used often, as `ranks` and `cables`."""
        return cluster_resolve.hosts_of(self)

    @property
    def cables(self) -> tuple[Cable, ...]:
        """The network: hosts to their switches, and links."""
        return cluster_resolve.cables_of(self)

    @property
    def world_size(self) -> int:
        """The number of ranks: of devices over all hosts."""
        return cluster_resolve.world_size(self)

    @property
    def ranks(self) -> tuple[RankPlace, ...]:
        """The ranks in order, each with its host and device."""
        placed = ((host, i, device) for host in self.all_hosts for i, device in enumerate(host.devices))
        return tuple(RankPlace(rank, *place) for rank, place in enumerate(placed))

    @property
    def serving_hosts(self) -> tuple[Host, ...]:
        """The hosts that may hold parameters and update them for others."""
        return tuple(host for host in self.all_hosts if host.serves)

    @property
    def summary(self) -> str:
        """One line for people: `4 hosts x 1 cpu, 1 Gbit/s`."""
        return cluster_words.summary(self.all_hosts, self.cables)

    @property
    def batches(self) -> str:
        """The batch of each rank in words, where devices say theirs: `32 on each of 2 A100-80GB, 8 on 1 T4`."""
        return cluster_words.batches(self.all_hosts)

    @property
    def fingerprint(self) -> ClusterFingerprint:
        """What a plan remembers of the cluster; `ClusterSpec(**fingerprint.spec)` is the cluster again. The digest
        is over all figures, filled in, but not over names, nor over where a figure comes from."""
        digest = cluster_words.digest((self.all_hosts, self.cables))
        return ClusterFingerprint(
            digest=digest, world_size=self.world_size, summary=self.summary, spec=self.description
        )

    @property
    def description(self) -> dict[str, Any]:
        """What was written, in its shortest form, as plain data."""
        return self.model_dump(mode="json", exclude_defaults=True, exclude_none=True)

    def difference(self, other: ClusterSpec) -> list[str]:
        """Says in words how `other` differs from this cluster; empty where a plan for one fits the other."""
        return cluster_words.difference((self.all_hosts, self.cables), (other.all_hosts, other.cables))

    def to_yaml(self) -> str:
        """The description as YAML, which `loads` reads to an equal cluster."""
        import yaml

        return str(yaml.safe_dump(self.description, sort_keys=False, allow_unicode=True, width=120))


class ClusterFingerprint(Record):
    """The cluster that a plan was made for; `spec` is the whole description, so that differences can be named."""

    digest: str
    world_size: int = Field(ge=1, le=MAX_RANKS)
    summary: str
    """One line for people: `4 hosts x 1 cpu, 1 Gbit/s`."""
    spec: dict[str, Any]

    @property
    def cluster(self) -> ClusterSpec:
        """The cluster again. Raises `ClusterSpecError` where `spec` describes none."""
        try:
            return ClusterSpec.model_validate(self.spec)
        except ValidationError as e:
            raise ClusterSpecError(explain(e, ClusterSpec)) from None

    def check(self) -> None:
        """Raises `SpecError` where there is a description, and it is none of a cluster of as many ranks."""
        if not self.spec:
            return
        try:
            found = self.cluster.world_size
        except ClusterSpecError as e:
            raise SpecError(f"cluster.spec: {e}") from e
        if found != self.world_size:
            raise SpecError(f"cluster.world_size is {self.world_size}, but cluster.spec has {found} devices")
