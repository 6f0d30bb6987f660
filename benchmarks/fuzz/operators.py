"""What statements of a random model look like: functions from a draft to expressions, and to statements."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.fuzz.draft import Draft, Rejected, Variable

Make = Callable[[Draft], list[str]]

_SMOOTH = (
    "torch.tanh({a})", "torch.sigmoid({a})", "torch.sin({a})", "F.gelu({a})", "F.silu({a})", "F.softplus({a})",
    "{a} * {c}", "{a} + {c}", "{a} / {p}", "{c} - {a}", "-{a}", "{a}.square()", "torch.sqrt({a} * {a} + {p})",
    "torch.exp(-{a} * {a})", "1 / (2 + {a} * {a})", "{a}.pow(3)", "torch.log1p({a} * {a})", "torch.atan({a})",
    "torch.erf({a})", "F.elu({a})", "F.dropout({a}, 0.0, self.training)", "F.softmax({a}, {d})",
    "F.log_softmax({a}, {d})", "F.layer_norm({a}, {a}.shape[-1:])", "torch.cumsum({a}, {d})", "{a}.flip({d})",
    "{a}.roll(1, {d})", "{a}.detach() * {c} + {a}", "{a}.clone()", "{a}.contiguous()", "{a} * self.c0",
    "({a} if self.c0 > 0.5 else {a} * 2)", "F.softmin({a}, {d})", "torch.cos({a})", "F.logsigmoid({a})",
    "{a} - {a}.mean({d}, keepdim=True)", "{a} * {a}.detach()", "F.pad({a}, (1, 0))", "torch.tril({a})",
    "{a}.repeat_interleave(2, {d})", "torch.cat([{a}, {a}], {d})", "torch.stack([{a}, {a} * {c}], {d})",
    "{a}.double().to({a}.dtype)", "torch.addcdiv({a}, {a}, 2 + {a} * {a}, value={c})", "{a}.expm1().tanh()",
    "torch.cat({a}.chunk(2, {d})[::-1], {d})", "F.mish({a})", "{a}.new_ones(()) * {a}", "torch.rsub({a}, {c})",
)  # fmt: skip
_KINKED = (
    "torch.relu({a})", "{a}.abs()", "{a}.clamp(-{p}, {p})", "F.leaky_relu({a}, 0.1)", "F.hardtanh({a}, -{p}, {p})",
    "torch.where({a} > {c}, {a}, {c} * {a})", "{a}.masked_fill({a} < 0, {c})", "{a}.sort({d}).values",
    "{a}.topk(1, {d}).values", "{a}.amax({d})", "{a}.max({d}).values", "F.relu6({a})", "{a}.clamp(min={c})",
    "{a}.gather({d}, {a}.argsort({d}))", "{a} * ({a} > 0)", "F.hardswish({a})", "torch.cummax({a}, {d}).values",
)  # fmt: skip
_REDUCTIONS = (
    "{a}.mean({d})", "{a}.sum({d}, keepdim=True)", "{a}.logsumexp({d})", "{a}.var({d}, unbiased=False)",
    "{a}.mean()", "torch.linalg.vector_norm({a}, dim={d}).square()", "{a}.sum({d}) * 0.3", "{a}.prod({d})",
    "torch.sqrt({p} + {a}.square().mean({d}, keepdim=True))", "{a}.std({d}).square()",
)  # fmt: skip
_VIEWS = (
    "{a}.select({d}, {i})", "{a}.narrow({d}, {i}, 1)", "{a}.transpose({d}, {e})", "{a}.unsqueeze({d})",
    "{a}.squeeze({d})", "{a}.flatten({d})", "{a}.flatten(1)", "{a}.diagonal(0, {d}, {e})", "{a}.unfold({d}, 2, 1)",
    "{a}.movedim({d}, {e})", "{a}.chunk(2, {d})[{i}]", "{a}.split(1, {d})[{i}]", "{a}.unbind({d})[{i}]",
    "{a}[:, :1]", "{a}[:, 1:]", "{a}[:, ::2]", "{a}[..., :1]", "{a}[..., 0]", "{a}[:, 0]", "{a}[..., 1:]",
    "{a}[None]", "{a}.unsqueeze(-1).expand(*{a}.shape, 2)", "{a}.reshape({a}.shape[0], -1)", "{a}.T",
    "{a}.narrow({d}, {i}, 2)", "{a}.view_as({a})", "{a}.swapaxes({d}, {e})", "{a}.tensor_split(2, {d})[{i}]",
    "{a}.view({a}.shape)", "{a}[:, -1:]", "{a}[1:]", "{a}.unflatten({d}, (-1, 1))",
)  # fmt: skip
_BINARY = (
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} / (2 + {b} * {b})", "torch.add({a}, {b}, alpha={c})",
    "torch.sub({a}, {b}, alpha={c})", "{b} - {a}", "torch.lerp({a}, {b}, 0.3)", "{b} + {a}", "{b} * {a}",
    "torch.addcmul({a}, {b}, {b}, value={c})", "torch.atan2({a}, 2 + {b} * {b})", "torch.rsub({a}, {b}, alpha=2)",
    "torch.logaddexp({a}, {b})", "{a} * torch.tanh({b})", "torch.where({a}.detach() * 0 < 1, {a}, {b})",
)  # fmt: skip
_KINKED_BINARY = ("torch.maximum({a}, {b})", "torch.where({a} > {b}, {a}, {b})", "torch.minimum({a}, {b})")
_IN_PLACE = (
    "{v}.mul_({c})", "{v}.add_({b})", "{v}.copy_({b})", "{v}.add_({b}, alpha={c})", "{v}.tanh_()", "{v}.neg_()",
    "{v}.sub_({b})", "{v}.div_({p})", "{v}.sigmoid_()", "{v}.zero_()", "{v}.fill_({c})", "{v}.mul_({b})",
    "{t}[..., 0] = {c}", "{t}[:, :1] = {b}", "{t} += {b}", "{t} *= {c}", "{t}[:, 0] *= {c}", "{t}[..., 1:] += {b}",
    "{t}.masked_fill_({t}.detach() * 0 > 1, 0.5)", "{v}.exp_()", "{v}.addcmul_({b}, {b}, value={c})",
    "{t}.index_put_((torch.tensor([0]),), {b})", "{t}.index_add_(-1, torch.tensor([0]), {t}[..., :1] * {c})",
    "{t}.index_copy_(-1, torch.tensor([0]), {t}[..., -1:] * {c})", "{v}.lerp_({b}, 0.25)", "{t}.unsqueeze_(-1)",
    "{t}.select(-1, 0).add_({t}.select(-1, -1))", "{t}[..., :1].copy_({t}[..., -1:] * {c})", "{v}.clamp_(-9, 9)",
    "{t}.scatter_add_(-1, torch.zeros_like({t}, dtype=torch.long), {b})", "{t}.diagonal().mul_({c})",
)  # fmt: skip


def _filled(d: Draft, template: str, a: str, rank: int, **more: str) -> str:
    one, other = (d.rng.randrange(rank), d.rng.randrange(rank)) if rank else (0, 0)
    given = {"a": a, "c": f"{d.constant()}", "p": f"{abs(d.constant())}", "d": f"{one}", "e": f"{other}"}
    return template.format(**given, i=d.rng.randrange(2), **more)


def _assigned(d: Draft, expression: str) -> list[str]:
    return [f"{d.new()} = {expression}"]


def unary(d: Draft) -> list[str]:
    a = d.pick()
    table = _SMOOTH if d.narrow or d.rng.random() < 0.7 else _KINKED
    return _assigned(d, _filled(d, d.rng.choice(table), a.name, len(a.shape)))


def reduction(d: Draft) -> list[str]:
    a = d.pick(lambda v: len(v.shape) > 0)
    return _assigned(d, _filled(d, d.rng.choice(_REDUCTIONS), a.name, len(a.shape)))


def view_of(d: Draft, a: str, rank: int, deep: float = 0.3) -> str:
    """A random view of an expression's value."""
    for _ in range(8):
        found = _filled(d, d.rng.choice(_VIEWS), a, rank)
        try:
            shape = d.shape(found)
        except Rejected:
            continue
        return view_of(d, found, len(shape), 0.0) if d.rng.random() < deep else found
    raise Rejected("no view")


