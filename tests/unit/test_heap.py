"""Freed memory stays with the process from one step to the next."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, torch
from autopar.runtime.heap import keep_freed_memory

def step():
    held = [torch.ones(300_000) for _ in range(20)]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

step()
print(faults())
keep_freed_memory()
step()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heap learns from what is freed")
def test_a_step_faults_no_memory_in_that_the_last_one_has_freed() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before > 2_000 and after < 500, "pages of 4 KiB, in ten steps of 24 MB"
