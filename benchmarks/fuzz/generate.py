"""Random cases, each a function of its name."""

from __future__ import annotations

import contextlib
import random
import warnings
import zlib
from dataclasses import replace
from typing import cast

from autopar.spec.plan import Recompute
from benchmarks.fuzz.case import Case, Entry, Form
from benchmarks.fuzz.draft import Draft, Rejected, Unrepeatable, Variable
from benchmarks.fuzz.families import FAMILIES
from benchmarks.fuzz.operators import able
from benchmarks.fuzz.source import renamed
from benchmarks.fuzz.twists import twisted

_ATTEMPTS = 60
_DTYPES = ("float64",) * 14 + ("float32", "float32", "bfloat16", "bfloat16", "float16", "mixed")
_RECOMPUTE: tuple[Recompute, ...] = ("none", "none", "none", "none", "none", "selective", "full")
_IN_STEPS = 3
_TWISTED = 0.3
_EAGER = 0.2


def generate(name: str) -> Case:
    """The case of a name, SEED/mINDEX for one rank, SEED/pINDEX for a plan on several."""
    rng = random.Random(zlib.crc32(name.encode()))
    plan = name.partition("/")[2].startswith("p")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is drawn may be odd
        for _ in range(_ATTEMPTS):
            rowwise = plan or rng.random() < 0.3
            with contextlib.suppress(Rejected):
                case = _model(name, rng, rowwise)
                case = _planned(case, rng) if plan else _alone(case, rng, rowwise)
                case = twisted(case, rng) if rng.random() < _TWISTED else _run_eagerly(case, rng)
                if "register_hook" not in " ".join(case.init) or case.counts_samples:
                    return case  # with a hook on a gradient, a model runs eagerly
    raise Rejected(f"no case for {name}")


def _run_eagerly(case: Case, rng: random.Random) -> Case:
    """Some cases, as they are where nothing but the loss, which is not read, says what their batches count by."""
    if rng.random() >= _EAGER or not case.counts_samples:
        return case
    return replace(case, eager=True, recompute="none")


def _model(name: str, rng: random.Random, rowwise: bool) -> Case:
    dtype = rng.choice(_DTYPES)
    d = Draft(rng, rowwise, dtype)
    width, length = rng.choice((1, 2, 3, 4, 6)), rng.choice((1, 2, 3, 4))
    shape = rng.choice((f"(n, {width})", f"(n, {width})", f"(n, {length}, {width})", f"(n, 2, {length}, {width})"))
    d.input("x", f"values({shape}, seed)")
    if rng.random() < 0.45:
        d.input("ids", f"integers((n, {length}), 6, seed + 1)")
    wanted = rng.choice((1, 2, 3, 4, 6, 8, 12, 16))
    families, weights = zip(*FAMILIES, strict=True)
    for _ in range(6 * wanted):
        if len(d.lines) >= wanted:
            break
        try:
            d.keep(rng.choices(families, weights)[0](d))
        except Unrepeatable:
            raise
        except Rejected:
            d.drop_pending()
    output, columns = _output(d)
    d.confirm()
    case = Case(
        name,
        inputs=tuple(d.inputs),
        output=output,
        data_seed=rng.randrange(10_000),
    )
    case = _with_loss(case, rng, columns)
    strided = any('layout="strided"' in line for line in d.init)
    case = _with_optimizer(replace(case, dtype=dtype), rng, d.shared_storage, strided)
    case = replace(case, dtype="float32" if dtype == "mixed" else dtype)
    init = ["self.c0 = 0.75"] + [_in_dtype(line, rng) if dtype == "mixed" else line for line in d.init]
    lines = d.lines
    if dtype == "mixed":
        init, lines = _mixed(init, lines)
    if rng.random() < 0.2:
        init.insert(1, f"self.unused = parameter(({rng.choice((0, 1, 3))},), 5)")
    extra = _extra(rng, [n for n in d.parameters if "trainable=False" not in " ".join(_of(n, init))])
    init += extra
    return replace(case, init=tuple(init), forward=tuple(lines), unused="freeze")


def _of(name: str, init: list[str]) -> list[str]:
    return [line for line in init if f"self.{name} = " in line]


def _extra(rng: random.Random, parameters: list[str]) -> list[str]:
    """Ties by name, which make one parameter under two names; and hooks on gradients."""
    if parameters and rng.random() < 0.015:
        return [f"self.{rng.choice(parameters)}.register_hook(lambda g: g * 2)"]
    if parameters and rng.random() < 0.12:
        return [f"self.tied = self.{rng.choice(parameters)}"]
    return []


def _in_dtype(line: str, rng: random.Random) -> str:
    if " = parameter(" in line and rng.random() < 0.5:
        other = rng.choice(("bfloat16", "float16", "bfloat16"))
        return line[:-1] + f", dtype=torch.{other})"
    return line


def _mixed(init: list[str], lines: list[str]) -> tuple[list[str], list[str]]:
    """Casts parameters of other dtypes where they are read."""
    for line in init:
        if "dtype=" in line:
            name = line.split(" = ")[0]
            lines = [renamed(x, name, f"{name}.to(DTYPE)") for x in lines]
    return [line for line in init if ".data = " not in line], lines