def view(d: Draft) -> list[str]:
    a = d.pick(lambda v: len(v.shape) > 0)
    return _assigned(d, view_of(d, a.name, len(a.shape)))


def operand(d: Draft, a: str, shape: tuple[int | None, ...]) -> str:
    """Something that broadcasts with `a`, often a view of it."""
    for _ in range(8):
        kind = d.rng.random()
        if kind < 0.4 and shape:
            found = view_of(d, a, len(shape), 0.5)
        elif kind < 0.55:
            found = d.pick(lambda v: len(v.shape) <= len(shape)).name
        elif kind < 0.65:
            other = d.pick(lambda v: len(v.shape) > 0)
            found = view_of(d, other.name, len(other.shape))
        else:
            found = like(d, shape)
        try:
            d.shape(f"{a} + {found}")
        except Rejected:
            continue
        return found
    raise Rejected("nothing broadcasts")


def like(d: Draft, shape: tuple[int | None, ...]) -> str:
    """A parameter, or a buffer, that broadcasts with a shape."""
    if d.rng.random() < 0.08:
        wanted: tuple[int, ...] = ()
    else:
        wanted = tuple(1 if s is None or d.rng.random() < 0.25 else s for s in shape)
        cut = d.rng.randrange(len(wanted) + 1) if d.rng.random() < 0.5 else 0
        wanted = wanted[cut:]
    return d.buffer(wanted) if d.rng.random() < 0.12 else d.parameter(wanted)


