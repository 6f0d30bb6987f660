"""What ranks say when one of them disagrees, dies, or is late: who it was, soon, and with an exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from autopar.runtime.job.ports import held_port
from autopar.verification import IMPORTED_ONCE
from tests.gloo.ranks import WITHOUT_LOGS

RANKS = 3
SCRIPT = """
import os, signal, subprocess, sys, time
import torch
import torch.distributed as dist
from torch import nn
import autopar
from autopar import api
from autopar.planning import Planner
from autopar.runtime.checkpoints import save as checkpoint_save
from autopar.search import build_plan

torch.set_num_threads(1)
rank, n, trouble = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

if trouble == "never comes" and rank == 1:
    die()
if trouble == "dies as ranks connect" and rank == 1:
    dist.init_process_group = die
if trouble == "dies as a group connects" and rank == 1:
    dist.new_group = die
if trouble == "dies as rank 0 plans":
    plan_now = Planner.plan
    def plan_late(*args):
        time.sleep(8)
        return plan_now(*args)
    Planner.plan = plan_late
    api._make_equal = die if rank == 1 else lambda *args: None
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
if trouble == "models" and rank == 1:
    model = nn.Sequential(nn.Linear(8, 17), nn.ReLU(), nn.Linear(17, 4))
if trouble == "one freezes":
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
batch, loss_fn = (torch.randn(2, 8), torch.randn(2, 4)), nn.functional.mse_loss
if trouble in LEAVING:
    batch, loss_fn = (torch.randn(2, 8), torch.tensor([1, 2])), nn.functional.cross_entropy
plan = None
if trouble in ("plans", "models", *SHORT):  # on a loaded machine, planning takes longer than a short deadline
    name = "PartitionedPS" if trouble == "plans" and rank == 1 else "ddp"
    plan = autopar.plan(model, autopar.ClusterSpec.local(n), example_inputs=batch, loss_fn=loss_fn, strategy=name)
program = autopar.optimize(model, example_inputs=batch, loss_fn=loss_fn, plan=plan, strategy="ddp",
                           optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                           timeout_s=8.0 if trouble in SHORT else 60.0)
