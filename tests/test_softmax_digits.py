"""The loop version, the array version, autograd and the fused function are one layer; and the example learns."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from seloptim.losses import linear_cross_entropy

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "softmax_digits.py"
    spec = importlib.util.spec_from_file_location("softmax_digits", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["softmax_digits"] = module
    spec.loader.exec_module(module)
    return module


def test_softmax_of_large_logits(example):
    s = example.softmax(np.array([123.0, 456.0, 789.0]))
    np.testing.assert_allclose(s, [5.75274406e-290, 2.39848787e-145, 1.0], rtol=1e-8)


@pytest.mark.parametrize("n, d, v", [(1, 3, 2), (12, 5, 7), (40, 8, 10)])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_four_ways_to_one_gradient(example, n, d, v, scale):
    rng = np.random.default_rng(n)
    w, x, y = scale * rng.standard_normal((d, v)), rng.standard_normal((n, d)), rng.integers(0, v, n)
    loops = example.softmax_loss_loops(w, x, y)
    arrays = example.softmax_loss_vectorised(w, x, y)
    results = [arrays]
    for loss_of in (
        lambda x, w, y: F.cross_entropy(F.linear(x, w), y),
        linear_cross_entropy,
    ):
        hidden, weight = torch.tensor(x, requires_grad=True), torch.tensor(w.T.copy(), requires_grad=True)
        loss = loss_of(hidden, weight, torch.tensor(y))
        dx, dw = torch.autograd.grad(loss, (hidden, weight))
        results.append((loss.item(), dw.numpy().T, dx.numpy()))
    for result in results:
        for a, e in zip(result, loops, strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-11, atol=1e-11)


def test_loops_and_arrays_train_to_the_same_weights(example):
    x, _, y, _ = example.digits()
    a, b = (example.train_numpy(f, x, y, 1) for f in (example.softmax_loss_loops, example.softmax_loss_vectorised))
    np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


def test_every_way_reads_digits(example, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("seloptim.optimizer")
    result = example.main(["--picture", str(tmp_path / "digits.png")])
    assert set(result) == {"loops", "arrays", "fused"}
    assert min(result.values()) > 0.94
    assert result["loops"] == result["arrays"]
    assert (tmp_path / "digits.png").stat().st_size > 1000
    assert "test accuracy" in capsys.readouterr().out
