"""What makes a script hostile: things that users do to a model, its loss or its optimizer, and few libraries expect.

Each twist adds a few lines to a case. Where autopar refuses them as documented, the case is no finding; where it takes
them, its numbers are those of eager PyTorch.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

from benchmarks.fuzz.case import Case
from benchmarks.fuzz.draft import Rejected

Twist = Callable[[Case, random.Random], Case]


def _with(case: Case, init: tuple[str, ...] = (), forward: tuple[str, ...] = (), event: str = "") -> Case:
    """The case with lines at the end of `__init__` and the beginning of `forward`, and an event before a later step."""
    events = (*case.events, (1 + case.data_seed % (case.steps - 1), event)) if event else case.events
    return replace(case, init=(*case.init, *init), forward=(*forward, *case.forward), events=events)


def _parameters(case: Case, trainable: bool = True) -> list[str]:
    """Names of the model's parameters."""
    lines = [line for line in case.init if re.match(r"self\.\w+ = parameter\(", line)]
    found = [line.split(" = ")[0][5:] for line in lines if ("trainable=False" not in line) is trainable]
    if not found:
        raise Rejected("no such parameter")
    return found


def _plain(case: Case) -> Case:
    """A case whose ranks and micro-batches count by their samples, of which each has some; in float64."""
    if case.dtype != "float64" or any(len(s) > 1 or 0 in s for s in case.samples):
        raise Rejected("not plain enough")
    columns = dict(case.targets).get("y", "values((n, 1), seed)")
    form = "loss_fn" if case.form == "loss_module" else case.form
    return replace(
        case, loss="F.mse_loss(out, y.expand_as(out))", targets=(("y", columns),), sums=False, form=form, clip=None
    )


_READ = (
    ("self.held = 0.75", "x = x * self.held", "model.held = 0.3"),
    ("self.held = 0.75", "x = x * self.held + 0.1", "model.held += 0.5"),
    ("self.held = {'scale': 0.75}", "x = x * self.held['scale']", "model.held['scale'] = 0.3"),
    ("self.held = [0.75, 0.3]", "x = x * sum(self.held)", "model.held.append(0.4)"),
    ("self.held = 'tanh'", "x = getattr(torch, self.held)(x)", "model.held = 'sin'"),
    ("self.held = True", "x = x * 0.5 if self.held else x", "model.held = False"),
    ("self.held = nn.Dropout(0.0)", "x = self.held(x)", "model.held.p = 1.0"),
    ("self.held = nn.LeakyReLU(0.9)", "x = self.held(x)", "model.held.negative_slope = 0.2"),
    ("self.held = nn.Tanh()", "x = self.held(x)", "model.held = nn.Sigmoid()"),
    ("", "x = x * SCALE", "SCALE = 0.3"),
    ("", "x = x * scale()", "scale = lambda: 0.3"),
    ("", "x = x * (0.5 if self.training else 0.8)", "model.eval()"),
)


def python_state(case: Case, rng: random.Random) -> Case:
    """Something that `forward` reads changes: an attribute, a global, what a container or a submodule holds."""
    init, forward, event = rng.choice(_READ)
    return _with(case, (init,) if init else (), (forward,), event)


def loss_state(case: Case, rng: random.Random) -> Case:
    """An attribute of the loss object changes, as an annealed weight does."""
    if case.entry == "module" or case.sums:
        raise Rejected("the loss is not autopar's")
    case = replace(case, form="loss_module", loss=f"self.weight * ({case.loss})")
    if "self.parameters()" in case.loss:
        raise Rejected("the loss reads the model's parameters")
    return _with(case, event=rng.choice(("loss.weight = 0.3", "loss.weight *= 0.5")))


def frozen_or_not(case: Case, rng: random.Random) -> Case:
    """A parameter is frozen, or trains, in the middle."""
    trains = rng.random() < 0.25
    name = rng.choice(_parameters(case, not trains))
    return _with(case, event=f"model.{name}.requires_grad_({trains})")


def hook(case: Case, rng: random.Random) -> Case:
    """A hook on a gradient, or on the optimizer's step, from the beginning or from some step on."""
    name = rng.choice(_parameters(case))
    able = [f"model.{name}.register_hook(lambda g: g * 2)",
            f"model.{name}.register_hook(lambda g: g.clamp(-0.01, 0.01))",
            f"model.{name}.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))",
            "optimizer.register_step_pre_hook(lambda optimizer, *given: halved(optimizer))"]  # fmt: skip
    event = rng.choice(able)
    if "clamp" in event and sum(map(len, case.samples)) > 1:
        raise Rejected("each backward pass runs the hook, and this one is not linear")
    if rng.random() < 0.5 and event.startswith("model."):
        return _with(case, (event.replace("model.", "self.", 1),))
    return _with(case, event=event)