if trouble == "stands still" and rank == 1:
    subprocess.Popen(["sh", "-c", f"sleep 8; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
folder = os.path.join(os.path.dirname(sys.argv[0]), "checkpoint")
for step in range(4):
    if step == 1 and trouble == "dies as it saves":
        program.save(folder)
        saved = autopar.load_checkpoint(folder)["model"]
    if step == 2 and rank == 0:
        if trouble == "rank 0 freezes":
            os.kill(os.getpid(), signal.SIGSTOP)
        if trouble == "rank 0 dies":
            die()
        if trouble == "rank 0 raises":
            raise RuntimeError("the data ran out")
    if step == 2 and trouble in LEAVING and (rank == 1 or trouble == "all leave a step"):
        try:
            program.step((batch[0], torch.tensor([1, 9])))
        except IndexError:
            print("skips a batch", flush=True)
    if step == 2 and rank == 1:
        if trouble == "bad batch":
            try:
                program.step({"no": "tensors"})
            except autopar.errors.CaptureError as e:
                print(e, flush=True)
                time.sleep(17)
                sys.exit(1)
        if trouble == "one freezes":
            model[1].eval()
            for _ in range(2):
                try:
                    program.step(batch)
                except autopar.errors.CollectiveError as e:
                    print(e, flush=True)
            time.sleep(17)
            sys.exit(1)
        if trouble == "dies":
            die()
        if trouble == "dies as it saves":
            checkpoint_save.sync_folder = die  # its files are complete by then
        if trouble == "late":
            time.sleep(15)
        if trouble == "raises":
            raise RuntimeError("the data ran out")
    program.step(batch)
    if step == 2 and trouble == "dies as it saves":
        try:
            program.save(folder)
        finally:
            kept = autopar.load_checkpoint(folder)["model"]
            print("the old one stays:", all(torch.equal(saved[k], kept[k]) for k in kept), flush=True)
print("done", flush=True)
"""


STARTER = """
import importlib, json, os, runpy, signal, sys, time
from pathlib import Path

script, folder, imported, worlds, at_once = sys.argv[1:]
for module in json.loads(imported):
    importlib.import_module(module)


def rank_of(trouble, port, world_size):
    # A rank's process, forked, or None where all have ended; each is a program of its own in every other respect.
    ranks = {}
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
                              LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            output = os.open(f"{folder}/{trouble}-{rank}.txt", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            # On a loaded machine one process may begin seconds behind another: that is no rank that is late.
            Path(folder, f"{trouble}-{rank}.here").touch()
            while not all(Path(folder, f"{trouble}-{r}.here").exists() for r in range(world_size)):
                time.sleep(0.02)
            return rank
        ranks[pid] = rank
    ended = dict(os.wait() for _ in range(len(ranks) - (trouble == "rank 0 freezes")))
    for pid in ranks.keys() - ended.keys():
        os.kill(pid, signal.SIGKILL)
        ended[pid] = os.waitpid(pid, 0)[1]
    statuses = {ranks[pid]: os.waitstatus_to_exitcode(status) for pid, status in ended.items()}
    Path(folder, f"{trouble}.json").write_text(json.dumps([statuses[r] for r in sorted(statuses)]))
    os._exit(0)


for count, (trouble, world) in enumerate(json.loads(worlds).items()):
    if count >= int(at_once):
        os.wait()
    if os.fork() == 0 and rank_of(trouble, *world) is not None:
        sys.argv = [script, trouble]
        runpy.run_path(script, run_name="__main__")
        sys.exit()
for _ in range(int(at_once)):
    os.wait()
"""
# Others take their time to see that a rank is gone, so that several troubles are had at once.
AT_ONCE = 5
SHORT = ("late", "bad batch", "rank 0 freezes", "never comes", "dies as ranks connect")
DYING = ("dies as ranks connect", "dies as a group connects", "dies as rank 0 plans", "dies as it saves")
LEAVING = ("one leaves a step", "all leave a step")
OF_TWO = ("stands still", "bad batch", "one freezes", *LEAVING, "rank 0 freezes", "rank 0 dies", "rank 0 raises")
"""What two ranks can show."""
OF_RANK_0 = ("rank 0 freezes", "rank 0 dies", "rank 0 raises")
TROUBLES = (
    *DYING,  # what takes longest
    "none",
    "stands still",
    "plans",
    "models",
    "dies",
    "late",
    "raises",
    "bad batch",
    "one freezes",
    *LEAVING,
    "never comes",
    *OF_RANK_0,
)
Outcomes = dict[str, list[tuple[int, str]]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """By what is wrong: each rank's exit status, and what it wrote."""
    folder = tmp_path_factory.mktemp("failures")
    script = folder / "script.py"
    script.write_text(f"SHORT = {SHORT}\nLEAVING = {LEAVING}\n{SCRIPT}")
    with ExitStack() as held:
        worlds = {t: (held.enter_context(held_port()), 2 if t in OF_TWO else RANKS) for t in TROUBLES}
        told = [json.dumps(IMPORTED_ONCE), json.dumps(worlds), str(AT_ONCE)]
        starter = held.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", STARTER, str(script), str(folder), *told],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), **WITHOUT_LOGS},
                start_new_session=True,
            )
        )
        try:
            assert starter.wait(timeout=500) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(starter.pid, signal.SIGKILL)
    return {
        trouble: [
            (status, (folder / f"{trouble}-{rank}.txt").read_text())
            for rank, status in enumerate(json.loads((folder / f"{trouble}.json").read_text()))
        ]
        for trouble in TROUBLES
    }


def test_a_rank_that_skips_a_batch_in_the_middle_of_a_step_is_refused_and_named(outcomes: Outcomes) -> None:
    (_, waiting), (status, skipping) = outcomes["one leaves a step"]
    assert status == 1 and "skips a batch" in skipping and "left it by an error of its own (IndexError: " in skipping
    assert "step 2, rank 0: rank 1 has " in waiting, waiting


def test_a_rank_that_freezes_a_layer_alone_is_told_so_without_waiting(outcomes: Outcomes) -> None:
    (_, waiting), (status, freezing) = outcomes["one freezes"]
    assert status == 1 and "rank 1 has put the normalization layer '1', which has trained, into evaluation" in freezing
    assert "rank 0 has gone on without it" in freezing
    assert "End this process, so that the others end too" in freezing, "it cannot go on"
    assert "rank 1 has left this by an error of its own, which others did not have, and lives on" in waiting


def test_ranks_that_all_skip_a_batch_go_on(outcomes: Outcomes) -> None:
    assert [(status, "skips" in said, "done" in said) for status, said in outcomes["all leave a step"]] == [
        (0, True, True)
    ] * 2


def test_without_trouble_every_rank_ends_well(outcomes: Outcomes) -> None:
    assert outcomes["none"] == [(0, "done\n")] * RANKS


def test_a_rank_that_stands_still_for_a_while_is_waited_for(outcomes: Outcomes) -> None:
    """As one does whose Python threads wait for C code that reads a large file. DDP's other ranks wait, too."""
    assert outcomes["stands still"] == [(0, "done\n")] * 2


@pytest.mark.parametrize("trouble", ["plans", "models"])
def test_ranks_that_disagree_say_so_before_the_first_step(outcomes: Outcomes, trouble: str) -> None:
    for status, output in outcomes[trouble]:
        assert status not in (0, -9), output
        assert "Error" in output
        assert {"plans": "disagree about the plan", "models": "hold different models"}[trouble] in output


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("dies", "rank 1 is gone"),
        ("late", "rank 1 is late"),
        ("raises", "rank 1 has ended: its own output says why"),
        ("bad batch", "rank 1 is late"),
        ("never comes", "rank 1 never came"),
        *((trouble, "rank 1 is gone") for trouble in DYING),
    ],
)
def test_a_rank_that_is_gone_or_late_is_named_by_the_others(outcomes: Outcomes, trouble: str, said: str) -> None:
    for rank, (status, output) in enumerate(outcomes[trouble]):
        assert status != 0
        if rank != 1:
            assert "CollectiveError" in output, output
            assert said in output, output
    if trouble == "raises":
        assert "the data ran out" in outcomes[trouble][1][1]
        assert "CollectiveError" not in outcomes[trouble][1][1]


def test_a_rank_that_dies_as_it_saves_leaves_the_old_checkpoint(outcomes: Outcomes) -> None:
    for rank in (0, 2):
        assert "the old one stays: True" in outcomes["dies as it saves"][rank][1]


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("rank 0 freezes", "the process that serves the store (rank 0) does not answer: it is frozen, cut off or gone"),
        ("rank 0 dies", "the process that serves the store (rank 0) is gone"),
        ("rank 0 raises", "rank 0 has ended: its own output says why"),
    ],
)
def test_what_ends_with_the_store_is_named(outcomes: Outcomes, trouble: str, said: str) -> None:
    for status, output in outcomes[trouble][1:]:
        assert status != 0
        assert "CollectiveError" in output and said in output, output
    if trouble == "rank 0 raises":
        assert "is gone" not in "".join(output for _, output in outcomes[trouble])