def _output(d: Draft) -> tuple[str, int]:
    """An expression [samples, columns] of some of the last variables."""
    rows: list[Variable] = [v for v in d.variables.values() if v.floating and able(v)]
    if not rows:
        raise Rejected("no row a sample")
    unread = d.unread()
    rows = [v for v in rows if v.name in unread] or rows
    chosen = rows[-d.rng.choice((1, 2, 3, 4)) :]
    flat = [f"{v.name}[:, None]" if len(v.shape) == 1 else v.name + ".flatten(1)" * (len(v.shape) > 2) for v in chosen]
    columns = sum(d.value(v.name).flatten(1).shape[1] if len(v.shape) > 1 else 1 for v in chosen)
    output = flat[0] if len(flat) == 1 else f"torch.cat([{', '.join(flat)}], 1)"
    others = [n for n in unread if n not in [c.name for c in chosen]]
    if others and not d.rowwise:
        factors = [f"0.1 * {n}.mean()" for n in others[-3:]]
        output = f"({output}) * (1 + {' + '.join(factors)})"
    if columns > 40 or d.rng.random() < 0.65:
        wide = d.rng.choice((1, 2, 3, 5, 11))
        weight = d.parameter((wide, columns), round(1 / columns**0.5, 3), reuse=0.5)
        bias = f", {d.parameter((wide,))}" if d.rng.random() < 0.6 else ""
        output, columns = f"F.linear({output}, {weight}{bias})", wide
    d.keep([f"{d.new()} = {output}"])
    if not any(" = parameter(" in x and "trainable=False" not in x for x in d.init):
        raise Rejected("nothing to train")
    if not d.value(list(d.variables)[-1]).requires_grad:
        raise Rejected("no gradient")
    return list(d.variables)[-1], columns


_LOSSES: tuple[tuple[str, str, bool], ...] = (
    ("F.mse_loss(out, y)", "", False),
    ("F.mse_loss(out, y)", "", False),
    ("(out - y).square().mean(1).mean()", "", False),
    ("F.smooth_l1_loss(out, y)", "", False),
    ("F.huber_loss(out, y, delta=0.7)", "", False),
    ("F.binary_cross_entropy_with_logits(out, torch.sigmoid(y))", "", False),
    ("(out * y).mean()", "", False),
    ("torch.tanh(out).square().mean()", "", False),
    ("0.5 * F.mse_loss(out, y) + 0.01 * out.square().mean()", "", False),
    ("F.cross_entropy(out, t)", "t", False),
    ("F.cross_entropy(out, t)", "t", False),
    ("F.cross_entropy(out, t, label_smoothing=0.1)", "t", False),
    ("0.5 * F.cross_entropy(out, t)", "t", False),
    ("F.cross_entropy(out, t) / 4", "t", False),
    ("F.nll_loss(F.log_softmax(out, 1), t)", "t", False),
    ("F.cross_entropy(out, t, weight=torch.arange(1, out.shape[1] + 1).to(out.dtype))", "t", False),
    ("((out - y).square() * m).sum() / m.sum()", "m", False),
    ("((out - y).square().mean(1) * m[:, 0]).sum() / m[:, 0].sum()", "m", False),
    ("(out - y).square().sum()", "", True),
    ("F.cross_entropy(out, t, reduction='sum')", "t", True),
)
"""Loss, the target that it reads besides `y`, and whether it is a sum over samples."""


def _with_loss(case: Case, rng: random.Random, columns: int) -> Case:
    loss, target, sums = rng.choice(_LOSSES)
    if "t" in target and columns < 2:
        loss, target, sums = _LOSSES[0]
    kinds = {
        "y": f"values((n, {columns}), seed + 2)",
        "t": f"labels((n,), {columns}, seed + 3, {rng.choice((0.0, 0.4))})",
        "m": f"(values((n, {columns}), seed + 4) > -0.3).to(DTYPE) + 1e-3",
    }
    forms: tuple[Form, ...] = ("loss_fn",) * 5 + ("loss_module", "tensor", "tensor", "dict", "attribute")
    form = rng.choice(forms)
    targets = tuple((n, kinds[n]) for n in "ytm" if n in target or (n == "y" and target != "t"))
    if form not in ("loss_fn", "loss_module") and rng.random() < 0.2 and not sums:
        loss = f"{loss} + 0.01 * sum(p.square().sum() for p in self.parameters())"
    return replace(case, loss=loss, targets=targets, form=form, sums=sums)


