"""Adam's state into SELAdam's and back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seloptim import SELAdam
from seloptim.convert import SMALLEST_SLOPE, to_adam, to_adam_state
from tests.cases import make_model, mixed
from tests.oracle import sel_map
from tests.test_checkpoints import other_weights, same, through_file, train

KINDS_OF_ADAM: dict[str, tuple[type[torch.optim.Adam], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.05}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "betas": (0.5, 0.6)}),
    "fused": (torch.optim.Adam, {"fused": True}),
    "capturable off, foreach on": (torch.optim.Adam, {"foreach": True}),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def slope_of(optimizer: SELAdam, p: nn.Parameter) -> Tensor:
    """d weight / d raw in float64, by autograd through the oracle's formula."""
    raw = optimizer.raw(p).double().clone().requires_grad_()
    e, l, m, n = (row.double() * col.double() for row, col in optimizer.scales(p).values())
    weight = sel_map(raw, e, l, m, n, optimizer.beta(p), optimizer.param_groups[0]["combine"])
    (slope,) = torch.autograd.grad(weight.sum(), raw)
    return slope


def adam_trained(kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Adam]:
    cls, options = KINDS_OF_ADAM[kind]
    model = make_model("mlp", dtype)
    adam = cls(model.named_parameters(), lr=2e-3, **options)
    train(model, adam, range(4))
    return model, adam


@pytest.mark.parametrize("combine", ["mismatched", "congruent"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS_OF_ADAM)
def test_adam_in_is_the_chain_rule_and_adam_out_its_inverse(kind: str, dtype: torch.dtype, combine: str) -> None:
    """Contract 6. Guard: convert.from_adam (J once for exp_avg, twice for exp_avg_sq) and to_adam_state, its inverse."""
    model, adam = adam_trained(kind, dtype)
    weights, saved = copy.deepcopy(model.state_dict()), through_file(adam.state_dict())
    optimizer = SELAdam(model.named_parameters(), combine=combine)
    optimizer.load_state_dict(saved)
    state = optimizer.state_dict()["state"]
    same(model.state_dict(), weights)
    for k, p in enumerate(model.parameters()):
        assert float(state[k]["step"]) == 4
        assert "from_adam" not in state[k]
        if p.dim() > 1:
            slope = slope_of(optimizer, p)
            for key, power in (("exp_avg", 1), ("exp_avg_sq", 2), ("max_exp_avg_sq", 2)):
                assert (key in state[k]) == (key in saved["state"][k])
                if key in state[k]:
                    expected = saved["state"][k][key].double() * slope**power
                    torch.testing.assert_close(state[k][key].double(), expected, rtol=1e-5, atol=0)
    back = to_adam(optimizer)
    for k, values in back["state"].items():
        for key, value in values.items():
            assert value.dtype == saved["state"][k][key].dtype
            # bfloat16 itself rounds by 2^-9; the way there and back stays within the rounding of one.
            rtol = 1e-5 if dtype != torch.bfloat16 else 2**-8
            torch.testing.assert_close(value, saved["state"][k][key], rtol=rtol, atol=0)
    group = saved["param_groups"][0]
    assert set(back["param_groups"][0]) == set(group)
    for key in set(group) - {"foreach", "fused"}:  # how SELAdam runs its steps is not Adam's choice
        assert back["param_groups"][0][key] == group[key]
    assert optimizer.param_groups[0]["fused"] is None and optimizer.param_groups[0]["foreach"] is None
    cls, options = KINDS_OF_ADAM[kind]
    again = cls(model.named_parameters(), lr=1.0, **options)
    again.load_state_dict(through_file(back))
    train(model, again, range(4, 6))
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_the_weights_may_be_loaded_after_adams_state() -> None:
    """api.md: J at the weights of the moment of need. Guard: "from_adam" keeps the state until then; saving keeps it too."""
    model, adam = adam_trained("Adam")
    weights, saved = through_file(model.state_dict()), through_file(adam.state_dict())
    late, its = other_weights(torch.float32), None
    for p in late.parameters():
        p.requires_grad_(False)
    its = SELAdam(late.parameters())
    its.load_state_dict(saved)
    its.load_state_dict(through_file(its.state_dict()))  # frozen: nothing was needed, nothing is lost
    late.load_state_dict(weights)
    for p in late.parameters():
        p.requires_grad_()
    early = SELAdam(model.parameters())
    early.load_state_dict(saved)
    same(its.state_dict()["state"], early.state_dict()["state"])
    train(model, early, range(4, 7))
    train(late, its, range(4, 7))
    same(late.state_dict(), model.state_dict())


def test_parameters_that_are_not_curved_go_through_unchanged() -> None:
    """Biases, and a matrix of rms above 0.8 that stays plain when it shrinks. Guard: _settle_plain takes "from_adam" off."""
    model, adam = adam_trained("Adam")
    p = next(iter(model.parameters()))
    with torch.no_grad():
        p.mul_(10)
    optimizer = SELAdam(model.parameters())
    optimizer.load_state_dict(adam.state_dict())
    train(model, adam, [])
    twin = copy.deepcopy(model)
    plain = torch.optim.Adam(twin.parameters())
    plain.load_state_dict(adam.state_dict())
    train(model, optimizer, range(4, 5))
    train(twin, plain, range(4, 5))
    assert torch.equal(p, next(iter(twin.parameters())))
    with torch.no_grad():
        p.mul_(0.01)
    train(model, optimizer, range(5, 6))
    assert "raw" not in optimizer.state[p] and float(optimizer.state[p]["step"]) == 6


def test_an_older_state_with_plain_counts_loads() -> None:
    """Contract 6. Guard: convert.as_step, and a tensor for torch's own Adam as well."""
    model, adam = adam_trained("Adam")
    saved = copy.deepcopy(adam.state_dict())
    for values in saved["state"].values():
        values["step"] = 4
    optimizer = SELAdam(model.parameters())
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(4, 5))
    assert {float(values["step"]) for values in optimizer.state.values()} == {5.0}


