"""Compiled compute's matrix products by oneDNN: which they are, and that they are products."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.runtime.compiling import products
from autopar.runtime.compiling.compute import Compiler
from tests.unit.test_compute import apart, one_by_one

aten = torch.ops.aten

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


def graph_of(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[torch.fx.Graph, list[torch.fx.Node]]:
    graph, mode, inputs = torch.fx.Graph(), torch._subclasses.FakeTensorMode(), []
    for i, shape in enumerate(shapes):
        inputs.append(graph.placeholder(f"x{i}"))
        inputs[-1].meta["val"] = mode.from_tensor(torch.empty(shape, dtype=dtype))
    return graph, inputs


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_a_product_of_any_layout(transposed: tuple[bool, bool]) -> None:
    a, b, bias = torch.randn(30, 20), torch.randn(20, 40), torch.randn(40)
    a, b = (t.t().contiguous().t() if turned else t for t, turned in zip((a, b), transposed, strict=True))
    assert torch.allclose(products.product()(a, b, None), a @ b, rtol=1e-5, atol=1e-5)
    assert torch.allclose(products.product()(a, b, bias), a @ b + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [torch.randn(80)[::2], torch.randn(1).expand(40), torch.randn(41)[1:]])
def test_a_bias_that_is_a_view(bias: torch.Tensor) -> None:
    a, b = torch.randn(30, 20), torch.randn(20, 40)
    assert torch.allclose(products.product()(a, b, bias), a @ b + bias, rtol=1e-5, atol=1e-5)


def test_factors_whose_elements_share_memory() -> None:
    windows, row = torch.randn(69).as_strided((30, 40), (1, 1)), torch.randn(1, 40).expand(30, 40)
    for factor in (windows, row):
        a, b = torch.randn(20, 30), torch.randn(40, 20)
        assert torch.allclose(products.product()(a, factor, None), a @ factor, rtol=1e-5, atol=1e-5)
        assert torch.allclose(products.product()(factor, b, None), factor @ b, rtol=1e-5, atol=1e-5)


def test_what_it_says_of_its_result_is_so() -> None:
    a, b, bias = torch.randn(20, 30).t(), torch.randn(40, 20).t(), torch.randn(40)
    torch.library.opcheck(products.product(), (a, b, bias), test_utils=("test_schema", "test_faketensor"))


def test_large_float32_products_with_a_bias_of_one_row() -> None:
    graph, (a, b, row, many) = graph_of((200, 200), (200, 200), (200,), (200, 200))
    large = [graph.call_function(aten.mm.default, (a, b)), graph.call_function(aten.addmm.default, (row, a, b))]
    others = [
        graph.call_function(aten.addmm.default, (many, a, b)),
        graph.call_function(aten.addmm.default, (row, a, b), {"alpha": 2.0}),
    ]
    products.products_by_onednn(graph)
    assert all(n.target is products.product() for n in large) and large[1].args == (a, b, row)
    assert all(n.target is aten.addmm.default for n in others)


def test_a_first_factor_that_lies_by_columns_is_copied_by_an_operator_of_its_own() -> None:
    graph, (a, b) = graph_of((200, 150), (200, 170))
    turned = graph.call_function(aten.t.default, (a,))
    turned.meta["val"] = a.meta["val"].t()
    node = graph.call_function(aten.mm.default, (turned, b))
    graph.output(node)
    products.products_by_onednn(graph)
    x, y = torch.randn(200, 150), torch.randn(200, 170)
    copied = node.args[0]
    assert isinstance(copied, torch.fx.Node) and copied.target is aten.clone.default
    assert copied.meta["val"].is_contiguous()
    found = torch.fx.GraphModule({}, graph)(x, y)
    assert torch.allclose(found, x.t() @ y, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("size", "dtype"), [(20, torch.float32), (200, torch.float64), (200, torch.bfloat16)])
def test_other_products_are_left(size: int, dtype: torch.dtype) -> None:
    graph, inputs = graph_of((size, size), (size, size), dtype=dtype)
    node = graph.call_function(aten.mm.default, tuple(inputs))
    products.products_by_onednn(graph)
    assert node.target is aten.mm.default


def test_a_step_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(130, 150), nn.Tanh(), nn.Linear(150, 130))
    x, y = torch.randn(2, 160, 130)
    models = []
    for onednn in (True, False):
        compiler = Compiler(one_by_one, onednn=onednn)
        monkeypatch.setattr("autopar.api.Compiler", lambda compiler=compiler, **_: compiler)
        model = copy.deepcopy(plain)
        program: Any = autopar.optimize(
            model,
            example_inputs=(x, y),
            loss_fn=F.mse_loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=100.0),
            compile=True,
        )
        for _ in range(2):
            program.step((x, y))
        used = [key for key in compiler.known if "autopar.product" in str(key)]
        assert bool(used) == onednn
        models.append(model)
    assert apart(*models) < 1e-5 and apart(models[0], plain) > 1e-2


def test_whose_processor(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\n")
    assert products._vendor(file) == "AuthenticAMD"
    assert products._vendor(tmp_path / "none") == ""


def test_not_where_the_user_turns_onednn_off() -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        assert not products.is_onednn_faster()
