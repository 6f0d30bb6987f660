"""The MODEL argument: where a model and its example inputs come from.

`package.module:factory` or `path/to/file.py:factory`. The factory takes no arguments and returns one of

    model                                    inputs are had from the model itself, where it has some
    model, example_inputs
    model, example_inputs, loss_fn
    {"model": ..., "example_inputs": ..., "loss_fn": ..., "optimizer": ...}      all but the model optional
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from autopar.cli.console import detail, progress
from autopar.cli.precision import autocasting, in_dtype, made_in
from autopar.errors import AutoparError, CaptureError, OptimizerError, SpecError, did_you_mean

if TYPE_CHECKING:
    import torch

FORM = "package.module:factory or path/to/file.py:factory"
RETURNS = (
    "a model; (model, example_inputs); (model, example_inputs, loss_fn); or a dict with the keys "
    "model, example_inputs, loss_fn, optimizer"
)
KEYS = ("model", "example_inputs", "loss_fn", "optimizer")
OPTIMIZERS = ("adamw", "adam", "sgd", "none")

Found = TypeVar("Found")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class ModelArgument:
    """What a factory returned."""

    source: str
    """The argument as written."""
    model: torch.nn.Module
    example_inputs: Any = None
    loss_fn: Callable[..., Any] | None = None
    optimizer: torch.optim.Optimizer | None = None


def load_model(argument: str, weights: bool = True, dtype: str | None = None) -> ModelArgument:
    """Imports and calls the factory; raises `SpecError`, which says what is wrong and where, if that fails. `weights`:
    whether the model gets them. `dtype`: the format of its floating-point numbers; by default, the factory's own.

    What the user's code prints goes to stderr: stdout is for results.
    """
    with contextlib.redirect_stdout(sys.stderr):
        factory = load_factory(argument)
        with made_in(dtype), contextlib.ExitStack() as stack:
            if not weights:
                from autopar.cli.weightless import without_weights

                stack.enter_context(without_weights())
            made = call_factory(argument, factory)
            return made if dtype is None else _converted(made, dtype)


def weights_option(function: F) -> F:
    """Adds `--weights/--no-weights` to a command, passed on as `weights`: `None` where neither is given."""
    return click.option(
        "--weights/--no-weights",
        default=None,
        help="Make the model with its weights, or without, for none are needed. Default: without where that can be.",
    )(function)


def with_model(
    argument: str,
    weights: bool | None,
    use: Callable[[ModelArgument], Found],
    dtype: str | None = None,
    autocast: str | None = None,
) -> Found:
    """What `use` makes of the model that MODEL names, in the format `dtype`, under autocast with the format `autocast`.
    Where `weights` is `None`, the model is made without them; where the factory, or who uses it, cannot do without,
    that is said, and it is made with them. Raises what `load_model` and `use` raise."""

    def used(made: ModelArgument) -> Found:
        with autocasting(made.model, autocast):
            return use(made)

    if weights is not None:
        return used(load_model(argument, weights, dtype))
    try:
        made = load_model(argument, weights=False, dtype=dtype)
    except SpecError as e:
        return _with_weights(argument, e, used, dtype)
    from autopar.ir.weightless import first_without_values

    name = first_without_values(made.model, made.loss_fn)
    detail(f"the model is made without weights: '{name}' has no values" if name else "the model has weights")
    try:
        return used(made)
    except CaptureError as e:
        if not name:
            raise
        del made
        return _with_weights(argument, e, used, dtype)


def _with_weights(argument: str, error: Exception, use: Callable[[ModelArgument], Found], dtype: str | None) -> Found:
    said = str(error).splitlines()[0]
    made = load_model(argument, dtype=dtype)
    progress(f"the model is made with its weights (--no-weights: never), for without them it cannot be: {said}")
    return use(made)


def model_file(argument: str | None) -> Path | None:
    """The file that MODEL names, as a file or as a module in this folder; `None` where it names none."""
    where = (argument or "").rpartition(":")[0]
    file = Path(where if where.endswith(".py") else where.replace(".", "/") + ".py")
    return file if file.is_file() else None


def load_factory(argument: str) -> Callable[[], Any]:
    """Finds the factory that MODEL names, without calling it."""
    where, colon, name = argument.rpartition(":")
    if not colon or not where or not name:
        hint = f"; for a file: '{argument}:factory'" if argument.endswith(".py") else ""
        raise SpecError(f"MODEL is '{argument}', expected {FORM}{hint}")
    module = _load_file(where) if where.endswith(".py") else _load_module(where)
    factory = getattr(module, name, None)
    if factory is None:
        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        own = [n for n in functions if getattr(getattr(module, n), "__module__", None) == module.__name__]
        listed = f"; it defines {', '.join(own[:8])}" if own else ""
        raise SpecError(f"MODEL '{argument}': '{where}' has no '{name}'{did_you_mean(name, functions) or listed}")
    if not callable(factory):
        raise SpecError(f"MODEL '{argument}': '{name}' is a {type(factory).__name__}, expected a function")
    _check_needs_no_arguments(argument, factory)
    checked: Callable[[], Any] = factory
    return checked


def call_factory(argument: str, factory: Callable[[], Any]) -> ModelArgument:
    """Calls the factory and reads what it returns."""
    try:
        made = factory()
    except AutoparError:
        raise
    except (Exception, SystemExit) as e:
        _check_no_signal(e)
        raise SpecError(f"MODEL '{argument}': the factory raised {_where_and_what(e)}") from e
    return _read(argument, made)


def _converted(made: ModelArgument, dtype: str) -> ModelArgument:
    """The same in another format: parameters, buffers, and the inputs' floating-point numbers."""
    import torch

    for module in (made.model, made.loss_fn):
        if isinstance(module, torch.nn.Module):
            module.to(getattr(torch, dtype))
    return replace(made, example_inputs=in_dtype(made.example_inputs, dtype))


