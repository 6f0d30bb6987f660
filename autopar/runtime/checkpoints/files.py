"""A checkpoint's files: written by one rank each, checked before anything of them is used, and read part by part.

Nothing is unpickled, and no file is opened but regular ones in the checkpoint's own folder whose size and checksum are
those of the index. Elements are read through mapped memory, straight to where they belong.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from autopar.errors import SpecError
from autopar.runtime.checkpoints.boxes import Box, common, covered, elements_of, size_of, whole, within
from autopar.runtime.checkpoints.pieces import Piece, whole_piece
from autopar.spec.checkpoint import INDEX, OF_STATE, PER_RANK, CheckpointIndex, StoredFile, StoredPart, StoredTensor
from autopar.spec.files import read_file

_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in vars(torch).values()
    if isinstance(d, torch.dtype) and not str(d).removeprefix("torch.").startswith("q")
}
_AS_THEY_ARE = frozenset(
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool".split()  # noqa: SIM905
)
"""Dtypes that all versions of safetensors know; tensors of others are written as their bytes, flat."""


def write_part(piece: Piece, box: Box) -> torch.Tensor:
    """Elements of a piece as a file holds them: on the CPU, in the order of their indices."""
    part = piece.tensor.detach()[within(piece.box, box)].cpu().contiguous()
    if str(part.dtype).removeprefix("torch.") in _AS_THEY_ARE:
        return part
    return part.reshape(-1).view(torch.uint8)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> StoredFile:
    """Writes a safetensors file that survives a loss of power. Raises `SpecError` where that cannot be done."""
    try:
        with path.open("xb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        save_file(_apart(tensors), path, metadata={"format": "pt"})
        path.chmod(mode)  # some versions of safetensors leave the file to its owner alone
        with path.open("rb") as file:
            os.fsync(file.fileno())
        size, crc = _sum_of(path)
    except (OSError, RuntimeError, SafetensorError) as e:
        raise SpecError(f"{path}: cannot write the file: {_reason(e)}") from e
    return StoredFile(name=path.name, bytes=size, crc32=crc)


def sync_folder(folder: Path) -> None:
    """Has the disk keep the names of the files in a folder."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError:  # not every file system can
        pass
    finally:
        os.close(handle)