def implementation(case: Case, rng: random.Random) -> Case:
    """A fused or foreach optimizer, on parameters that lie in memory otherwise than dense and in order."""
    if "fused" in case.optimizer or "foreach" in case.optimizer:
        raise Rejected("chosen already")
    how = "foreach=True" if "RMSprop" in case.optimizer or rng.random() < 0.2 else "fused=True"
    init = list(case.init)
    for i, line in enumerate(init):
        if re.match(r"self\.p\d+ = parameter\(\(\d+, \d+", line) and "layout=" not in line and rng.random() < 0.5:
            layout = rng.choice(("strided", "transposed"))
            init[i] = re.sub(r"(, dtype=torch\.\w+|, trainable=False)*\)$", rf', layout="{layout}"\g<0>', line)
    return replace(case, init=tuple(init), optimizer=f"{case.optimizer[:-1]}, {how})")


def shared_memory(case: Case, rng: random.Random) -> Case:
    """Two parameters of one memory that are not one parameter."""
    name = rng.choice(_parameters(case))
    line = next(x for x in case.init if x.startswith(f"self.{name} = "))
    if "dtype=" in line or case.dtype != "float64":
        raise Rejected("another dtype")
    other = line.replace(f"self.{name} = ", "self.shares = ")
    shared = rng.choice(
        (f"self.shares.data = self.{name}.data", f"self.shares.data = self.{name}.data.view_as(self.shares)")
    )
    decay = re.sub(r"weight_decay=0\.1", "weight_decay=0.0", case.optimizer)  # else the order of updates decides
    case = replace(case, optimizer=decay)
    return _with(case, (other, shared), ("x = x + torch.tanh(self.shares).sum()",))


def average(case: Case, rng: random.Random) -> Case:
    """A buffer that `forward` reads and writes."""
    case = _plain(case)
    writes = ("self.average.lerp_(x.detach().mean(), 0.3)", "self.average.mul_(0.5).add_(x.detach().amax())",
              "self.average = 0.5 * self.average + 0.5 * x.detach().mean()")  # fmt: skip
    lines = [rng.choice(writes), "x = x + self.average"]
    rng.shuffle(lines)
    return _with(case, ('self.register_buffer("average", values((), 3))',), tuple(lines))


def resumed(case: Case, rng: random.Random) -> Case:
    """Random numbers, of which each rank draws its own, also after a save and a resume."""
    event = "resume(program)" if rng.random() < 0.8 else ""
    return _with(case, ('self.register_buffer("drawn", torch.zeros(8))',), ("self.drawn.copy_(torch.rand(8))",), event)


def loaded(case: Case, rng: random.Random) -> Case:
    """An optimizer with moments, saved and loaded by `torch.distributed.checkpoint`, which loads into what a program's
    state dict has: here into that of one that has taken no step."""
    if case.entry == "module" or not any(name in case.optimizer for name in ("Adam", "RMSprop", "momentum=")):
        raise Rejected("nothing that would be lost")
    made = (0, "fresh = copy.deepcopy(program.state_dict())")
    return replace(case, events=(*case.events, made, (case.steps - 1, "load(program, fresh)")))


_ACROSS = (
    "F.cross_entropy(out @ out.T / out.shape[1] ** 0.5, torch.arange(len(out)))",
    "F.cross_entropy(F.normalize(out, dim=1) @ torch.sin(out + y).T, torch.arange(len(out)))",
    "F.mse_loss(out, y.expand_as(out)) + 0.1 * (out[:, None] - out).square().mean(2).mean(1).mean()",
    "F.mse_loss(out, y.expand_as(out)) - 0.1 * (out - out.mean(0)).square().mean()",
)
_OF_SEVERAL_COUNTS = (
    "F.mse_loss(out, y.expand_as(out)) + F.cross_entropy(torch.cat([out, y], 1), t)",
    "F.mse_loss(out, y.expand_as(out)) + F.nll_loss(torch.cat([out, y], 1).log_softmax(1), t) / 4",
    "F.smooth_l1_loss(out, y.expand_as(out)) + 0.5 * (out[:, :1].square() * m).sum() / m.sum()",
)


