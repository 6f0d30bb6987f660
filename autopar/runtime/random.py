"""Random numbers: a stream of its own on each rank, reproducible from one seed."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from autopar.errors import CaptureError, SpecError


class RandomStream:
    """While entered, random operators draw from this rank's stream; outside, PyTorch's generators are untouched.

    With several ranks, rank r's stream starts from the seed that PyTorch had when the program was made, plus r, so
    that dropout differs between ranks. With one rank, PyTorch's own generator is used, as in eager training.
    """

    def __init__(self, rank: int, world_size: int, seed: int | None = None) -> None:
        self.own = world_size > 1
        self._rank, self._world_size = rank, world_size
        self._outside: list[torch.Tensor] = []
        self._state: list[torch.Tensor] = []
        if self.own:
            self._state = _seeded((torch.initial_seed() if seed is None else seed) + rank)

    def leave(self) -> None:
        """Has random operators draw from PyTorch's own generator from now on, as with one rank."""
        self.own, self._rank, self._world_size = False, 0, 1

    def state(self) -> list[str]:
        """The stream's state, as text for a checkpoint: of the CPU's generator, and of the GPU's where there is one."""
        return [_text(s) for s in (self._state if self.own else _in_place())]

    def read(self, saved: object) -> list[torch.Tensor] | None:
        """What `load` takes, from what a checkpoint holds; None where it holds no stream.

        Where it holds as many streams as there are ranks, each rank continues its own; else each starts one that is
        derived from all of them and its rank, so that no two are alike. A checkpoint of one rank's stream as tensors,
        which autopar wrote before it kept all ranks', is one of another number of ranks. Raises `SpecError` where it
        is neither. Nothing is changed.
        """
        streams = _streams(saved)
        if not streams:
            return None
        alike = len({s[0] for s in streams}) < len(streams)
        continues = len(streams) == self._world_size and not _is_of_one_rank(saved) and not alike
        found = [_tensor(s) for s in streams[self._rank]] if continues else []
        # Where a generator has no saved state, as a GPU's of a checkpoint made on CPUs.
        derived = _seeded(_digest(streams, self._rank, self._world_size))
        found = [*found[: len(derived)], *derived[len(found) :]]
        for device, state in zip(_devices(), found, strict=True):
            try:
                torch.Generator(device).set_state(state)
            except (RuntimeError, TypeError) as e:
                raise SpecError(
                    f"the checkpoint's 'random' holds no state of PyTorch's generator on {device}: {e}"
                ) from e
        return found

    def load(self, states: list[torch.Tensor]) -> None:
        """Continues from what `read` returned."""
        if self.own:
            self._state = states
        else:
            _swap(states)

    def kept(self) -> Callable[[], None]:
        """Keeps where the stream is; what is returned puts it back there."""
        before = self._state

        def put_back() -> None:
            self._state = before

        return put_back

    @contextmanager
    def staying(self) -> Iterator[None]:
        """While entered, random operators draw from the stream, which then is where it was."""
        put_back = self.kept()
        try:
            with self:
                yield
        finally:
            put_back()

    def __enter__(self) -> None:
        if self.own:
            self._outside = _swap(self._state)

    def __exit__(self, *_: object) -> None:
        if not self.own:
            return
        before, self._state = self._state, _swap(self._outside)
        within_backward = torch._C._current_graph_task_id() != -1
        if within_backward and any(not torch.equal(a, b) for a, b in zip(before, self._state, strict=True)):
            raise CaptureError(
                "the module runs again within a backward pass, as torch.utils.checkpoint around it has it, and draws "
                "other random numbers than before, as each rank draws from a stream of its own: checkpoint layers "
                "within the model, not the module"
            )


def _devices() -> list[torch.device]:
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.device("cpu"), *([torch.device("cuda", torch.cuda.current_device())] if cuda else [])]


def _seeded(seed: int) -> list[torch.Tensor]:
    return [torch.Generator(d).manual_seed(seed % 2**63).get_state() for d in _devices()]


def _in_place() -> list[torch.Tensor]:
    """The states of PyTorch's own generators."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if len(_devices()) > 1 else [])]


def _swap(states: list[torch.Tensor]) -> list[torch.Tensor]:
    """Puts generator states in place; returns those that were there."""
    before = [torch.get_rng_state()]
    torch.set_rng_state(states[0])
    if len(states) > 1:
        before.append(torch.cuda.get_rng_state())
        torch.cuda.set_rng_state(states[1])
    return before


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.cpu().numpy().tobytes())).decode()


def _tensor(text: str) -> torch.Tensor:
    try:
        return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
    except ValueError as e:
        raise SpecError(f"the checkpoint's 'random' holds text that is no state of a generator: {e}") from e


def _is_of_one_rank(saved: object) -> bool:
    return isinstance(saved, (list, tuple)) and all(isinstance(s, torch.Tensor) for s in saved)


def _streams(saved: object) -> list[list[str]]:
    """The saved streams, by rank."""
    if isinstance(saved, (list, tuple)):
        if _is_of_one_rank(saved):
            if any(s.dtype != torch.uint8 for s in saved):
                raise SpecError("the checkpoint's 'random' holds tensors that are no states of generators (uint8)")
            return [[_text(s) for s in saved]] if saved else []
        if all(isinstance(s, (list, tuple)) and s and all(isinstance(t, str) for t in s) for s in saved):
            return [list(s) for s in saved]
    raise SpecError(
        f"the checkpoint's 'random' is a {type(saved).__name__} that holds no random streams; expected the list, by "
        "rank, that program.state_dict() makes"
    )


def _digest(streams: list[list[str]], rank: int, world_size: int) -> int:
    """A seed from all streams and the rank."""
    said = "\n".join(text for stream in streams for text in stream) + f"\nrank {rank} of {world_size}"
    return int.from_bytes(hashlib.sha256(said.encode()).digest()[:8], "big")
