"""Edits from outside: after one, the next step starts from the weights as they are, and from no older copy of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from seloptim import SELAdam
from tests.cases import make_model, mixed
from tests.oracle import sel_map
from tests.test_checkpoints import same, through_file, train

EPS = torch.finfo(torch.float32).eps


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() > 1]


def truth(optimizer: SELAdam, p: Tensor) -> Tensor:
    """map(raw) in float64, by the oracle's formula."""
    raw = optimizer.state[p]["raw"]
    e, l, m, n = (row.double() * col.double() for row, col in optimizer.scales(p).values())
    return sel_map(raw.double(), e, l, m, n, optimizer.beta(p), optimizer.param_groups[0]["combine"])


def agrees(optimizer: SELAdam, p: Tensor) -> None:
    """p does not differ from the map of raw: sel.md, section 7."""
    expected, weight = truth(optimizer, p), p.detach()
    if p.dtype in (torch.float32, torch.float64):
        slack = 16 * torch.finfo(p.dtype).eps * expected.abs()
        assert bool(((weight.double() - expected).abs() <= slack).all())
    else:
        slack = 16 * EPS * expected.abs()
        assert bool(((weight >= (expected - slack).to(p.dtype)) & (weight <= (expected + slack).to(p.dtype))).all())


def trained(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, SELAdam]:
    model = make_model("mlp", dtype)
    optimizer = SELAdam(model.named_parameters(), lr=1e-2, **options)
    train(model, optimizer, range(3))
    return model, optimizer


def settle(model: nn.Module, optimizer: SELAdam) -> None:
    """A step at lr = 0: it writes nothing, and takes an edit into raw."""
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, [99])
    optimizer.param_groups[0]["lr"] = 1e-2


def as_vector(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * 0.9, model.parameters())


