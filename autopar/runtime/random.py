"""Random numbers: a stream of its own on each rank, reproducible from one seed."""

from __future__ import annotations

from collections.abc import Callable

import torch


class RandomStream:
    """While entered, random operators draw from this rank's stream; outside, PyTorch's generators are untouched.

    With several ranks, rank r's stream starts from the seed that PyTorch had when the program was made, plus r, so
    that dropout differs between ranks. With one rank, PyTorch's own generator is used, as in eager training.
    """

    def __init__(self, rank: int, world_size: int, seed: int | None = None) -> None:
        self.own = world_size > 1
        self._outside: list[torch.Tensor] = []
        self._state: list[torch.Tensor] = []
        if self.own:
            seed = (torch.initial_seed() if seed is None else seed) + rank
            self._state = [torch.Generator(d).manual_seed(seed % 2**63).get_state() for d in self._devices()]

    @staticmethod
    def _devices() -> list[torch.device]:
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return [torch.device("cpu"), *([torch.device("cuda", torch.cuda.current_device())] if cuda else [])]

    def state(self) -> list[torch.Tensor]:
        """The stream's state, for a checkpoint; empty with one rank."""
        return [s.clone() for s in self._state] if self.own else []

    def load_state(self, state: list[torch.Tensor]) -> None:
        """Continues from a saved state."""
        if self.own and state:
            self._state = [s.clone() for s in state]

    def kept(self) -> Callable[[], None]:
        """Keeps where the stream is; what is returned puts it back there."""
        before = self._state

        def put_back() -> None:
            self._state = before

        return put_back

    def __enter__(self) -> None:
        if self.own:
            self._outside = _swap(self._state)

    def __exit__(self, *_: object) -> None:
        if self.own:
            self._state = _swap(self._outside)


def _swap(states: list[torch.Tensor]) -> list[torch.Tensor]:
    """Puts generator states in place; returns those that were there."""
    before = [torch.get_rng_state()]
    torch.set_rng_state(states[0])
    if len(states) > 1:
        before.append(torch.cuda.get_rng_state())
        torch.cuda.set_rng_state(states[1])
    return before
