"""Several hosts on one machine: network namespaces, joined by links of a given rate.

Every host is a namespace with one interface, `eth0`. A virtual cable (veth pair) leads from it to a switch, a bridge
in a namespace of its own: nothing of a lab is visible from, or can reach, the machine's own network or another lab.
Both ends of a cable are shaped by `tbf`, a token bucket, so the rate holds in each direction.

    with Lab(rates_bps=[1e9] * 4) as lab:
        lab.hosts[0].run(["ping", "-c1", lab.hosts[1].address])

Needs root on Linux with iproute2; `unavailable_reason()` says what is missing. Names carry the process id of the
owner and a number (`autopar-4711-0-h2`), so that labs can stand side by side, and so that `cleanup_stale()` can
remove what a killed owner left behind.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import platform
import re
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from autopar.lab.host import Host, shell

_NAME = re.compile(r"^autopar-(\d+)-\d+-\w+$")
_serial = itertools.count()


class LabUnavailable(RuntimeError):
    """This machine cannot bring up network namespaces; the message says why."""


class Lab:
    """Hosts joined by one switch. A context manager; `up` and `down` where a `with` does not fit.

    Inside `with`, SIGTERM and SIGHUP end the process by SystemExit, so that the lab is removed.
    """

    def __init__(self, rates_bps: Sequence[float | None]) -> None:
        """`rates_bps`: the rate of each host's link in bit/s, the same in and out; None for as fast as it goes."""
        if not 1 <= len(rates_bps) <= 250:
            raise ValueError(f"a lab has 1 to 250 hosts, not {len(rates_bps)}")
        if any(rate is not None and rate < 1e6 for rate in rates_bps):
            raise ValueError(f"rates are in bit/s and at least 1e6, got {list(rates_bps)}")
        self.rates_bps = tuple(rates_bps)
        self.hosts: tuple[Host, ...] = ()
        self._owner = os.getpid()
        self._prefix = f"autopar-{self._owner}-{next(_serial)}"
        self._is_up = False
        self._on_exit = ExitStack()

    def up(self) -> Self:
        """Brings the hosts up; raises `LabUnavailable` where this machine cannot. Leaves nothing behind if it fails."""
        reason = unavailable_reason()
        if reason is not None:
            raise LabUnavailable(reason)
        cleanup_stale()
        self._is_up = True
        atexit.register(self.down)
        try:
            self.hosts = self._build()
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        """Kills every process in the lab and removes it. Can be called again; does nothing in a forked child."""
        if not self._is_up or os.getpid() != self._owner:
            return
        for name in _namespaces():
            if name.startswith(f"{self._prefix}-"):
                _remove(name)
        self._is_up, self.hosts = False, ()
        atexit.unregister(self.down)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(_exit_on_signals())
            stack.callback(self.down)
            self.up()
            self._on_exit = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._on_exit.close()

    def _build(self) -> tuple[Host, ...]:
        switch = f"{self._prefix}-sw"
        shell(f"ip netns add {switch}")
        shell(f"ip -n {switch} link add name switch type bridge mcast_snooping 0")
        shell(f"ip -n {switch} link set dev switch addrgenmode none up")
        return tuple(self._add_host(i, rate, switch) for i, rate in enumerate(self.rates_bps))

    def _add_host(self, index: int, rate_bps: float | None, switch: str) -> Host:
        name, port, address = f"{self._prefix}-h{index}", f"port{index}", f"10.77.0.{index + 1}"
        shell(f"ip netns add {name}")
        shell(f"ip -n {name} link set dev lo up")
        shell(f"ip link add name {port} netns {switch} type veth peer name eth0 netns {name}")
        # Without generated addresses there is no IPv6, whose announcements the counters would show.
        shell(f"ip -n {switch} link set dev {port} master switch addrgenmode none up")
        shell(f"ip -n {name} link set dev eth0 addrgenmode none up")
        shell(f"ip -n {name} address add {address}/24 dev eth0")
        if rate_bps is not None:
            for namespace, device in ((name, "eth0"), (switch, port)):
                _shape(namespace, device, rate_bps)
        return Host(f"h{index}", name, address, "eth0")


class _LoopbackLab(Lab):
    def __init__(self) -> None:
        super().__init__(rates_bps=[None])

    def _build(self) -> tuple[Host, ...]:
        name = f"{self._prefix}-lo"
        shell(f"ip netns add {name}")
        shell(f"ip -n {name} link set dev lo up")
        return (Host("private", name, "127.0.0.1", "lo"),)


@contextmanager
def private_namespace() -> Iterator[Host]:
    """One host with nothing but loopback: its counter of bytes sent is the sum over all ranks that run there."""
    with _LoopbackLab() as lab:
        yield lab.hosts[0]


@functools.cache
def unavailable_reason() -> str | None:
    """Why this machine cannot bring up a lab, or None where it can. Tries each kind of device once."""
    if platform.system() != "Linux":
        return f"network namespaces need Linux, this is {platform.system()}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    probe = f"autopar-{os.getpid()}-{next(_serial)}-probe"
    try:
        shell(f"ip netns add {probe}")
        shell(f"ip -n {probe} link add name port type veth peer name eth0")
        shell(f"ip -n {probe} link add name switch type bridge")
        _shape(probe, "eth0", 1e9)
    except RuntimeError as e:
        return f"this machine does not allow it: {e}"
    finally:
        with suppress(RuntimeError):
            _remove(probe)
    return None


def cleanup_stale() -> list[str]:
    """Removes the labs, with their processes, whose owner is dead; returns the names of what it removed."""
    stale = []
    for name in _namespaces():
        match = _NAME.match(name)
        if match and not Path(f"/proc/{match[1]}").exists():
            with suppress(RuntimeError):  # Another process may be removing it, too.
                _remove(name)
                stale.append(name)
    return stale


def _shape(namespace: str, device: str, rate_bps: float) -> None:
    shell(f"tc -n {namespace} qdisc add dev {device} root tbf rate {rate_bps:.0f}bit burst 256kb latency 50ms")


def _namespaces() -> list[str]:
    return [line.split()[0] for line in shell("ip netns list").splitlines() if line]


def _remove(namespace: str) -> None:
    for pid in shell(f"ip netns pids {namespace}").split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    shell(f"ip netns delete {namespace}")


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    changed = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, leave)
                changed.append(number)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)