def odd(d: Draft) -> list[str]:
    """Parameters without elements, and with one."""
    a = d.pick()
    if d.rng.random() < 0.5:
        return _assigned(d, f"{a.name} + {d.parameter(d.rng.choice(((0,), (0, 3), (2, 0))))}.sum()")
    return _assigned(d, f"{a.name} * torch.tanh({d.parameter((), 1.0, 0.6)})")


def binary(d: Draft) -> list[str]:
    a = d.pick()
    b = operand(d, a.name, a.shape)
    table = _BINARY if d.narrow or d.rng.random() < 0.85 else _KINKED_BINARY
    return _assigned(d, _filled(d, d.rng.choice(table), a.name, len(a.shape), b=b))


def product(d: Draft) -> list[str]:
    """Linear layers and other products with a parameter or another value."""
    a = d.pick(lambda v: len(v.shape) > 0 and v.shape[-1] is not None)
    width, rank = a.shape[-1], len(a.shape)
    wide = d.rng.choice((1, 2, 3, 4, 5, 6, 16))
    able = ["F.linear({a}, {w})", "F.linear({a}, {w}, {bias})", "{a} @ {t}", "{a} @ {w}.T", "{a} @ {one}"]
    if rank == 2:
        able += ["torch.addmm({bias}, {a}, {t})", "torch.einsum('bi,oi->bo', {a}, {w})", "{a}.T @ {a} * 0.3"]
        able += ["torch.einsum('bi,bj->bij', {a}, {a})", "F.bilinear({a}, {a}, {cube})", "{a} @ {a}.T * 0.3"]
    if rank == 3:
        able += ["torch.bmm({a}, {a}.transpose(1, 2)) * 0.5", "F.scaled_dot_product_attention({a}, {a}, {a})"]
        able += ["torch.einsum('bij,bkj->bik', {a}, {a}) * 0.5", "torch.einsum('bij,oj->boi', {a}, {w})"]
    template = d.rng.choice(able)
    names: dict[str, Callable[[], str]] = {
        "w": lambda: d.parameter((wide, width)),
        "t": lambda: d.parameter((width, wide)),
        "bias": lambda: d.parameter((wide,)),
        "one": lambda: d.parameter((width,)),
        "cube": lambda: d.parameter((wide, width, width)),
    }
    made = {k: make() for k, make in names.items() if "{" + k + "}" in template}
    return _assigned(d, template.format(a=a.name, **made))


def convolution(d: Draft) -> list[str]:
    a = d.pick(lambda v: len(v.shape) in (3, 4) and v.shape[1] is not None)
    dims, out = len(a.shape) - 2, d.rng.choice((1, 2, 4))
    kernel = d.rng.choice((1, 1, 2))
    weight = d.parameter((out, a.shape[1], *[kernel] * dims))
    bias = f", {d.parameter((out,))}" if d.rng.random() < 0.5 else ""
    pad = f", padding={kernel - 1}" if d.rng.random() < 0.5 else ""
    return _assigned(d, f"F.conv{dims}d({a.name}, {weight}{bias}{pad})")


def normalization(d: Draft) -> list[str]:
    a = d.pick(lambda v: len(v.shape) > 1)
    draw = d.rng.random()
    if draw < 0.5:
        weight, bias = d.parameter(a.shape[-1:]), d.parameter(a.shape[-1:])
        return _assigned(d, f"F.layer_norm({a.name}, {weight}.shape, 1 + {weight}, {bias})")
    if draw < 0.7 or d.rowwise or d.narrow:
        weight = d.parameter(a.shape[1:2])
        return _assigned(d, f"F.group_norm({a.name}, 1, 1 + {weight})")
    mean, var = d.buffer(a.shape[1:2]), d.buffer(a.shape[1:2])
    return _assigned(d, f"F.batch_norm({a.name}, {mean}, {var}, 1 + {d.parameter(a.shape[1:2])}, None, True)")