def _with_optimizer(case: Case, rng: random.Random, shared_storage: bool, strided: bool) -> Case:
    decay = 0.0 if shared_storage or rng.random() < 0.5 else 0.1
    narrow = case.dtype in ("bfloat16", "float16", "mixed")
    how = rng.choice(("",) * 6 + (", foreach=True", ", foreach=False", ", fused=True", ", fused=False"))
    if strided or narrow:  # PyTorch's fused kernels are wrong for such parameters on CPUs, eagerly too
        how = how.replace("=True", "=False") if "fused" in how else how
    momentum = rng.choice(("", "", ", momentum=0.9", ", momentum=0.9, nesterov=True", ", momentum=0.5, dampening=0.1"))
    kinds = {
        "SGD": f"{momentum}, weight_decay={decay}{how}",
        "Adam": f", weight_decay={decay}, eps=1e-3{how}",
        "AdamW": f", amsgrad={rng.random() < 0.5}, weight_decay={decay}, eps=1e-3{how}",
        "Adagrad": f", eps=1e-3{how}",
        "RMSprop": f", eps=1e-3, momentum=0.5{how.replace(', fused=True', '')}".replace(", fused=False", ""),
    }
    kind = rng.choice(("SGD", "SGD", "SGD", "Adam", "AdamW", "AdamW", "Adagrad", "RMSprop"))
    lr = (0.3 if narrow else 0.1) if kind == "SGD" else 0.02
    settings = kinds[kind]
    made = f"torch.optim.{kind}(grouped(parameters, {rng.choice((1, 1, 2, 3))}, {lr}){settings})"
    schedules = ("",) * 5 + (
        "torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)",
        "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 + 0.4 * step)",
    )
    return replace(
        case,
        optimizer=made,
        schedule=rng.choice(schedules),
        clip=rng.choice((None,) * 6 + (0.02, 1.0)),
        steps=_IN_STEPS,
    )


def _events(case: Case, rng: random.Random) -> tuple[tuple[int, str], ...]:
    """What a script may do between two steps."""
    names = [line.split(" = ")[0][5:] for line in case.init if " = parameter(" in line and "trainable" not in line]
    buffers = [line.split('"')[1] for line in case.init if "register_buffer" in line and "values(" in line]
    able = ["optimizer.param_groups[0]['lr'] *= 0.3"]
    able += ["model.c0 = 0.2", "model.c0 = 0.6"] if "self.c0" in " ".join(case.forward) else []
    able += [f"model.{names[0]}.data.mul_(0.5)", f"model.{rng.choice(names)}.requires_grad_(False)"] if names else []
    able += [f"model.{b} = model.{b} * 0.5 + 0.1" for b in buffers[:1]]
    return ((rng.randrange(1, case.steps), rng.choice(able)),) if rng.random() < 0.12 else ()


def _alone(case: Case, rng: random.Random, rowwise: bool) -> Case:
    entry: Entry = "module" if rng.random() < 0.35 else "step"
    samples: tuple[int, ...] = (rng.choice((1, 2, 3, 4, 5)),)
    if (
        rowwise
        and entry == "step"
        and rng.random() < 0.4
        and not case.sums
        and case.dtype not in ("bfloat16", "float16")
    ):
        samples = tuple(rng.choice((1, 2, 3)) for _ in range(rng.choice((2, 3))))
    if entry == "module":
        case = replace(
            case, form=cast(Form, "loss_fn" if case.form == "loss_module" else case.form), clip=None,
            input_gradients=rng.random() < 0.15,
        )  # fmt: skip
    case = replace(case, samples=(samples,), entry=entry, events=_events(case, rng))
    recompute: Recompute = rng.choice(_RECOMPUTE) if entry == "step" and rng.random() < 0.7 else "none"
    planned = recompute != "none" or (entry == "step" and rng.random() < 0.08)
    return replace(case, recompute=recompute, plan_seed=rng.randrange(1, 10**6) if planned else 0)


def _planned(case: Case, rng: random.Random) -> Case:
    world = rng.choice((2, 2, 3))
    entries: tuple[Entry, ...] = ("step",) * 7 + ("module", "optimize")
    entry = rng.choice(entries)
    most = rng.choice((1, 1, 1, 2)) if entry != "module" and not case.sums else 1
    most = 1 if case.dtype in ("bfloat16", "float16") else most
    evenly = rng.random() < 0.4
    size = rng.choice((1, 2, 3))
    samples = [[size if evenly else rng.choice((1, 2, 3, 5)) for _ in range(most)] for _ in range(world)]
    if not evenly and rng.random() < 0.12 and most == 1:
        samples[rng.randrange(world)] = [0]
    if entry == "module":
        counted = "t" in dict(case.targets) or "m" in dict(case.targets)
        case = replace(case, form="loss_fn", clip=None)
        if counted or "parameters()" in case.loss or case.sums:
            columns = dict(case.targets).get("y", "values((n, 1), seed)")
            case = replace(case, loss="F.mse_loss(out, y.expand_as(out))", targets=(("y", columns),), sums=False)
    return replace(
        case,
        samples=tuple(map(tuple, samples)),
        entry=entry,
        events=_events(case, rng) if rng.random() < 0.3 else (),
        plan_seed=rng.randrange(1, 10**6),
        recompute=rng.choice(_RECOMPUTE) if entry == "step" else "none",
        late=rng.random() < 0.5 and entry != "module",
    )
