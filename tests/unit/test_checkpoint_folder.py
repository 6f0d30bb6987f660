"""Checkpoints on disk in one process: as `state_dict` has them, for all tensors, and refused where damaged."""

from __future__ import annotations

import copy
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import autopar
from autopar.errors import SpecError
from autopar.runtime.checkpoints.pieces import whole_piece
from autopar.runtime.program import Program
from tests.gloo.checkpoints import same
from tests.unit.test_checkpoint import KINDS, Counting, Net, adamw, program_for, trained

optim = torch.optim


@pytest.mark.parametrize("name", ["Adagrad", "Adafactor"])
def test_a_folder_holds_what_the_state_dict_holds(name: str, tmp_path: Path) -> None:
    program, again = (program_for(KINDS[name]) for _ in range(2))
    trained(program, range(2))
    program.save(tmp_path)
    state = copy.deepcopy(program.state_dict())
    assert same(autopar.load_checkpoint(tmp_path), state)
    losses = trained(program, range(2, 4))
    again.load(tmp_path)
    assert same(again.state_dict(), state)
    assert trained(again, range(2, 4)) == losses


def test_a_fresh_checkpoint_forgets_the_moments(tmp_path: Path) -> None:
    program_for().save(tmp_path)
    program = program_for()
    trained(program, range(1))
    program.load(tmp_path)
    assert not any(program.optimizer.state.values())


