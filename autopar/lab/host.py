"""A place where ranks run, and the bytes that pass through its interface."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.lab import guard


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace, or this machine itself where `namespace` is None.

    What is started here ends with this process, at the latest (on Linux; see `autopar.lab.guard`).
    """

    name: str
    namespace: str | None
    address: str
    interface: str
    """The one interface that traffic between hosts passes through; empty where gloo is to find its own."""
    cores: tuple[int, ...] = ()
    """The machine's cores that this host's processes run on; empty: on any, as those of the other hosts do."""

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv`, to be run on this host."""
        kept_to = ("taskset", "--cpu-list", ",".join(map(str, self.cores))) if self.cores else ()
        return [*(("ip", "netns", "exec", self.namespace) if self.namespace else ()), *kept_to, *argv]

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """This process's environment with `extra`, and with gloo bound to the host's interface."""
        return {**guard.marked_environment(), **self.bound, **(extra or {})}

    @property
    def bound(self) -> dict[str, str]:
        """The environment variable that binds gloo to the host's interface; empty for none."""
        return {"GLOO_SOCKET_IFNAME": self.interface} if self.interface else {}

    def popen(self, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """Starts a process on this host, in text mode; `options` are those of `subprocess.Popen`."""
        guard.watch()
        return subprocess.Popen(self.command(argv), env=self.environment(env), text=True, **options)

    def run(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs a process on this host to its end; `options` are those of `subprocess.run`."""
        guard.watch()
        return subprocess.run(self.command(argv), env=self.environment(env), text=True, **options)

    def bytes_sent(self) -> int:
        """Bytes that left through the interface since it exists, headers of packets included."""
        return self._counters()[0]

    def bytes_received(self) -> int:
        """Bytes that came in through the interface since it exists, headers of packets included."""
        return self._counters()[1]

    def _counters(self) -> tuple[int, int]:
        if self.namespace is None:
            return _read_proc_net_dev(self.interface)
        text = shell(f"ip -n {self.namespace} -json -stats link show dev {self.interface}")
        stats = json.loads(text)[0]["stats64"]
        return int(stats["tx"]["bytes"]), int(stats["rx"]["bytes"])


def this_machine(name: str = "localhost") -> Host:
    """The machine itself, over loopback: what is left where there are no namespaces.

    Its links have no rate, and its counters (Linux only; elsewhere they raise OSError) also see other programs.
    """
    return Host(name, None, "127.0.0.1", "lo")


def shell(command: str, lines: Sequence[str] = ()) -> str:
    """Runs a command (no shell reads it; it is split at blanks) on the input `lines`, and returns what it prints.

    Raises RuntimeError with the command and its complaint where it fails.
    """
    done = subprocess.run(
        command.split(),
        input="".join(f"{line}\n" for line in lines),
        env=guard.marked_environment(),
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"`{command}` failed: {done.stderr.strip() or done.returncode}{_blamed(done.stderr, lines)}")
    return done.stdout


def _blamed(complaint: str, lines: Sequence[str]) -> str:
    """The line of a batch that iproute2 complains of: it says `Command failed -:3`."""
    number = complaint.rpartition("Command failed -:")[2].strip()
    return f": {lines[int(number) - 1]}" if number.isdigit() and 0 < int(number) <= len(lines) else ""


def _read_proc_net_dev(interface: str) -> tuple[int, int]:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            fields = counts.split()
            return int(fields[8]), int(fields[0])
    raise OSError(f"no interface '{interface}' in /proc/net/dev")
