"""A calibration of the device, and what it makes of predictions."""

from __future__ import annotations

import os
import tempfile
import time
from statistics import median
from typing import Any

import torch

import autopar
from autopar.spec.calibration import Calibration
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.placed import cluster_of, moved, synchronize
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.steps import MODELS, adamw, entry_of

BUDGET_S = 20.0
STEPS = 20
WITHIN = 0.25
"""Of the measured step, where operators were measured. [Not measured on a GPU yet.]"""


def fill(findings: Findings, setting: Setting) -> None:
    """What the device reaches, and a row for each model: predicted from data sheets, calibrated, and measured."""
    calibration = autopar.calibrate(cluster_of(1, setting.device), time_budget_s=BUDGET_S)
    (rates,) = calibration.devices
    findings.data["calibration"] = calibration.model_dump(mode="json")
    products = ", ".join(f"{dtype} {flops / 1e12:.1f} TFLOP/s" for dtype, flops in rates.flops_per_s.items())
    findings.row(
        f"calibration of {rates.kind} in {calibration.took_s} s",
        f"products: {products}; memory {rates.bytes_per_s / 1e9:.0f} GB/s; an operator starts in "
        f"{rates.start_s * 1e6:.1f} us",
    )
    with tempfile.TemporaryDirectory(prefix="autopar-gpu-") as folder:
        os.environ["AUTOPAR_CACHE"] = folder
        for name in list(MODELS)[:2]:
            try:
                _predictions(name, findings, setting, calibration)
            except Exception as e:
                findings.row(f"{name}: predicted step", f"not measured: {type(e).__name__}: {str(e).strip()[:300]}")


def _predictions(name: str, findings: Findings, setting: Setting, calibration: Calibration) -> None:
    torch.set_float32_matmul_precision("high")
    entry, samples = entry_of(name, setting.small)
    batch = moved(entry.batch(samples, 1), setting.device)
    ways: dict[str, dict[str, Any]] = {
        "data sheets": {},
        "calibration": {"calibration": calibration},
        "calibration and measured operators": {"calibration": calibration, "measure_compute": True},
    }
    said: dict[str, float] = {}
    for way, more in ways.items():
        model = entry.build().to(setting.device)
        program = autopar.optimize(
            model,
            cluster_of(1, setting.device),
            example_inputs=batch,
            loss_fn=entry.loss_fn,
            optimizer=adamw(model, fused=True),
            unused_parameters="freeze",
            time_budget_s=1.0,
            check="never",
            **more,
        )
        assert program.plan.prediction is not None, "a plan that was searched for has a prediction"
        said[way] = program.plan.prediction.step_time_s
    took_s = []
    for _ in range(4 if setting.small else STEPS):
        synchronize(setting.device)
        start = time.perf_counter()
        program.step(batch)
        synchronize(setting.device)
        took_s.append(time.perf_counter() - start)
    found_s = median(took_s[2:])
    findings.data[name] = {"predicted_s": said, "steps_s": took_s}
    words = ", ".join(f"{way} {seconds * 1e3:.2f} ms" for way, seconds in said.items())
    findings.row(f"{name}: predicted step", f"{words}; measured {found_s * 1e3:.2f} ms")
    if not setting.small:
        off = abs(said["calibration and measured operators"] / found_s - 1)
        findings.target(f"{name}: step predicted from measured operators, less measured", off, WITHIN)