def test_tied_parameters_are_written_once_and_read_as_one(tmp_path: Path) -> None:
    program_for().save(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["model"]["last.weight"] == index["model"]["first.weight"] == {"tensor": "model.first.weight"}
    model = autopar.load_checkpoint(tmp_path)["model"]
    assert model["last.weight"] is model["first.weight"]


def test_settings_that_json_does_not_have_and_states_that_are_no_tensors(tmp_path: Path) -> None:
    def made() -> Program:
        def optimizer(m: nn.Module) -> optim.Optimizer:
            groups = [{"params": m.parameters(), "note": {"a": float("inf"), "b": b"\x00"}}]
            return Counting(groups, lr=torch.tensor(0.1), momentum=0.9)

        return program_for(optimizer, optimizer_acts_on="element")

    first, again = made(), made()
    trained(first, range(2))
    first.optimizer.param_groups[0]["lr"].mul_(0.5)
    first.save(tmp_path)
    again.load(tmp_path)
    settings = again.optimizer.param_groups[0]
    assert settings["note"] == {"a": float("inf"), "b": b"\x00"}
    assert settings["lr"] == torch.tensor(0.05)
    seen = [s["seen"] for s in again.optimizer.state.values() if "seen" in s]
    assert seen and set(seen) == {(2, "some")}


def test_what_a_folder_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    program = program_for()
    program.optimizer.param_groups[0]["strange"] = object()
    with pytest.raises(
        SpecError, match=r"optimizer\.groups\.0\.strange is a object, which a checkpoint on disk cannot"
    ):
        program.save(tmp_path / "new")
    assert not (tmp_path / "new" / "index.json").exists()


class Hooked(Net):
    """Keeps what is no parameter and no buffer, renames one, and stores another one's opposite."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"words": ["a"], "sizes": (1, 2)}
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("unsaved", torch.zeros(4), persistent=False)
        self.register_state_dict_post_hook(_renamed)
        self.register_load_state_dict_pre_hook(_named_again)
        self.loaded = 0

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def _renamed(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state["factor"] = state.pop("scale")
    state["shift"] = -state["shift"]


def _named_again(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    state["scale"] = state.pop("factor")
    state["shift"] = -state["shift"]


def test_a_models_hooks_are_followed(tmp_path: Path) -> None:
    first, again = (program_for(model=Hooked()) for _ in range(2))
    assert isinstance(first.model, Hooked) and isinstance(again.model, Hooked)
    trained(first, range(2))
    first.model.seen, first.model.shift = {"words": ["b"], "sizes": (3,)}, torch.full((4,), 2.0)
    first.save(tmp_path)
    assert same(autopar.load_checkpoint(tmp_path), first.state_dict())
    again.load(tmp_path)
    assert again.model.seen == first.model.seen and same(again.state_dict(), first.state_dict())
    assert again.model.get_buffer("shift").tolist() == [2.0] * 4


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e4m3fn, torch.bfloat16, torch.bool, torch.uint16])
def test_tensors_of_all_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.tensor([[1, 0, 3], [4, 5, 0]]).to(dtype)
    program = program_for()
    pieces = [whole_piece("state.a", value.clone()), whole_piece("state.b", value[0, 0].clone())]
    program._lasting.states.pieces = lambda stopped=(): pieces  # type: ignore[method-assign]
    program.save(tmp_path)
    for piece in pieces:
        piece.tensor.zero_()
    program.load(tmp_path)
    assert torch.equal(pieces[0].tensor.to(torch.complex64), value.to(torch.complex64))
    assert torch.equal(pieces[1].tensor.to(torch.complex64), value[0, 0].to(torch.complex64))


def test_an_old_checkpoint_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    program = program_for()
    program.save(tmp_path)
    old = {p.name for p in tmp_path.iterdir()}
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    (tmp_path / "0123456789ab-00000-00000.safetensors").write_bytes(b"of a save that was killed")
    program.save(tmp_path)
    assert len({p.stat().st_mode for p in tmp_path.iterdir()}) == 1
    names = {p.name for p in tmp_path.iterdir()}
    assert names & old == {"index.json"}
    assert len(names) == 4 and {"notes.txt", "model.safetensors"} < names


@pytest.fixture(scope="module")
def program() -> Program:
    made = program_for()
    trained(made, range(2))
    return made


@pytest.fixture(scope="module")
def saved(program: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    program.save(folder)
    return folder


Change = Callable[[dict[str, Any]], Any]


def _part(index: dict[str, Any], name: str = "model.first.weight") -> dict[str, Any]:
    return index["tensors"][name]["parts"][0]  # type: ignore[no-any-return]


def _moment(index: dict[str, Any]) -> dict[str, Any]:
    return index["optimizer"]["state"]["first.bias"]  # type: ignore[no-any-return]


INDEXES: dict[str, tuple[Change, str]] = {
    "a file above the folder": (lambda i: i["files"][0].update(name="../secret.safetensors"), "no name that autopar"),
    "an absolute path": (lambda i: i["files"][0].update(name="/etc/passwd"), "no name that autopar gives a file"),
    "a file that is not there": (
        lambda i: i["files"][0].update(name="0123456789ab-00000-00000.safetensors"),
        "cannot read this file of the checkpoint: No such file",
    ),
    "another size": (lambda i: i["files"][0].update(bytes=3), "expected 3: it is truncated or another file"),
    "another checksum": (lambda i: i["files"][0].update(crc32=3), "altered or damaged"),
    "a file of no number": (lambda i: _part(i).update(file=7), "file: 7, but there are 1 files"),
    "a rank of no number": (lambda i: _part(i).update(rank=7), "rank: 7, but 1 ranks wrote"),
    "2^62 rows": (lambda i: i["tensors"]["model.first.weight"].update(shape=[2**62, 2**62]), "too many elements"),
    "rows that no file has": (
        lambda i: i["tensors"]["model.first.weight"].update(shape=[10**12, 4]),
        "hold 16 of 4000000000000 elements",
    ),
    "another shape": (
        lambda i: (
            i["tensors"]["model.first.weight"].update(shape=[2, 8]),
            _part(i).update(box=[[0, 2, 1], [0, 8, 1]]),
        ),
        r"expected torch.float32 of shape \(2, 8\), as the index says",
    ),
    "a box outside": (lambda i: _part(i).update(box=[[0, 4, 1], [1, 5, 1]]), r"does not lie within \[4, 4\]"),
    "a box of one dimension": (lambda i: _part(i).update(box=[[0, 4, 1]]), "does not lie within"),
    "a box without elements": (lambda i: _part(i).update(box=[[0, 4, 1], [2, 2, 1]]), "does not lie within"),
    "a box that goes back": (lambda i: _part(i).update(box=[[0, 4, 1], [3, 0, -1]]), "greater than or equal to 0"),
    "a step of 0": (lambda i: _part(i).update(box=[[0, 4, 1], [0, 4, 0]]), "does not lie within"),
    "a part twice": (lambda i: i["tensors"]["model.scale"]["parts"].append(_part(i, "model.scale")), "named twice"),
    "another dtype": (lambda i: i["tensors"]["model.first.weight"].update(dtype="float16"), "expected torch.float16"),
    "no dtype": (lambda i: i["tensors"]["model.first.weight"].update(dtype="load"), "no dtype 'load'"),
    "a quantized dtype": (lambda i: i["tensors"]["model.first.weight"].update(dtype="qint8"), "no dtype 'qint8'"),
    "a tensor of no name": (lambda i: i["model"].update(scale={"tensor": "x"}), "tensors has no 'x'"),
    "a value of no kind": (lambda i: i["model"].update(scale={"pickle": "x"}), "no value that program.save writes"),
    "no tensor": (lambda i: i["model"].update(scale=3), "has a int for 'scale'; expected a tensor"),
    "a tensor that is missing": (lambda i: i["model"].pop("scale"), 'Missing key.* "scale"'),
    "a tensor of another shape": (
        lambda i: i["model"].update(scale={"tensor": "model.first.weight"}),
        r"has shape \(4, 4\) for 'scale'; expected \(1,\)",
    ),
    "a value of each rank's own": (
        lambda i: i["tensors"]["model.scale"].update(layout="Partial"),
        "'model.scale' is a value, but its layout is Partial",
    ),
    "no moment": (lambda i: _moment(i).pop("exp_avg"), "state of 'first.bias' has no 'exp_avg'"),
    "a moment's shape": (
        lambda i: _moment(i).update(exp_avg={"tensor": "model.first.weight"}),
        r"'first.bias' has, as 'exp_avg', .* \(4, 4\); expected \(4,\)",
    ),
    "another optimizer": (
        lambda i: i["optimizer"].update(
            state={},
            groups=[{**i["optimizer"]["groups"][0], "settings": {"lr": 0.1, "momentum": 0.0, "nesterov": False}}],
        ),
        "it is not of AdamW",
    ),
    "a state of no parameter": (
        lambda i: i["optimizer"]["state"].update(first_bias=i["optimizer"]["state"].pop("first.bias")),
        "'first_bias' is in none of the optimizer's groups",
    ),
    "no groups": (lambda i: i["optimizer"].update(groups=[], state={}), "has groups of no parameters, this one of 6"),
    "a random stream": (lambda i: i.update(random=[["AAAA"]]), "'random' holds no state"),
    "another version": (lambda i: i.update(schema_version=2), "schema version 2, this autopar reads version 1"),
    "a field too many": (lambda i: i.update(pickled="gASV"), "pickled is not a field"),
    "a field too few": (lambda i: i.pop("tensors"), "tensors"),
}


def altered(folder: Path, change: Change) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("what", INDEXES)
def test_an_index_that_cannot_be_used(program: Program, saved: Path, what: str, tmp_path: Path) -> None:
    change, said = INDEXES[what]
    folder = shutil.copytree(saved, tmp_path / "checkpoint")
    altered(folder, change)
    _is_refused(program, folder, said)


def _is_refused(program: Program, folder: Path, said: str) -> None:
    before = copy.deepcopy(program.state_dict())
    with pytest.raises(SpecError, match=said):
        program.load(folder)
    assert same(program.state_dict(), before)


TEXTS = {
    "nothing": ("", "not JSON"),
    "half of it": ('{"schema_version": 1, "mod', "not JSON"),
    "deep": ("[" * 100_000, "not JSON"),
    "deep values": ('{"schema_version": 1, "model": {"a": ' + '{"tuple": [' * 900 + "]}" * 900 + "}}", "index.json"),
    "a number of 5,000 digits": ('{"schema_version": 1, "steps": ' + "9" * 5000 + "}", "is too large"),
    "a list": ("[]", "is a JSON object, this is a list"),
    "bytes": ("\x80\x04", "not JSON"),
}


@pytest.mark.parametrize("what", TEXTS)
def test_an_index_that_is_none(program: Program, what: str, tmp_path: Path) -> None:
    text, said = TEXTS[what]
    (tmp_path / "index.json").write_text(text)
    _is_refused(program, tmp_path, said)


def _file(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def _linked(folder: Path, name: str = "") -> None:
    path = folder / name if name else _file(folder)
    outside = folder.parent / f"{folder.name}-outside"
    path.rename(outside)
    path.symlink_to(outside)


def _pipe(folder: Path) -> None:
    path = _file(folder)
    path.unlink()
    os.mkfifo(path)


def _rewritten(folder: Path, data: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Another file, with the right size and checksum in the index."""
    path = _file(folder)
    tensors = {k: v.clone() for k, v in load_file(path).items()}
    found = data(tensors)
    if isinstance(found, bytes):
        path.write_bytes(found)
    else:
        save_file(tensors, path)
    raw = path.read_bytes()
    altered(folder, lambda i: i["files"][0].update(bytes=len(raw), crc32=zlib.crc32(raw)))


def _with_a_hole(folder: Path) -> None:
    """As many elements as there are, but some of them twice."""
    half = torch.ones(2, 4)
    _rewritten(folder, lambda t: t.update({"model.first.weight": half, "x": half.clone()}))

    def change(index: dict[str, Any]) -> None:
        part = {**_part(index), "box": [[0, 2, 1], [0, 4, 1]]}
        index["tensors"]["model.first.weight"]["parts"] = [part, {**part, "key": "x"}]

    altered(folder, change)


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda f: os.truncate(_file(f), 100), "has 100 bytes, expected"),
    "removed": (lambda f: _file(f).unlink(), "No such file"),
    "a link": (_linked, "is a link; the files of a checkpoint must lie in its own folder"),
    "an index that is a link": (lambda f: _linked(f, "index.json"), "is a link"),
    "a pipe": (_pipe, "is no regular file"),
    "a pickle": (lambda f: _rewritten(f, lambda _: b"\x80\x04\x95" * 40), "no safetensors file"),
    "a hole": (_with_a_hole, "do not hold all elements"),
    "without a tensor": (lambda f: _rewritten(f, lambda t: t.pop("model.scale") and None), "cannot read 'model.scale'"),
    "another shape": (
        lambda f: _rewritten(f, lambda t: t.update({"model.scale": torch.ones(2)})),
        r"'model.scale' is torch.float32 of shape \(2,\), expected torch.float32 of shape \(1,\)",
    ),
}


