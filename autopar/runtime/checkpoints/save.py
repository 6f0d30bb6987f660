"""Checkpoints on disk: saved by all ranks together, each what it has.

Each rank writes files of its own, under names that no checkpoint had before. The index, which names all files, comes
last and replaces the old one in a single step; only then the old files go. So a folder holds the old checkpoint or the
new one, whenever a rank is killed or a disk is full.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from autopar.errors import SpecError
from autopar.runtime.checkpoints.content import Content, content_of, opened
from autopar.runtime.checkpoints.files import check_regular, sync_folder, write_part, write_tensors
from autopar.runtime.checkpoints.pieces import Piece
from autopar.runtime.checkpoints.sharing import FilePlan, offers_of, read_offers, share_out
from autopar.runtime.job.process_group import Group, average_buffers
from autopar.runtime.job.together import DISK_S, agreed, meet
from autopar.runtime.lasting import Lasting
from autopar.runtime.optimizers.joint_optimizer import each_of, group_counts
from autopar.spec.checkpoint import FILE_NAME, INDEX, CheckpointIndex, StoredFile, StoredGroup, StoredOptimizer

SAVE = "program.save(folder)"
NOT_SAVED = "cannot save the checkpoint, so what the folder held before stays"


def save(lasting: Lasting, folder: str | Path) -> None:
    """Writes a checkpoint; to be called by all ranks together. Raises `SpecError` on all ranks where one of them cannot
    write its part; what the folder held before is kept then."""
    target = Path(folder)
    meet(lasting.group, SAVE, "")
    average_buffers(lasting.buffers.values(), lasting.group)
    with opened(lasting) as spread:
        contents: list[Content] = []

        def offer() -> str:
            contents.append(content_of(lasting, spread))
            _make_folder(target)
            own = {
                "pieces": offers_of(contents[0].pieces),
                "state": contents[0].state,
                "random": lasting.random.state(),
            }
            return json.dumps({**own, "token": secrets.token_hex(6)})

        said = [json.loads(text) for text in _agreed(lasting.group, offer)]
        content = contents[0]
        files, tensors = share_out([read_offers(one["pieces"]) for one in said])
        paths = [target / f"{said[0]['token']}-{f.rank:05}-{f.number:05}.safetensors" for f in files]
        own = {path: file for path, file in zip(paths, files, strict=True) if file.rank == lasting.group.rank}
        try:
            written = _agreed(lasting.group, lambda: _write(own, content.pieces))
            _agreed(lasting.group, lambda: _finish(lasting, target, content, said, tensors, written))
        except SpecError:  # told by a rank, so no rank has put an index in place
            for path in own:
                with contextlib.suppress(OSError):
                    path.unlink()
            raise


def _agreed(group: Group, make: Callable[[], str]) -> list[str]:
    return agreed(group, SAVE, make, NOT_SAVED, "the checkpoint cannot be written", DISK_S)


def _make_folder(target: Path) -> None:
    try:
        target.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(target / INDEX):
            check_regular(target / INDEX)
    except (OSError, ValueError) as e:
        raise SpecError(f"{target}: cannot make the folder: {getattr(e, 'strerror', None) or e}") from e


def _write(files: Mapping[Path, FilePlan], pieces: Iterable[Piece]) -> str:
    """Writes the files of this rank; returns what the index says of them."""
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    written = []
    for path, file in files.items():
        tensors = {}
        for key, (name, box) in file.parts.items():
            piece = next(
                p for p in by_name[name] if all(b[0] in o and b[-1] in o for o, b in zip(p.box, box, strict=True))
            )
            tensors[key] = write_part(piece, box)
        written.append(write_tensors(path, tensors).model_dump())
    if files:
        sync_folder(next(iter(files)).parent)
    return json.dumps(written)


def _finish(
    lasting: Lasting,
    target: Path,
    content: Content,
    said: list[dict[str, Any]],
    tensors: dict[str, Any],
    written: list[str],
) -> str:
    """On rank 0, puts the index in place and removes the files that it does not name."""
    if lasting.group.rank:
        return ""
    files = tuple(StoredFile.model_validate(f) for text in written for f in json.loads(text))
    for rank, text in enumerate(written):
        for file in json.loads(text):
            path = target / file["name"]
            if not path.is_file() or path.stat().st_size != file["bytes"]:
                raise SpecError(
                    f"rank {rank} has written {path}, which rank 0 does not see: the folder must be on a disk that all "
                    "hosts share (NFS, say). Without one, write program.state_dict() on rank 0"
                )
    state: dict[str, dict[str, Any]] = {}
    for one in said:
        for name, values in one["state"].items():
            state[name] = {**values, **state.get(name, {})}
    kinds = [type(one) for one in each_of(lasting.optimizer)]
    index = CheckpointIndex(
        autopar=importlib.import_module("autopar").__version__,
        torch=str(torch.__version__),
        world_size=lasting.group.world_size,
        steps=lasting.steps,
        versions=content.versions,
        model=content.model,
        loss_fn=content.loss_fn,
        optimizer=StoredOptimizer(
            kind=" and ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds),
            groups=tuple(StoredGroup(**group) for group in content.groups),
            state=state,
            each=group_counts(lasting.optimizer),
        ),
        loss_scale=None if lasting.scaler is None else lasting.scaler.state_dict(),
        guard=lasting.watched().get("guard", ""),
        random=tuple(tuple(one["random"]) for one in said),
        tensors=tensors,
        files=files,
    )
    index.save(target / INDEX)
    named = {file.name for file in files}
    with contextlib.suppress(OSError):
        for path in target.iterdir():
            if FILE_NAME.fullmatch(path.name) and path.name not in named:
                path.unlink()
    return ""
