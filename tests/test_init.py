"""Calibration of beta and the mismatched initialisation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from seloptim.functional import sel_forward, sel_inverse
from seloptim.init import calibrate_beta, choose_beta, mismatched_
from tests.oracle import resolve_beta, sel_map, sel_unmap


def of_rms(rms: float, *shape: int) -> torch.Tensor:
    tensor = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return tensor * (rms / tensor.square().mean().sqrt())


@pytest.mark.parametrize(
    ("rms", "beta"),
    [
        (1e-30, 64.0),
        (0.001, 64.0),
        (0.01, 28.0),
        (0.0224, 12.5),
        (0.05, 12.5),
        (0.1, 11.0),
        (0.5, 2.2),
        (1.0, 2.0),
        (9.0, 2.0),
    ],
)
def test_auto(rms: float, beta: float) -> None:
    weight = of_rms(rms, 40, 30)
    assert calibrate_beta(weight, "auto") == pytest.approx(beta, rel=1e-12)
    assert calibrate_beta(weight, "auto") == pytest.approx(resolve_beta("auto", weight), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_auto_in_every_dtype(dtype: torch.dtype) -> None:
    assert calibrate_beta(of_rms(0.01, 40, 30).to(dtype), "auto") == pytest.approx(28.0, rel=1e-2)
    assert calibrate_beta(torch.zeros(3, 4, dtype=dtype), "auto") == 12.5
    assert calibrate_beta(torch.zeros(0, 4, dtype=dtype), "auto") == 12.5
    # squares that overflow float16 and rms that float32 would not sum
    assert calibrate_beta(torch.full((64, 64), 6e4, dtype=dtype), "auto") == 2.0


@pytest.mark.parametrize(
    ("shape", "beta"),
    [
        ((2048, 2048), 0.276 * math.sqrt(2048)),
        ((64, 16, 3, 3), 0.276 * math.sqrt((64 + 144) / 2)),
        ((3, 4), 2.0),
        ((1000,), 0.276 * math.sqrt(1001 / 2)),
        ((), 2.0),
        ((0, 900), 0.276 * math.sqrt(450)),
    ],
)
def test_width(shape: tuple[int, ...], beta: float) -> None:
    assert calibrate_beta(torch.ones(shape), "width") == pytest.approx(beta, rel=1e-14)
    assert choose_beta(torch.zeros(shape), "width") == pytest.approx(beta, rel=1e-14)
    assert calibrate_beta(torch.empty(shape, device="meta"), "width") == pytest.approx(beta, rel=1e-14)


@pytest.mark.parametrize(("rms", "beta"), [(0.05, 12.49), (0.1, 11.0), (0.5, 2.2), (1.0, 2.0)])
def test_width_is_lowered_where_weights_are_large(rms: float, beta: float) -> None:
    weight = of_rms(rms, 2, 4094)
    assert choose_beta(weight, "width") == pytest.approx(beta, rel=1e-3)
    assert choose_beta(weight, "width") == pytest.approx(resolve_beta("width", weight), rel=1e-14)
    assert choose_beta(weight.expand(3, 2, 4094), "width", 1) == pytest.approx(beta, rel=1e-3)


@pytest.mark.parametrize("beta", [2.5, 12.5, "auto", "width"])
def test_mismatched_leaves_positive_weights_and_shrinks_negative_ones(beta: float | str) -> None:
    weight = of_rms(0.05, 20, 30)
    weight[3] = 0.0
    new = weight.clone()
    assert mismatched_(new, beta) is new
    resolved = resolve_beta(beta, weight)
    raw = sel_unmap(weight, 1.0, 1.0, 1.0, 0.0, resolved, "congruent")
    torch.testing.assert_close(new, sel_map(raw, 1.0, 1.0, 1.0, 0.0, resolved, "mismatched"), rtol=1e-13, atol=0)
    torch.testing.assert_close(new[weight > 0], weight[weight > 0], rtol=1e-14, atol=0)
    assert (new[weight == 0] == 0).all()
    negative = weight < 0
    assert (new[negative] < 0).all() and (new[negative] > weight[negative]).all()
    # The raw weights of the new weights are those that the congruent map gave the old ones.
    torch.testing.assert_close(sel_inverse(new, beta=resolved), raw, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mismatched_in_half_precision_rounds_once(dtype: torch.dtype) -> None:
    weight = of_rms(0.05, 20, 30).to(dtype)
    raw = sel_inverse(weight.float(), beta=12.5, combine="congruent")
    expected = sel_forward(raw, beta=12.5).to(dtype)
    assert torch.equal(mismatched_(weight, 12.5), expected)


META = torch.empty(2, 2, device="meta")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 50, bias=False)


def changed(curved: Any, beta: float | str = "auto") -> set[str]:
    torch.manual_seed(0)
    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert mismatched_(model, beta, curved=curved) is model
    return {name for name, p in model.named_parameters() if not torch.allclose(p, before[name], rtol=1e-5, atol=0)}


def test_mismatched_chooses_parameters() -> None:
    # The embedding's rms is 1, the norm's weights are positive and its biases zero.
    assert changed("matrices") == {"linear.weight", "head.weight"}
    assert changed("matrices", beta=5.0) == {"linear.weight", "head.weight", "embedding.weight"}
    assert changed("all") == {"linear.weight", "linear.bias", "head.weight", "embedding.weight"}
    assert changed("none") == set()
    assert changed(lambda name, p: name.startswith("head") and p.ndim == 2) == {"head.weight"}


def test_mismatched_records_no_gradient() -> None:
    weight = nn.Parameter(torch.randn(3, 4))
    assert mismatched_(weight, 3.0) is weight
    assert weight.is_leaf and weight.grad_fn is None and weight.requires_grad


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: calibrate_beta(torch.ones(2, 2), "height"), ValueError, """must be "auto" or "width", got 'height'"""),
        (lambda: calibrate_beta(torch.tensor([1.0, math.nan])), ValueError, "weights that are not finite"),
        (lambda: calibrate_beta(META, "auto"), ValueError, r"weights on the meta device, .*: materialise them before"),
        (lambda: mismatched_(META), ValueError, "weights on the meta device"),
        (lambda: mismatched_(nn.Linear(2, 2, device="meta"), 3.0), ValueError, "^weight: weights on the meta device"),
        (lambda: calibrate_beta(torch.ones(2, dtype=torch.int64)), TypeError, "got torch.int64"),
        (lambda: mismatched_(torch.ones(2, 2), "height"), ValueError, "got 'height'"),
        (lambda: mismatched_(torch.ones(2, 2), -1.0), ValueError, "beta must be a positive number, got -1.0"),
        (
            lambda: mismatched_(torch.tensor([1.0, -math.inf]), 3.0),
            ValueError,
            r"weight -inf at index \[1\] is not finite",
        ),
        (lambda: mismatched_(nn.Linear(2, 2), curved="some"), ValueError, "curved must be .*, got 'some'"),
        (
            lambda: mismatched_(broken(), "auto"),
            ValueError,
            "^0.weight: beta cannot be chosen from weights that are not finite",
        ),
    ],
)
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def broken() -> nn.Module:
    linear = nn.Linear(2, 2)
    with torch.no_grad():
        linear.weight[0, 0] = math.nan
    return nn.Sequential(linear)