def lookup(d: Draft) -> list[str]:
    ids, width = d.integer(), d.rng.choice((1, 2, 3, 4))
    rows = d.rng.choice((6, 7, 9))
    table = d.parameter((rows, width), reuse=0.5)
    able = ["F.embedding({i}, {t})", "F.embedding({i}, {t}, padding_idx=1)", "{t}[{i}]", "{t}.index_select(0, {f})"]
    able += ["F.one_hot({i}, {rows}).to({t}.dtype) @ {t}", "F.embedding({i}, {t}).sum(1)", "F.embedding({i}, {t}[:6])"]
    if len(ids.shape) == 2:
        able += ["F.embedding_bag({i}, {t}, mode='sum')", "F.embedding_bag({i}, {t}, mode='mean')"]
    return _assigned(d, d.rng.choice(able).format(i=ids.name, t=table, f=f"{ids.name}.flatten()", rows=rows))


def indexing(d: Draft) -> list[str]:
    a = d.pick(lambda v: len(v.shape) > 1)
    able = ["{a}[:, [1, 0]]", "{a}.index_select(1, torch.tensor([0, 0, 1]))", "{a}[..., [0]]", "{a}[:, [0, 0]]"]
    able += ["torch.take_along_dim({a}, torch.zeros_like({a}, dtype=torch.long), 1)", "{a}.scatter_add(1, {z}, {a})"]
    able += ["{a}.index_add(1, torch.tensor([0]), {a}[:, -1:])", "{a}.gather(-1, {z})", "{a}.scatter(1, {z}, 0.5)"]
    return _assigned(d, d.rng.choice(able).format(a=a.name, z=f"torch.zeros_like({a.name}, dtype=torch.long)"))


def joined(d: Draft) -> list[str]:
    a, b = d.pick(lambda v: len(v.shape) > 0), d.pick(lambda v: len(v.shape) > 0)
    return _assigned(d, _filled(d, d.rng.choice(("torch.cat([{a}, {b}], {d})", "torch.stack([{a}, {b}], {d})")),
                                a.name, len(a.shape), b=b.name))  # fmt: skip


def in_place(d: Draft) -> list[str]:
    a = d.pick(lambda v: len(v.shape) > 0)
    draw, statements = d.rng.random(), []
    target = a.name
    if draw < 0.75 or (target in dict(d.inputs) and draw < 0.99):
        target = d.new()
        made = f"{a.name}.clone()" if draw < 0.4 else f"{a.name} * {d.constant()}"
        made = view_of(d, a.name, len(a.shape)) if draw > 0.65 else made
        statements.append(f"{target} = {made}")
        d.keep(statements)
        a = d.variables[target]
    for _ in range(d.rng.choice((1, 1, 2))):
        part = view_of(d, target, len(a.shape)) if d.rng.random() < 0.5 else target
        b = operand(d, part, d.shape(part))
        if not b.startswith("self."):  # memory that is read while it is written has no defined values, eagerly neither
            b = f"{b}.clone()"
        template = d.rng.choice(_IN_PLACE)
        d.keep([_filled(d, template, target, len(a.shape), v=part, t=target, b=b)])
    return []


def buffer(d: Draft) -> list[str]:
    """Reads, writes, or both; where samples must not be mixed, nothing that is written is read."""
    a = d.pick(lambda v: len(v.shape) > 1 and v.shape[0] is None)
    kind = d.rng.random()
    if kind < 0.35:
        return _assigned(d, f"{a.name} + {d.buffer([1 if s is None else s for s in a.shape])}")
    if kind < 0.5:
        counter = d.buffer((), "counter")
        d.keep([f"{counter}.add_(1)"])
        return [] if d.rowwise else _assigned(d, f"{a.name} * (1 + 0.1 * torch.tanh({counter}.to({a.name}.dtype)))")
    if d.rowwise:
        raise Rejected("statistics of the batch")
    held = d.buffer(a.shape[1:])
    statistic = f"{a.name}.detach().mean(0)"
    writes = d.rng.choice(
        ("{h}.copy_({s})", "{h}.mul_(0.9).add_({s}, alpha=0.1)", "{h}.lerp_({s}, 0.1)", "{h}[:1] = {s}[:1]")
    )
    write = writes.format(h=held, s=statistic)
    read, again = (
        f"{d.new()} = {a.name} * {held}" if d.rng.random() < 0.5 else f"{d.new()} = {a.name} - {held}.clone()"
        for _ in range(2)
    )
    return [[write], [read, write], [write, read], [read, write, again]][d.rng.randrange(4)]


def able(v: Variable) -> bool:
    """Whether a variable can be part of the output: one row a sample."""
    return bool(v.shape) and v.shape[0] is None and all(s is not None and s > 0 for s in v.shape[1:])