def test_float32_moments_load_into_a_bfloat16_model() -> None:
    """Guard: Adam's moments keep their own dtype until they are converted; those of biases follow their parameter."""
    model, adam = adam_trained("Adam")
    saved = adam.state_dict()
    half = copy.deepcopy(model).to(torch.bfloat16)
    optimizer = SELAdam(half.parameters())
    optimizer.load_state_dict(saved)
    for k, p in enumerate(half.parameters()):
        if p.dim() > 1:
            expected = saved["state"][k]["exp_avg"].double() * slope_of(optimizer, p)
            torch.testing.assert_close(optimizer.state[p]["exp_avg"].double(), expected, rtol=1e-5, atol=0)
    train(half, optimizer, range(4, 6))


@pytest.mark.parametrize("options", [{}, {"structure": "col"}, {"batch_dims": 1}, {"combine": "congruent"}], ids=str)
def test_a_saved_state_converts_without_its_optimizer(options: dict[str, Any]) -> None:
    """Guard: to_adam is to_adam_state of what state_dict() returned: raw, factors, beta and the group say all."""
    model = make_model("experts", torch.float32)
    optimizer = SELAdam(model.parameters(), scale_lr={"e": 2.0, "l": 2.0, "m": 0.5, "n": 0.5}, **options)
    for k in range(3):
        for i, p in enumerate(model.parameters()):
            p.grad = mixed(*p.shape, seed=10 * k + i, dtype=torch.float32)
        optimizer.step()
    saved = through_file(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    converted = to_adam_state(saved)
    same(converted, to_adam(optimizer))
    for k, p in enumerate(model.parameters()):
        slope = slope_of(optimizer, p)
        floor = SMALLEST_SLOPE * slope.abs().mean()
        floored = torch.where(slope < 0, -1.0, 1.0) * slope.abs().clamp_min(floor)
        for key, power in (("exp_avg", 1), ("exp_avg_sq", 2)):
            expected = optimizer.state[p][key].double() / floored**power
            torch.testing.assert_close(converted["state"][k][key].double(), expected, rtol=1e-4, atol=1e-12)
        for value in converted["state"][k].values():
            value.zero_()
    same(saved, kept)


def test_a_flat_slope_is_floored_with_its_sign() -> None:
    """api.md: |J| floored at 1e-3 of its mean, the sign kept. Guard: SMALLEST_SLOPE in convert._moments."""
    p = nn.Parameter(mixed(4, 3, size=0.1, dtype=torch.float32))
    optimizer = SELAdam([p], combine="congruent", beta=5.0)
    optimizer.raw(p)
    state = optimizer.state[p]
    state["exp_avg"].fill_(1.0)
    state["exp_avg_sq"].fill_(1.0)
    # e + l/beta: zero in the first row's flat spot (but for rounding), negative in the second.
    state["scale_row"][:2, 0] = torch.tensor([-0.2 + 1e-7, -3.0])
    state["raw"][:2] = 1e-8
    moments = to_adam_state({"state": {0: state}, "param_groups": optimizer.state_dict()["param_groups"]})["state"][0]
    mean = float(slope_of(optimizer, p).abs().mean())
    assert float(moments["exp_avg"][0].abs().max()) == pytest.approx(1 / (SMALLEST_SLOPE * mean), rel=1e-3)
    assert float(moments["exp_avg_sq"][0].max()) == pytest.approx((1 / (SMALLEST_SLOPE * mean)) ** 2, rel=1e-3)
    assert bool((moments["exp_avg"][1] < 0).all()) and bool((moments["exp_avg_sq"] > 0).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: [saved], "not an optimizer state"),
        (lambda saved: {"model": saved}, "not an optimizer state"),
        (lambda saved: torch.optim.Adam(make_model("mlp").parameters()).state_dict(), "not a SELAdam state"),
        (
            lambda saved: saved["state"][0].update(scale_row_exp_avg=None) or saved,
            "parameter 0: its saved scale_row_exp_avg",
        ),
        (lambda saved: saved["state"][0].update(beta="__import__('os')") or saved, "parameter 0: its saved beta"),
        (lambda saved: saved["state"][0].update(raw=3) or saved, "parameter 0: its saved raw"),
        (lambda saved: saved["param_groups"][0].update(combine=None) or saved, "combine must be"),
        (lambda saved: saved["param_groups"][0].update(batch_dims=9) or saved, "parameter 0"),
        (lambda saved: saved["param_groups"][0].update(batch_dims="x") or saved, "Invalid batch_dims"),
        (lambda saved: saved["state"][1].update(step="x") or saved, "parameter 1: its saved step"),
        (lambda saved: saved["state"][1].update(exp_avg="x") or saved, "parameter 1: its saved exp_avg"),
    ],
)
def test_what_is_no_seladam_state_is_refused(change: Any, message: str) -> None:
    """Guard: check_layout, _rule.state_fault and the checks in to_adam_state."""
    optimizer = SELAdam(make_model("mlp", torch.float32).parameters())
    with pytest.raises(ValueError, match=message):
        to_adam_state(change(copy.deepcopy(optimizer.state_dict())))
