"""Ranks that are forked do what those that are started by themselves do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from autopar.lab import Job, JobFailed, JobTimeout, Lab, launch, this_machine, unavailable_reason
from autopar.lab.forks import Module, can_fork
from autopar.lab.host import Host
from tests.lab.left import ROOT, await_true, environment, runs

pytestmark = pytest.mark.skipif(not can_fork(), reason="ranks are forked on Linux alone")


def _module(what: str) -> Module:
    return Module("tests.lab.forked", (what,))


def _two(what: str) -> Job:
    return Job([this_machine()] * 2, _module(what))


def test_each_answers_for_itself() -> None:
    with Job([this_machine()] * 3, _module("answer")) as job:
        for number in range(2):
            answers = job.ask({"number": number}, 60)
            hashes = [answer.pop("hash") for answer in answers]
            assert answers == [{"rank": str(r), "asked": {"number": number}, "forked": True} for r in range(3)]
            assert hashes[0] == hashes[2] != hashes[1]  # as under torchrun, an order of sets is not that of all ranks
        assert job.wait(60) == ["", "", ""]


def test_ranks_that_leave_without_an_answer_are_named() -> None:
    with _two("leave") as job, pytest.raises(JobFailed, match=r"ranks \[.*\] ended without an answer"):
        job.ask({}, 60)


@pytest.mark.parametrize("forked", [True, False])
def test_they_run_on_their_hosts(forked: bool) -> None:
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    core = min(os.sched_getaffinity(0))
    with Lab(rates_bps=[None, None]) as lab:
        hosts = [Host(h.name, h.namespace, h.address, h.interface, (core,)) for h in lab.hosts]
        source = "from tests.lab.forked import main; main()"
        with Job(hosts, _module("say") if forked else [sys.executable, "-c", source, "say"]) as job:
            said = job.wait(60)
            printed = "" if forked else "hello\n"  # as it is imported
            assert said == [f"{printed}rank {r} of 2 ['eth0', 'lo']\n" for r in range(2)]
            assert {job.output(r, "stderr").read_text() for r in range(2)} == {"['eth0', 'lo']\ncores 1 leads True\n"}


@pytest.mark.parametrize(("what", "said"), [("raise", "status 1:.*ValueError: not today"), ("die", "status -9")])
def test_the_one_that_fails_is_named_and_none_is_left(what: str, said: str) -> None:
    with _two(what) as job:
        with pytest.raises(JobFailed, match=f"(?s)^rank 1 .*{said}"):
            job.wait(60)
        await_true(lambda: not any(runs(r.pid) for r in job._ranks if r.pid), "a rank is left")


def test_one_that_is_late_says_where_it_is() -> None:
    with _two("sleep") as job, pytest.raises(JobTimeout, match=r"(?s)ranks \[0, 1\] were not done.*forked\.py"):
        job.wait(3)


def test_a_module_that_cannot_be_imported_is_told_of() -> None:
    with (
        _two("cannot be imported") as job,
        pytest.raises(JobFailed, match=r"(?s)^rank [01].*ImportError: no such luck"),
    ):
        job.wait(60)


def test_when_the_template_is_killed_all_end() -> None:
    with _two("answer") as job:
        job.ask({}, 60)
        pids = [r.pid for r in job._ranks if r.pid]
        job._templates[1].process.kill()
        with pytest.raises(JobFailed, match="status -9"):
            job.wait(60)
        assert len(pids) == 2
        await_true(lambda: not any(map(runs, pids)), "a rank is left")


def test_a_process_without_standard_streams_may_have_ranks() -> None:
    source = (
        "import os\nfrom autopar.lab import Job, this_machine\nfrom autopar.lab.forks import Module\n"
        "for fd in (0, 1):\n    os.close(fd)\n"
        "with Job([this_machine()] * 2, Module('tests.lab.forked', ('answer',))) as job:\n"
        "    os.write(2, str([a['rank'] for a in job.ask({}, 60)]).encode())\n"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, env=environment())
    assert done.stderr == "['0', '1']", done.stderr


def test_launch_takes_a_module() -> None:
    assert launch([this_machine()], _module("say"), timeout_s=60)[0].startswith("rank 0 of 1")