def _on_uneven_ranks(case: Case, loss: str) -> Case:
    """The case with a loss of which no mean of the ranks' own is that of one process: they are to take this mean, as
    with DDP, and to say so. All have samples enough to see it by; through `optimize`, whose `check` has them look where
    rows of parameters are spread over the ranks, too."""
    if case.world_size == 1 or case.entry == "module" or case.dtype != "float64":
        raise Rejected("no ranks whose losses autopar sees")
    targets = {
        "y": "values((n, 1), seed + 2)",
        "t": "labels((n,), 2, seed + 3, 0.4)",
        "m": "(values((n, 1), seed + 4) > 0.3).to(DTYPE) + 1e-3",
    }
    read = tuple((name, made) for name, made in targets.items() if re.search(rf"\b{name}\b", loss))
    samples = tuple((2 + sizes[0] + rank,) for rank, sizes in enumerate(case.samples))
    form = "loss_fn" if case.form == "loss_module" else case.form
    return replace(case, loss=loss, targets=read, samples=samples, sums=False, form=form, entry="optimize")


def across_samples(case: Case, rng: random.Random) -> Case:
    """A loss that compares the samples of a batch with each other, as with negatives within it."""
    return _on_uneven_ranks(case, rng.choice(_ACROSS))


def several_counts(case: Case, rng: random.Random) -> Case:
    """A sum of means over different counts, which ranks have in different proportions."""
    return _on_uneven_ranks(case, rng.choice(_OF_SEVERAL_COUNTS))


_BLOCKS = (
    "torch.tanh(F.layer_norm(F.linear(x, self.{w}), ({width},)))",
    "torch.sigmoid(F.layer_norm(F.linear(x, self.{w}), ({width},), 1 + self.{w}[0]))",
    "torch.tanh(F.linear(x, self.{w}).sort(-1).values)",
    "x - torch.tanh(F.linear(x, self.{w}).max(-1, keepdim=True).values)",
)


def deep(case: Case, rng: random.Random) -> Case:
    """Blocks of an operator with several results and one that may write over them, which are computed again."""
    found = re.fullmatch(r"values\(\(n(?:, \d+)*, (\d+)\), seed\)", case.inputs[0][1])
    if case.entry != "step" or found is None or found[1] == "1" or case.dtype != "float64":
        raise Rejected("nothing to normalize")
    names, block = [f"w{i}" for i in range(rng.choice((2, 3, 4)))], rng.choice(_BLOCKS)
    init = tuple(f"self.{w} = parameter(({found[1]}, {found[1]}), {i + 50}, 0.8)" for i, w in enumerate(names))
    case = replace(case, recompute=rng.choice(("full", "full", "selective")), plan_seed=rng.randrange(1, 10**6))
    return _with(case, init, tuple("x = " + block.format(w=w, width=found[1]) for w in names))


_OTHERWISE = (
    (r"grouped\(parameters, \d, ([\d.]+)\)", r"grouped(parameters, 1, \1 * (1 + RANK))"),
    (r"weight_decay=[\d.]+", "weight_decay=0.1 * RANK"),
    (r"eps=1e-3", "eps=1e-3 * (1 + RANK)"),
)


def ranks_that_differ(case: Case, rng: random.Random) -> Case:
    """Ranks with other settings, activations or losses, which are to be refused, or told of on uneven batches."""
    if case.world_size == 1:
        raise Rejected("one rank")
    even = case.samples[0] if 0 not in case.samples[0] else (2,)
    more = rng.choice((0, 0, 1))
    samples = tuple(tuple(n + more * rank for n in even) for rank in range(case.world_size))
    case = replace(case, entry="optimize", samples=samples, must_refuse=True, events=(), schedule="")
    if rng.random() < 0.5:
        able = [(a, b) for a, b in _OTHERWISE if re.search(a, case.optimizer)]
        return replace(case, optimizer=re.sub(*rng.choice(able), case.optimizer))
    if "register_hook" in " ".join(case.init):  # the model runs eagerly, where ranks may compute what they like
        raise Rejected("a hook on a gradient")
    lines = ("x = torch.tanh(x) if RANK else torch.sin(x)", "x = x * (0.5 + 0.25 * RANK)", "x = x + 0.1 if RANK else x",
             "x = F.dropout(x, 0.1 + 0.1 * RANK, True)")  # fmt: skip
    return _with(case, forward=(rng.choice(lines),))


ALONE: tuple[Twist, ...] = (python_state, python_state, loss_state, frozen_or_not, hook, implementation, shared_memory,
                            average, resumed, loaded, deep, deep)  # fmt: skip
TOGETHER: tuple[Twist, ...] = (python_state, frozen_or_not, hook, implementation, implementation, shared_memory,
                               average, average, resumed, resumed, loaded, ranks_that_differ,
                               ranks_that_differ, across_samples, across_samples, several_counts, several_counts,
                               deep)  # fmt: skip


def twisted(case: Case, rng: random.Random) -> Case:
    """The case with a twist that fits it, or as it is."""
    for _ in range(6):
        twist = rng.choice(ALONE if case.world_size == 1 else TOGETHER)
        try:
            return replace(twist(case, rng), twist=twist.__name__.replace("_", " "))
        except Rejected:
            continue
    return case