def in_place(change: Callable[[nn.Parameter], Any]) -> Callable[[nn.Module], None]:
    def edit(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                change(p)

    return edit


def new_data(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    def edit(model: nn.Module) -> None:
        for p in model.parameters():
            p.data = change(p.data)

    return edit


def other_model(model: nn.Module) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model.load_state_dict(type(model)().state_dict())


SEEN: dict[str, Callable[[nn.Module], None]] = {
    "mul_": in_place(lambda p: p.mul_(0.5)),
    "through detach": in_place(lambda p: p.detach().mul_(0.5)),
    "clamp_": in_place(lambda p: p.clamp_(-0.1, 0.1)),
    "renorm": in_place(lambda p: p.copy_(torch.renorm(p, 2, 0, 0.3)) if p.dim() > 1 else p),
    "mask": in_place(lambda p: p.masked_fill_(p.abs() < 0.1, 0.0)),
    "sign flips": in_place(lambda p: p.neg_()),
    "load_state_dict": other_model,
    "vector_to_parameters": as_vector,
    "new .data": new_data(lambda data: data * 0.5),
    "a transposed view": new_data(lambda data: data.t() if data.dim() > 1 and data.shape[0] == data.shape[1] else data),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("edit", SEEN)
def test_the_next_step_starts_from_the_edited_weights(edit: str, dtype: torch.dtype) -> None:
    """Contract 8. Guard: Shadow._check_edit compares version, storage, offset, strides, device and dtype."""
    model, optimizer = trained(dtype)
    moments = [optimizer.state[p]["exp_avg"].clone() for p in matrices(model)]
    SEEN[edit](model)
    weights = copy.deepcopy(model.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())["state"]
    settle(model, optimizer)
    same(model.state_dict(), weights)
    for p in matrices(model):
        agrees(optimizer, p)
    # What is saved at once is what the step would have taken, moments and all.
    for k, p in enumerate(model.parameters()):
        if p.dim() > 1:
            assert torch.equal(saved[k]["raw"], optimizer.raw(p))
    assert all(torch.equal(saved[2 * k]["exp_avg"], m) for k, m in enumerate(moments[:3]))
    train(model, optimizer, range(3, 5))
    for p, w in zip(matrices(model), (w for w in weights.values() if w.dim() > 1), strict=True):
        assert 0 < (p - w).abs().max() < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_edit_leaves_the_other_weights_their_bits(dtype: torch.dtype) -> None:
    """Build 3: a mask or a clip rounds no other master weight. Guard: Shadow._take inverts at differing elements alone."""
    model, optimizer = trained(dtype)
    p = matrices(model)[0]
    raw = optimizer.raw(p).clone()
    hit = torch.zeros_like(p, dtype=torch.bool)
    hit[1, ::2] = True
    with torch.no_grad():
        p.masked_fill_(hit, 0.0)
        p.clamp_(-0.25, 0.25)
    hit |= p.detach().abs() == 0.25
    optimizer.resync(p)
    assert torch.equal(optimizer.raw(p)[~hit], raw[~hit])
    assert bool((optimizer.raw(p)[p == 0] == 0).all())
    agrees(optimizer, p)


def test_a_small_decay_of_bfloat16_weights_is_not_lost() -> None:
    """Build 3. Guard: differing() rounds a band of 16 float32 units to bfloat16, no band of bfloat16 units."""
    model, optimizer = trained(torch.bfloat16)
    p = matrices(model)[0]
    before = p.detach().clone()
    for k in range(40):
        with torch.no_grad():
            p.mul_(0.997)
        settle(model, optimizer)
        agrees(optimizer, p)
        assert k or not torch.equal(p, before)
    expected = before.clone()
    for _ in range(40):
        expected.mul_(0.997)
    assert torch.equal(p, expected)  # what bfloat16 itself makes of it: every decay that it can hold has stayed


@pytest.mark.parametrize("remedy", ["none", "full", "resync"])
def test_an_edit_through_data_and_its_two_remedies(remedy: str) -> None:
    """Contract 9. Guards: check_edits="full" compares values in the step; resync() at once. Without them it is reverted."""
    model, optimizer = trained(check_edits="full" if remedy == "full" else "tracked")
    p = matrices(model)[0]
    p.data.mul_(0.5)
    edited = p.detach().clone()
    if remedy == "resync":
        optimizer.resync()
        agrees(optimizer, p)
    train(model, optimizer, range(3, 4))
    moved = (p - edited).abs().max()
    assert moved > 0.1 if remedy == "none" else moved < 0.05
    agrees(optimizer, p)


@pytest.mark.parametrize("check", ["tracked", "full"])
@pytest.mark.parametrize("through", ["copy_", ".data.copy_", ".data ="])
@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_swapping_averaged_weights_in_and_back_is_harmless(kind: str, through: str, check: str) -> None:
    """Contract 9. Guard: Shadow._take lets bits be where nothing differs."""
    model, optimizer = trained(torch.bfloat16, check_edits=check)
    plain, its = trained(torch.bfloat16)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9) if kind == "ema" else None)
    for k in range(3, 6):
        train(model, optimizer, [k])
        train(plain, its, [k])
        averaged.update_parameters(model)
        kept = [p.detach().clone() for p in model.parameters()]
        for source in (list(averaged.module.parameters()), kept):
            for p, w in zip(model.parameters(), source, strict=True):
                if through == ".data =":
                    p.data = w.detach().clone()
                elif through == "copy_":
                    with torch.no_grad():
                        p.copy_(w)
                else:
                    p.data.copy_(w)
            model(mixed(2, 6, dtype=torch.bfloat16))
    same(model.state_dict(), plain.state_dict())
    same(optimizer.state_dict()["state"], its.state_dict()["state"])


def test_training_goes_on_from_averaged_weights_that_stay() -> None:
    """Contract 9: `averaged` loaded for good. Guard: as for every edit that is seen."""
    model, optimizer = trained()
    averaged = AveragedModel(model)
    train(model, optimizer, range(3, 6))
    averaged.update_parameters(model)
    model.load_state_dict(averaged.module.state_dict())
    settle(model, optimizer)
    same(model.state_dict(), averaged.module.state_dict())
    for p in matrices(model):
        agrees(optimizer, p)


def test_pruning_keeps_its_parameter() -> None:
    """Build 3. torch.nn.utils.prune renames a parameter and masks a copy; its removal is an edit that is seen."""
    model, optimizer = trained()
    layer = model.get_submodule("layers.0")
    assert isinstance(layer, nn.Linear)
    p = layer.weight
    prune.l1_unstructured(layer, "weight", amount=0.5)
    assert p is layer.weight_orig
    train(model, optimizer, range(3, 5))
    model(mixed(2, 6, dtype=torch.float32))  # makes the masked copy of now
    assert bool(((layer.weight == 0) | (layer.weight == p)).all())
    prune.remove(layer, "weight")
    assert int((layer.weight == 0).sum()) >= 18
    settle(model, optimizer)
    agrees(optimizer, layer.weight)


@pytest.mark.parametrize("check", ["tracked", "full"])
def test_weights_clipped_after_each_step_stay_in_the_interval(check: str) -> None:
    """Build 3. Guard: the clip is taken before the next step reads raw, so that its own gradient moves it from there."""
    model, optimizer = trained(check_edits=check)
    for k in range(3, 8):
        train(model, optimizer, [k])
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.15, 0.15)
        before = copy.deepcopy(model.state_dict())
        settle(model, optimizer)
        same(model.state_dict(), before)
        for p in matrices(model):
            agrees(optimizer, p)


