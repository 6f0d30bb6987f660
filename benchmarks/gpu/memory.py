"""The most that a step holds on the device, beside what its plan has predicted."""

from __future__ import annotations

import gc

import torch

import autopar
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.placed import cluster_of, moved
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.steps import MODELS, adamw, entry_of

WITHIN = 0.05
"""Of what is held; as `benchmarks.fidelity` has it for processors."""
STEPS = 3
MIB = 1 << 20


def fill(findings: Findings, setting: Setting) -> None:
    """A row for each model, with a fused optimizer, which makes no copies of parameters as it updates them."""
    for name in MODELS:
        try:
            predicted, held = _one(name, setting)
        except Exception as e:
            findings.row(f"{name}: memory of a step", f"not measured: {type(e).__name__}: {str(e).strip()[:300]}")
            findings.target(f"{name}: memory, predicted less held, of what is held", None, WITHIN)
            continue
        if held is None:
            findings.row(f"{name}: memory of a step", f"{predicted / MIB:.0f} MiB predicted; held: CUDA alone tells")
            continue
        off = predicted / held - 1
        findings.data[name] = {"predicted_bytes": predicted, "held_bytes": held}
        findings.row(
            f"{name}: memory of a step", f"{predicted / MIB:.0f} MiB predicted, {held / MIB:.0f} MiB held: {off:+.1%}"
        )
        findings.target(f"{name}: memory, predicted less held, of what is held", abs(off), WITHIN)


def _one(name: str, setting: Setting) -> tuple[int, int | None]:
    """Bytes that were predicted, and what was allocated at most in a step."""
    cuda = setting.device == "cuda"
    entry, samples = entry_of(name, setting.small)
    before = 0
    if cuda:
        torch.set_float32_matmul_precision("high")
        some = torch.ones(256, 256, device="cuda")
        (some @ some).sum().item()  # cuBLAS takes its workspace
        del some
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
    batch = moved(entry.batch(samples, 1), setting.device)
    model = entry.build().to(setting.device)
    program = autopar.optimize(
        model,
        cluster_of(1, setting.device),
        example_inputs=batch,
        loss_fn=entry.loss_fn,
        optimizer=adamw(model, fused=True),
        unused_parameters="freeze",
        time_budget_s=2.0,
        check="never",
    )
    assert program.plan.prediction is not None, "a plan that was searched for has a prediction"
    program.step(batch)
    if not cuda:
        return program.plan.prediction.peak_memory_bytes, None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        program.step(batch)
    torch.cuda.synchronize()
    return program.plan.prediction.peak_memory_bytes, torch.cuda.max_memory_allocated() - before
