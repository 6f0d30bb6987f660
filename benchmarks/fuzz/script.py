"""A finding as a file that runs by itself."""

from __future__ import annotations

import json

from benchmarks.fuzz.case import Case
from benchmarks.fuzz.outcome import Outcome
from benchmarks.fuzz.source import render

_HARNESS = """

from contextlib import nullcontext

from autopar.ir.model_output import find_loss

ENTRY, STEPS, SAMPLES, SEED = {entry!r}, {steps}, {samples}, {data_seed}
EVENTS, CLIP, SCHEDULE, SUMS, EAGER = {events}, {clip}, {schedule!r}, {sums}, {eager}


def batches(step, rank):
    return [batch(n, SEED + 1000 * step + 100 * rank + 10 * i) for i, n in enumerate(SAMPLES[rank])]


def joined(parts):
    if isinstance(parts[0], dict):
        return {{k: torch.cat([p[k] for p in parts]) for k in parts[0]}}
    return tuple(joined([p[i] for p in parts]) for i in range(2))


def make():
    model = Model().train()
    loss = globals().get("loss_fn") or (Loss() if "Loss" in globals() else None)
    owners = [model, *([loss] if isinstance(loss, nn.Module) else [])]
    parameters = [p for o in owners for p in o.parameters() if p.requires_grad]
    return model, loss, parameters, make_optimizer(parameters)


def loss_of(model, loss, b):
    if {input_gradients}:
        b = joined([b])
        inputs = b if loss is None else b[0]
        asked = [t.requires_grad_() for t in inputs.values() if t.is_floating_point()]
        for t in asked:
            t.register_hook(lambda g: print("gradient of an input:", g.flatten()[:4].tolist()))
    return find_loss(model(**b) if loss is None else loss(model(**b[0]), b[1]))


def train(autopar_settings=None):
    globals().update(FIRST)
    torch.manual_seed(SEED)
    model, loss, parameters, optimizer = make()
    if autopar_settings is None and {unfused}:
        for group in optimizer.param_groups:
            group["fused"] = False  # PyTorch's is wrong here
    program, rank = None, 0
    if autopar_settings is not None:
        program, rank = started(model, loss, optimizer, **autopar_settings)
    schedule = eval(SCHEDULE, {{"torch": torch, "optimizer": optimizer}}) if SCHEDULE else None
    losses = []
    for step in range(STEPS):
        globals().update(model=model, loss=loss, optimizer=optimizer, program=program or model)
        for when, line in EVENTS:
            if when == step:
                with program.gathered() if ".data." in line and hasattr(program, "gathered") else nullcontext():
                    exec(line, globals())
        if program is not None and ENTRY != "module":
            mine = batches(step, rank)
            value = program.step(micro_batches=mine) if len(mine) > 1 else program.step(mine[0])
        else:
            ranks = range(len(SAMPLES)) if program is None else [rank]
            optimizer.zero_grad()
            value = loss_of(program or model, loss, joined([b for r in ranks for b in batches(step, r)]))
            if SUMS and program is None and ENTRY == 'module':
                value = value / len(SAMPLES)
            value.backward()
            if CLIP is not None:
                torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(float(value))
        if program is not None and hasattr(model, "drawn"):
            print(f"rank {{rank}} has drawn in step {{step}}:", model.drawn[:3].tolist())
    if program is not None and ENTRY != "module":
        with program.gathered():
            return losses, {{n: p.detach().clone() for n, p in model.named_parameters()}}, dict(model.named_buffers())
    return losses, {{n: p.detach().clone() for n, p in model.named_parameters()}}, dict(model.named_buffers())


def started(model, loss, optimizer, groups, recompute, late):
    import torch.distributed as dist

    import autopar
    from autopar.ir.batch import flatten, module_batch
    from autopar.ir.build import training_graph
    from autopar.training import Training
    from autopar.runtime.compiled import Settings
    from autopar.runtime.job.process_group import join
    from autopar.runtime.job.servers import serve_here
    from autopar.testing.cases import SERVERS, cluster_of

    world, rank = len(SAMPLES), 0
    if world > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
            if dist.get_rank() == 0:
                serve_here(SERVERS)
        rank = dist.get_rank()
    example = batches(0, rank)[0]
    is_module = ENTRY == "module"
    if is_module and isinstance(example, tuple):
        example = example[0]
    settings = {{"example_inputs": example, "unused_parameters": "freeze"}}
    settings |= {{"capture": "never"}} if EAGER else {{}}
    if not is_module:
        settings |= {{"optimizer": optimizer, "loss_fn": loss, "clip_grad_norm": CLIP, "late_parameters": late}}
    if groups:
        flat = module_batch(model, example) if is_module else flatten(example)
        mode = "module" if is_module else "step"
        if EAGER:
            seen = Training(
                model, example, Settings(None if is_module else loss, capture="never"), None, mode
            )
            seen.settle(join(300.0))
            graph = seen.graph()
        else:
            graph = training_graph(model, flat, None if is_module else loss, mode, "freeze", recompute)
        settings["plan"] = autopar.Plan(
            model=graph.model, cluster=cluster_of(world).fingerprint, groups=groups, recompute=recompute
        )
    return autopar.optimize(model, **settings), rank


FIRST = dict(globals())


def main():
    expected = train()
    found = train({{"groups": {groups}, "recompute": {recompute!r}, "late": {late}}})
    print("losses: eager", expected[0], "autopar", found[0])
    for eagers, ours in zip(expected[1:], found[1:]):
        for name, value in eagers.items():
            if name in ours and value.numel():
                print(name, "differs by", float((ours[name].double() - value.double()).abs().max()))


if __name__ == "__main__":
    main()
"""


def script(case: Case, outcome: Outcome) -> str:
    """A Python file that shows the finding; several ranks need torchrun."""
    start = "python" if case.world_size == 1 else f"torchrun --nproc-per-node {case.world_size}"
    said = outcome.said.replace("\n", "\n# ")
    told = {k: getattr(case, k) for k in ("entry", "steps", "samples", "data_seed", "events", "clip", "schedule")}
    told |= {k: getattr(case, k) for k in ("sums", "input_gradients", "recompute", "late", "eager")}
    told["unfused"] = case.unfused
    groups = json.loads(case.groups) if case.groups else None
    head = f"# {case.name}: {outcome.kind}: {said}\n# Run with: {start} THIS_FILE\n"
    return head + render(case) + _HARNESS.format(**told, groups=groups)