def test_tied_weights_train_as_one() -> None:
    """Contract 24, build 3: tied before or after the optimizer is made; a parameter left out of the model rests."""
    model, optimizer = trained()
    first, second = model.get_submodule("layers.2"), model.get_submodule("layers.4")
    assert isinstance(first, nn.Linear) and isinstance(second, nn.Linear)
    left = second.weight
    rest = left.detach().clone(), optimizer.raw(left).clone()
    second.weight = first.weight
    train(model, optimizer, range(3, 5))
    assert torch.equal(left, rest[0]) and torch.equal(optimizer.raw(left), rest[1])
    agrees(optimizer, first.weight)
    again = SELAdam(model.parameters())
    assert len([p for _, p in again.named_curved()]) == 3


CONVERSIONS = [
    (a, b)
    for a in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    for b in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    if a != b
]


@pytest.mark.parametrize(("before", "after"), CONVERSIONS, ids=str)
def test_a_model_that_changes_its_dtype_trains_on(before: torch.dtype, after: torch.dtype) -> None:
    """Build 3. Guard: Shadow._follow, for curved and for plain parameters (biases)."""
    model, optimizer = trained(before, eps=1e-3)  # Adam's usual 1e-8 is 0 in float16
    raws = [optimizer.raw(p).double() for p in matrices(model)]
    model.to(after)
    weights = copy.deepcopy(model.state_dict())
    settle(model, optimizer)
    same(model.state_dict(), weights)
    for p, raw in zip(matrices(model), raws, strict=True):
        agrees(optimizer, p)
        assert optimizer.raw(p).dtype == (torch.float64 if after == torch.float64 else torch.float32)
        if before == torch.float32 and after in (torch.bfloat16, torch.float16):
            assert torch.equal(optimizer.raw(p).double(), raw)  # the masters keep what the model has lost
    train(model, optimizer, range(3, 5))
    for p in matrices(model):
        agrees(optimizer, p)
    optimizer.load_state_dict(through_file(optimizer.state_dict()))


def test_state_follows_its_parameter_to_another_device() -> None:
    """Build 3. Guard: Shadow._follow; "meta" is the other device that every machine has."""
    model, optimizer = trained()
    p = matrices(model)[0]
    moved = nn.Parameter(p.detach().to("meta"))
    optimizer.state[moved] = dict(optimizer.state[p])
    optimizer._follow(moved)
    devices = {key: value.device.type for key, value in optimizer.state[moved].items() if isinstance(value, Tensor)}
    assert devices.pop("step") == "cpu" and set(devices.values()) == {"meta"}


