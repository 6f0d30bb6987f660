"""Stands in an optimizer's state for that of a parameter of which the state lies in parts, or on other ranks."""

from __future__ import annotations

from typing import Any, NoReturn

from autopar.errors import OptimizerError


class Elsewhere(dict[str, Any]):
    """An empty dict that whoever reads, changes or saves it is refused by, with the name of the parameter.

    As it stands for the state, it is also seen when the state is dropped (`optimizer.state.clear()`) or replaced
    (`optimizer.load_state_dict(...)`).
    """

    def __init__(self, name: str, owner: object) -> None:
        """`owner`: of the state."""
        super().__init__()
        self.name = name
        self.owner = owner

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raises `OptimizerError`."""
        raise OptimizerError(
            f"the optimizer's state of '{self.name}' is spread over the ranks, or cut into parts, by the program's "
            "plan: it can be neither read, changed nor saved through the optimizer, and optimizer.step() cannot use "
            "it. Take program.state_dict() and load_state_dict(), or program.save() and load(); a whole state may be "
            'given to optimizer.load_state_dict(). With strategy="ddp", each rank has all of it'
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = refuse
    get = pop = popitem = setdefault = update = items = keys = values = copy = refuse
    __reduce_ex__ = __ior__ = __or__ = refuse
