"""Whether an optimizer's settings in a checkpoint can be those of the program's."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import SpecError
from autopar.runtime.checkpoints.checks import check_settings


def test_a_setting_that_is_none_may_be_a_number_and_no_dict() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    check_settings(0, optimizer, {"clip": None}, {"clip": 0.5})
    with pytest.raises(SpecError, match="has a dict for 'clip'; expected a number or None"):
        check_settings(0, optimizer, {"clip": None}, {"clip": {}})