def test_before_the_first_step_an_edit_makes_the_state_anew() -> None:
    """api.md, resync: beta included. Guard: Shadow._take at step 0."""
    model = make_model("mlp", torch.float32)
    optimizer = SELAdam(model.named_parameters(), beta="auto")
    p = matrices(model)[0]
    beta = optimizer.beta(p)
    with torch.no_grad():
        p.mul_(0.05)
    assert optimizer.beta(p) > beta
    fresh = SELAdam(copy.deepcopy(model).named_parameters(), beta="auto")
    same(optimizer.state_dict()["state"], fresh.state_dict()["state"])


def test_a_weight_out_of_reach_gets_the_nearest_with_a_warning() -> None:
    """api.md, resync. Guard: _rule.nearest_inverse, and its warning."""
    p = nn.Parameter(mixed(4, 5, size=0.1, dtype=torch.float32))
    optimizer = SELAdam([("w", p)], beta=5.0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.state[p]["scale_row"][1, 0] = 0.0  # e: l * |raw| alone has no negative values
    with pytest.warns(UserWarning, match="w: . edited weights are out of reach"):
        optimizer.resync()
    assert bool(optimizer.raw(p).isfinite().all())
    outside = (truth(optimizer, p) - p).abs() > 1e-4
    assert bool(outside.any()) and bool((p[outside] < 0).all()) and not bool(outside[[0, 2, 3]].any())


def test_scales_out_of_reach_of_most_weights_go_back_to_their_start() -> None:
    """api.md, resync. Guard: Shadow._restart_scales, moments of the scales too; those of raw are kept."""
    p = nn.Parameter(-mixed(4, 5, size=0.1, dtype=torch.float32).abs())
    optimizer = SELAdam([("w", p)], beta=5.0)
    p.grad = mixed(4, 5, seed=1, dtype=torch.float32)
    optimizer.step()
    state = optimizer.state[p]
    moments = state["exp_avg"].clone()
    state["scale_row"][:, 0] = 0.0
    with pytest.warns(UserWarning, match="w: most of its edited weights"):
        optimizer.resync()
    agrees(optimizer, p)
    assert not bool(state["scale_row_exp_avg"].any()) and torch.equal(state["exp_avg"], moments)
    assert bool((state["scale_row"][:, :3] == 1).all())


def test_a_weight_edited_to_nan_is_refused_until_it_is_repaired() -> None:
    """Guard: Shadow._take remembers p only when its values have been taken, so that the next step refuses as well."""
    model, optimizer = trained()
    p = matrices(model)[0]
    weights = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        p[0, 0] = float("nan")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"layers\.0\.weight was edited and has non-finite weights"):
            train(model, optimizer, range(3, 4))
    model.load_state_dict(weights)
    train(model, optimizer, range(3, 4))
    assert bool(p.isfinite().all())


def test_a_scale_that_stops_training_is_not_forgotten() -> None:
    """Guard: Shadow._remember keeps has_n of the step, so that n counts after it has been frozen."""
    model, optimizer = trained(scale_lr={"e": 1.0, "n": 5.0})
    optimizer.param_groups[0]["scale_lr"] = {"e": 1.0}
    train(model, optimizer, range(3, 5))
    for p in matrices(model):
        assert bool((optimizer.scales(p)["n"][0] != 0).any())
        agrees(optimizer, p)


def test_untouched_weights_cost_no_look_at_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard: "tracked" remembers every write of its own, also of the first step and of a load."""
    model, optimizer = trained()
    optimizer.load_state_dict(through_file(optimizer.state_dict()))
    train(model, optimizer, range(3, 4))

    def looked(*args: Any) -> None:
        raise AssertionError("values were compared")

    monkeypatch.setattr(SELAdam, "_take", looked)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, range(4, 6))
        optimizer.state_dict()