class Stored:
    """A checkpoint on disk, opened to be read."""

    def __init__(self, folder: str | Path) -> None:
        """Reads the index. Raises `SpecError` where there is none, or none that can be used."""
        self.folder = Path(folder)
        path = self.folder / INDEX
        if not self.folder.is_dir():
            raise SpecError(f"{self.folder}: no such folder, so there is no checkpoint in it; {_SHARED}")
        if not path.exists() and not path.is_symlink():
            raise SpecError(
                f"{self.folder}: no checkpoint is in this folder, for it has no {INDEX}: program.save(folder) writes "
                f"it when all files are complete; {_SHARED}"
            )
        check_regular(path)
        text = read_file(path, CheckpointIndex.noun, CheckpointIndex.MAX_BYTES)
        self.index = CheckpointIndex.loads(text, str(path))
        self.reader: tuple[int, int] | None = None
        """The rank that reads, and of how many; `None` in one process that is none."""
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        for name, tensor in self.index.tensors.items():
            if tensor.dtype not in _DTYPES:
                raise SpecError(f"{path}: tensors['{name}'].dtype: this PyTorch has no dtype '{tensor.dtype}'")

    def check_files(self, rank: int = 0, world_size: int = 1) -> None:
        """Raises `SpecError` where files are missing or not those that were written. Sizes are looked at by each rank,
        contents by one."""
        parts: dict[int, list[tuple[StoredTensor, StoredPart]]] = {}
        for tensor in self.index.tensors.values():
            for part in tensor.parts:
                parts.setdefault(part.file, []).append((tensor, part))
        for i, file in enumerate(self.index.files):
            path = self.folder / file.name
            size = check_regular(path)
            if size != file.bytes:
                raise SpecError(f"{path}: has {size} bytes, expected {file.bytes}: it is truncated or another file")
            if i % world_size != rank:
                continue
            if _sum_of(path)[1] != file.crc32:
                raise SpecError(f"{path}: its checksum is not the index's: the file was altered or damaged")
            with self._open(i) as get:
                for tensor, part in parts.get(i, []):
                    get(tensor, part)

    def tensor(self, name: str) -> StoredTensor:
        if name not in self.index.tensors:
            raise SpecError(f"{self.folder / INDEX}: tensors has no '{name[:200]}', which is used as a value")
        return self.index.tensors[name]

    def stand_in(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        """A tensor of the same shape and dtype, to be looked at; it has memory for one element."""
        found = self.tensor(name)
        self._check_value(name, found)
        return torch.zeros((), dtype=_DTYPES[found.dtype], device=device).expand(found.shape)

    def whole(self, name: str) -> torch.Tensor:
        """A tensor, all of it."""
        found = self.tensor(name)
        self._check_value(name, found)
        made = torch.zeros(found.shape, dtype=_DTYPES[found.dtype])
        if not name.startswith(OF_STATE):
            self.check_holds(name, whole(found.shape))
        self.read_into([whole_piece(name, made)])
        return made

    def check_holds(self, name: str, box: Box) -> None:
        """Raises `SpecError` unless the files hold all of these elements of a tensor."""
        if not covered(box, (_box(p) for p in self.tensor(name).parts)):
            raise SpecError(f"{self.folder / INDEX}: tensors['{name}'].parts: they do not hold all elements")

    def holds_own(self, pieces: Iterable[Piece], rank: int, world_size: int) -> bool:
        """Whether as many ranks wrote the checkpoint, and what this one wrote of a tensor is these pieces of it."""
        pieces = list(pieces)
        if self.index.world_size != world_size:
            return False
        own = [_box(p) for p in self.tensor(pieces[0].name).parts if p.rank == rank]
        same = sum(map(elements_of, own)) == sum(elements_of(p.box) for p in pieces)
        return same and all(covered(p.box, own) for p in pieces)

    def read_into(self, pieces: Iterable[Piece], rank: int | None = None) -> None:
        """Reads the elements of pieces into their tensors, file by file. `rank`: what this rank wrote alone."""
        pieces = list(pieces)
        for piece in pieces if rank is None else ():
            if self.tensor(piece.name).layout == "Replicas":
                self._read_replica(piece)
        pieces = [p for p in pieces if rank is not None or self.tensor(p.name).layout != "Replicas"]
        reads = [
            (part.file, found, part, piece, shared)
            for piece in pieces
            for found in [self.tensor(piece.name)]
            for part in found.parts
            if rank is None or part.rank == rank
            if (shared := common(_box(part), piece.box)) is not None
        ]
        for file, of_file in itertools.groupby(sorted(reads, key=lambda r: r[0]), key=lambda r: r[0]):
            with self._open(file) as get, torch.no_grad():
                for _, found, part, piece, shared in of_file:
                    source = get(found, part)[within(_box(part), shared)]
                    piece.tensor.detach()[within(piece.box, shared)].copy_(source)

    def read_sum(self, piece: Piece, share: float) -> None:
        """Reads a share of the sum of what all ranks wrote."""
        total = torch.zeros(size_of(piece.box), dtype=torch.complex128 if piece.tensor.is_complex() else torch.float64)
        found = self.tensor(piece.name)
        for part in found.parts:
            if (shared := common(_box(part), piece.box)) is not None:
                with self._open(part.file) as get:
                    total[within(piece.box, shared)] += get(found, part)[within(_box(part), shared)]
        piece.tensor.detach().copy_(total * share)

    def sum_of(self, name: str) -> torch.Tensor:
        """The sum of what all ranks wrote of a tensor."""
        found = self.tensor(name)
        made = torch.empty(found.shape, dtype=_DTYPES[found.dtype])
        self.read_sum(whole_piece(name, made, "summed"), 1.0)
        return made

    def _read_replica(self, piece: Piece) -> None:
        """This rank's own replica, where it has one still and as many ranks wrote; else the mean."""
        if piece.over == "averaged" and self.reader is not None and self.reader[1] == self.index.world_size:
            self.read_into([piece], self.reader[0])
        else:
            self.read_sum(piece, 1 / len({part.rank for part in self.tensor(piece.name).parts}))

    def _check_value(self, name: str, found: StoredTensor) -> None:
        if found.layout in PER_RANK:
            raise SpecError(f"{self.folder / INDEX}: '{name}' is a value, but its layout is {found.layout}")

    def _open(self, file: int) -> _OpenFile:
        return _OpenFile(self.folder / self.index.files[file].name)


_SHARED = "all ranks must see one and the same folder, on a disk that their hosts share (NFS, say)"

Get = Callable[[StoredTensor, StoredPart], torch.Tensor]


class _OpenFile:
    """While it is entered, gives parts of tensors out of a safetensors file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: Any = None

    def __enter__(self) -> Get:
        check_regular(self._path)
        try:
            self._open = safe_open(self._path, framework="pt").__enter__()  # type: ignore[no-untyped-call]
        except (OSError, SafetensorError) as e:
            raise SpecError(f"{self._path}: no safetensors file: {_reason(e)}") from e
        return self._get

    def __exit__(self, *_: object) -> None:
        self._open.__exit__(None, None, None)

    def _get(self, tensor: StoredTensor, part: StoredPart) -> torch.Tensor:
        shape, dtype = size_of(_box(part)), _DTYPES[tensor.dtype]
        try:
            found = self._open.get_tensor(part.key)
            if tensor.dtype not in _AS_THEY_ARE:
                found = found.clone().view(dtype).view(shape)
        except (OSError, SafetensorError, RuntimeError) as e:
            raise SpecError(f"{self._path}: cannot read '{part.key[:200]}': {_reason(e)}") from e
        if found.shape != shape or found.dtype != dtype:
            raise SpecError(
                f"{self._path}: '{part.key[:200]}' is {found.dtype} of shape {tuple(found.shape)}, expected {dtype} of "
                f"shape {shape}, as the index says"
            )
        return found  # type: ignore[no-any-return]


def _box(part: StoredPart) -> Box:
    return tuple(range(*r) for r in part.box)


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, with copies of those that share memory with others or lie in a larger one's, as safetensors wants
    them."""
    found, seen = {}, set[int]()
    for key, tensor in tensors.items():
        alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize and tensor.data_ptr() not in seen
        seen.add(tensor.data_ptr())
        found[key] = tensor if alone else tensor.clone()
    return found


def check_regular(path: Path) -> int:
    """A file's size; raises `SpecError` where it is missing, a link or no file."""
    try:
        found = path.lstat()
    except OSError as e:
        raise SpecError(f"{path}: cannot read this file of the checkpoint: {_reason(e)}; {_SHARED}") from e
    if not stat.S_ISREG(found.st_mode):
        kind = "a link" if stat.S_ISLNK(found.st_mode) else "no regular file"
        raise SpecError(f"{path}: is {kind}; the files of a checkpoint must lie in its own folder")
    return found.st_size


def _sum_of(path: Path) -> tuple[int, int]:
    """A file's size and checksum."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error)