def chosen_optimizer(made: ModelArgument, name: str | None) -> torch.optim.Optimizer | None:
    """The optimizer that `--optimizer` names, else the factory's own, else AdamW; `None` for `none`."""
    if name is None and made.optimizer is not None:
        return made.optimizer
    return make_optimizer(name or OPTIMIZERS[0], made.model)


def make_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer | None:
    """An optimizer of one of the kinds in `OPTIMIZERS`; its kind counts in a plan, its learning rate does not."""
    import torch

    parameters = [p for p in model.parameters() if p.requires_grad]
    if name == "none":
        return None
    if not parameters:
        raise OptimizerError("the model has no trainable parameter: there is nothing to plan for")
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3)
    return torch.optim.AdamW(parameters) if name == "adamw" else torch.optim.Adam(parameters)


def _load_file(path: str) -> ModuleType:
    file = Path(path)
    if not file.is_file():
        raise SpecError(f"MODEL: there is no file '{path}' (looked in {Path.cwd()})")
    # As `python file.py` would have it: modules beside the file can be imported.
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling by name look the module up while it is executed.
    shadowed = sys.modules.get(file.stem)
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        _check_no_signal(e)
        raise SpecError(f"MODEL: '{path}' cannot be imported: {_where_and_what(e)}") from e
    finally:
        if shadowed is not None:
            sys.modules[file.stem] = shadowed
    return module


def _load_module(name: str) -> ModuleType:
    # As `python -m name` would have it.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is not None and (name == e.name or name.startswith(e.name + ".")):
            file = Path(f"{name}.py") if "/" in name else Path(name.replace(".", "/") + ".py")
            hint = f"; for a file, write '{file}:...'" if file.is_file() else ""
            raise SpecError(f"MODEL: there is no module '{e.name}' on sys.path or in {Path.cwd()}{hint}") from e
        raise SpecError(f"MODEL: '{name}' cannot be imported: {_where_and_what(e)}") from e
    except (Exception, SystemExit) as e:
        _check_no_signal(e)
        raise SpecError(f"MODEL: '{name}' cannot be imported: {_where_and_what(e)}") from e


def _check_needs_no_arguments(argument: str, factory: Callable[..., Any]) -> None:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        raise SpecError(
            f"MODEL '{argument}': the factory needs arguments ({', '.join(needed)}); "
            "give them defaults, or write a function without arguments that calls it"
        )


def _read(argument: str, made: Any) -> ModelArgument:
    import torch

    if isinstance(made, torch.nn.Module):
        made = (made,)
    if isinstance(made, (tuple, list)) and 1 <= len(made) <= 3:
        made = dict(zip(KEYS, made, strict=False))
    if not isinstance(made, dict):
        kind = f"{len(made)} values" if isinstance(made, (tuple, list)) else f"a {type(made).__name__}"
        raise SpecError(f"MODEL '{argument}': the factory returned {kind}, expected {RETURNS}")
    for key in made:
        if key not in KEYS:
            near = did_you_mean(str(key), KEYS) or ";"
            raise SpecError(f"MODEL '{argument}': the factory returned a key '{key}'{near} known: {', '.join(KEYS)}")
    model, loss_fn, optimizer = made.get("model"), made.get("loss_fn"), made.get("optimizer")
    if not isinstance(model, torch.nn.Module):
        kind = "nothing" if model is None else f"a {type(model).__name__}"
        raise SpecError(
            f"MODEL '{argument}': the model is {kind}, expected a torch.nn.Module; the factory returns {RETURNS}"
        )
    if loss_fn is not None:
        _check_loss_fn(argument, loss_fn)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise SpecError(f"MODEL '{argument}': optimizer is a {type(optimizer).__name__}, expected a torch.optim one")
    return ModelArgument(argument, model, made.get("example_inputs"), loss_fn, optimizer)


def _check_loss_fn(argument: str, loss_fn: Any) -> None:
    if not callable(loss_fn):
        raise SpecError(f"MODEL '{argument}': loss_fn is a {type(loss_fn).__name__}, expected a function")
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, None)
    except TypeError as e:
        raise SpecError(
            f"MODEL '{argument}': loss_fn takes {signature}, and it is called as loss_fn(output, target): {e}"
        ) from e


def _check_no_signal(error: BaseException) -> None:
    """Raises it again where it is a signal's, not what the user's code ends with, as a script without a main guard."""
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
        raise error


def _where_and_what(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    frames = [f for f in frames if "importlib" not in f.filename]
    # The last line of the user's own code says more than where in a library it ended.
    own = [f for f in frames if "site-packages" not in f.filename] or frames
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"
