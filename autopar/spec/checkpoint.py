"""The index of a checkpoint on disk: everything of it but the tensors' elements, as JSON.

A checkpoint is a folder with `index.json` and the safetensors files that the index names. A folder without an index
holds no checkpoint; files that the index does not name are no part of it.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from autopar.errors import SpecError
from autopar.spec.json_file import JsonFile, Record
from autopar.spec.units import shown

INDEX = "index.json"
FILE_NAME = re.compile(r"[0-9a-f]{12}-\d{5}-\d{5}\.safetensors")
"""Token of the checkpoint, rank, number of the rank's file."""
MAX_ELEMENTS = 2**62
OF_STATE = "state."
"""What the names of tensors begin with that strategies have kept; of a parameter of which only some slices are
synchronized by such a strategy, elements are missing."""

Count = Annotated[int, Field(ge=0, le=MAX_ELEMENTS)]
Layout = Literal["Replicate", "Shard", "Owned", "Partial", "Replicas", "Varying"]
"""How a tensor lay on the ranks that saved it. Of `Replicate`, `Shard` and `Owned`, the parts make up one value. Of
`Partial`, each rank's parts are a value of its own, and the sum over the ranks has a meaning; of `Replicas`, their mean
has; of `Varying`, each rank's value says nothing of the others'."""
PER_RANK = ("Partial", "Varying")


class StoredPart(Record):
    """Elements of a tensor that lie together in one file."""

    file: Count
    """Position in `CheckpointIndex.files`."""
    key: str
    """The tensor's name in the file."""
    box: tuple[tuple[Count, Count, Count], ...]
    """By dimension: start, stop and step of the indices, as Python's `range` has them."""
    rank: Count
    """The rank that wrote the part."""


class StoredTensor(Record):
    """A tensor, whole, and where its elements are."""

    shape: Annotated[tuple[Count, ...], Field(max_length=64)]
    dtype: Annotated[str, Field(max_length=64)]
    """PyTorch's name without `torch.`"""
    layout: Layout
    parts: tuple[StoredPart, ...]


class StoredFile(Record):
    """A safetensors file, in the index's folder."""

    name: Annotated[str, Field(max_length=64)]
    bytes: Count
    crc32: Annotated[int, Field(ge=0, lt=2**32)]


class StoredGroup(Record):
    """A parameter group of the optimizer."""

    parameters: tuple[str, ...]
    settings: dict[str, Any]


class StoredOptimizer(Record):
    """The optimizer: what is no tensor, and the names of what is."""

    kind: str
    """The class, with its module."""
    groups: tuple[StoredGroup, ...]
    state: dict[str, dict[str, Any]]
    """By parameter."""
    each: tuple[Count, ...] = ()
    """Of several optimizers, how many of the groups are whose; empty of one."""


class CheckpointIndex(JsonFile):
    """Where each tensor of a checkpoint lies, and the values that are no tensors.

    Such values stand as JSON has them; where JSON has no such value, as an object with one key that says what it is
    (`autopar.runtime.checkpoints.plain_values`): {"tensor": "model.fc.weight"}, {"tuple": [0.9, 0.999]}.
    """

    VERSION: ClassVar[int] = 1
    noun: ClassVar[str] = "checkpoint's index"
    COMMAND: ClassVar[str] = "program.save(folder)"
    MAX_BYTES: ClassVar[int] = 512 << 20

    schema_version: Literal[1] = 1
    autopar: str
    """Version that wrote the checkpoint; `torch` likewise."""
    torch: str
    world_size: Annotated[int, Field(ge=1, le=2**31)]
    steps: Count
    """Optimizer steps that the program had done."""
    versions: dict[str, dict[str, int | None]]
    """By "model" and "loss_fn": the versions of their modules, which PyTorch keeps beside a `state_dict()`."""
    model: dict[str, Any]
    """`model.state_dict()`."""
    loss_fn: dict[str, Any] | None
    optimizer: StoredOptimizer
    loss_scale: dict[str, float | int] | None = None
    """`GradScaler.state_dict()`, where the loss was scaled."""
    guard: str = ""
    """What a quality budget's guard has seen, as JSON; empty where there is none."""
    random: tuple[tuple[str, ...], ...]
    """By rank: the states of its generators, in base64."""
    tensors: dict[str, StoredTensor]
    files: tuple[StoredFile, ...]

    def check(self) -> None:
        missing = {"model", *(["loss_fn"] if self.loss_fn is not None else [])} - self.versions.keys()
        if missing:
            raise SpecError(f"versions: no '{min(missing)}' is there")
        for i, file in enumerate(self.files):
            if not FILE_NAME.fullmatch(file.name):
                raise SpecError(
                    f"files[{i}].name: {shown(file.name)} is no name that autopar gives a file of a checkpoint; the "
                    "files must lie in the checkpoint's own folder"
                )
        if len({f.name for f in self.files}) < len(self.files):
            raise SpecError("files: a name is given twice")
        strange = self.optimizer.state.keys() - {name for g in self.optimizer.groups for name in g.parameters}
        if strange:
            raise SpecError(f"optimizer.state: {shown(min(strange))} is in none of the optimizer's groups")
        seen = set[tuple[int, str]]()
        for name, tensor in self.tensors.items():
            self._check_tensor(f"tensors[{shown(name)}]", tensor, seen, is_state=name.startswith(OF_STATE))

    def _check_tensor(self, place: str, tensor: StoredTensor, seen: set[tuple[int, str]], is_state: bool) -> None:
        elements = math.prod(tensor.shape)
        if elements > MAX_ELEMENTS:
            raise SpecError(f"{place}.shape: {list(tensor.shape)} has too many elements for a tensor")
        held = 0
        for i, part in enumerate(tensor.parts):
            here = f"{place}.parts[{i}]"
            if part.file >= len(self.files):
                raise SpecError(f"{here}.file: {part.file}, but there are {len(self.files)} files")
            if part.rank >= self.world_size:
                raise SpecError(f"{here}.rank: {part.rank}, but {self.world_size} ranks wrote the checkpoint")
            if (part.file, part.key) in seen:
                raise SpecError(f"{here}: {shown(part.key)} of file {part.file} is named twice")
            seen.add((part.file, part.key))
            fits = len(part.box) == len(tensor.shape) and all(
                start < stop <= size and step >= 1
                for (start, stop, step), size in zip(part.box, tensor.shape, strict=True)
            )
            if not fits:
                raise SpecError(f"{here}.box: {shown(list(part.box))} does not lie within {list(tensor.shape)}")
            held += math.prod(len(range(*r)) for r in part.box)
        if held < elements and tensor.layout not in PER_RANK and not is_state:
            raise SpecError(f"{place}.parts: they hold {held} of {elements} elements")