@pytest.mark.parametrize("what", FILES)
def test_files_that_cannot_be_used(program: Program, saved: Path, what: str, tmp_path: Path) -> None:
    change, said = FILES[what]
    folder = shutil.copytree(saved, tmp_path / "checkpoint")
    change(folder)
    _is_refused(program, folder, said)
    with pytest.raises(SpecError, match=said):
        autopar.load_checkpoint(folder)


def test_no_checkpoint(program: Program, tmp_path: Path) -> None:
    _is_refused(program, tmp_path, "no checkpoint is in this folder")
    _is_refused(program, tmp_path / "none", "no such folder")
    (tmp_path / "file").write_text("")
    _is_refused(program, tmp_path / "file", "no such folder")
    with pytest.raises(SpecError, match="cannot make the folder"):
        program.save(tmp_path / "file")


def test_an_index_that_is_a_link_is_not_written_through(program: Program, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    program.save(folder)
    _linked(folder, "index.json")
    outside = (tmp_path / "checkpoint-outside").read_text()
    with pytest.raises(SpecError, match="is a link"):
        program.save(folder)
    assert (tmp_path / "checkpoint-outside").read_text() == outside


def test_another_model_is_refused(program: Program, tmp_path: Path) -> None:
    program.save(tmp_path)
    model = nn.Sequential(nn.Linear(4, 4))
    _is_refused(program_for(adamw, model), tmp_path, "Missing key")
