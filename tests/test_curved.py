"""Curved: SELAdam where the class is Adam, and every dense torch.optim class behind the same face."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from seloptim import Curved, SELAdam
from seloptim._shadow import differing
from seloptim.functional import sel_forward

from .cases import STRUCTURES, mixed

FLAT = {"beta": 2.0, "combine": "congruent", "structure": "none", "scale_init": {"e": 0.0, "l": "beta"}}
# Options under which each class makes good way on a small regression, curved with a small rate of the scales.
CLASSES: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.01},
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 0.02},
    "Adagrad": {"lr": 0.02},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "Muon": {"lr": 0.02},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.003},
    "Rprop": {"lr": 0.003},
    "SGD": {"lr": 0.01, "momentum": 0.9},
}
REFUSED = {"LBFGS": "needs a closure", "SparseAdam": "takes sparse gradients"}
SLOW_SCALES = {"e": 0.01, "l": 0.01}


def torch_classes() -> Iterator[str]:
    for name in torch.optim.__all__:
        found = getattr(torch.optim, name)
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer:
            yield name


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    shapes = ((5, 4), (5, 4), (4,), (3, 2, 2, 2))
    return [nn.Parameter(mixed(*shape, seed=k, size=0.2, dtype=dtype)) for k, shape in enumerate(shapes)]


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    for k, p in enumerate(params):
        p.grad = mixed(*p.shape, seed=100 * step + k, dtype=p.dtype) + 0.3 * p.detach()


def regression(bias: bool = True) -> tuple[nn.Module, Callable[[], Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8, bias), nn.Tanh(), nn.Linear(8, 1, bias))
    x = torch.randn(64, 4)
    y = torch.sin(x.sum(1, keepdim=True))
    return net, lambda: (net(x) - y).square().mean()


def train(optimizer: torch.optim.Optimizer, loss_of: Callable[[], Tensor], steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()


def assert_invariant(optimizer: Curved) -> None:
    for _, p in optimizer.named_curved():
        scales = (row * col for row, col in optimizer.scales(p).values())
        weight = sel_forward(optimizer.raw(p), *scales, beta=optimizer.beta(p))
        assert not bool(differing(p.detach(), weight).any())


# -------------------------------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize(
    "options",
    [
        *({"structure": structure} for structure in STRUCTURES),
        {"combine": "congruent", "beta": 12.5, "curved": "all"},
        {"amsgrad": True, "betas": (0.8, 0.9), "eps": 1e-6, "maximize": True},
        {"lr_space": "weight", "anneal_steps": 10, "scale_lr": {"e": (8.0, 1.3), "n": 1.0}},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "residual_rank": 2},
        {"foreach": True, "init": "mismatched", "scale_init": {"e": "beta"}, "beta": 3.0},
    ],
    ids=str,
)
def test_curved_adam_is_seladam(options: dict[str, Any]) -> None:
    ours, theirs = parameters(), parameters()
    curved, adam = Curved(torch.optim.Adam, ours, lr=1e-2, **options), SELAdam(theirs, 1e-2, **options)
    for step in range(25):
        for params, optimizer in ((ours, curved), (theirs, adam)):
            set_gradients(params, step)
            if step % 3 == 1:
                params[0].grad = None
            optimizer.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    for a, b in zip(ours, theirs, strict=True):
        for key, value in adam.state[b].items():
            other = curved.state[a].get(key, curved.state[a].get(f"inner_{key}"))
            torch.testing.assert_close(other, value, rtol=0, atol=1e-9)


def test_curved_adamw_is_seladamw_by_its_own_default_decay() -> None:
    ours, theirs = parameters(), parameters()
    optimizers = Curved(torch.optim.AdamW, ours), SELAdam(theirs, weight_decay=1e-2, decoupled_weight_decay=True)
    for step in range(5):
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            set_gradients(params, step)
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", CLASSES)
def test_the_flat_map_leaves_every_class_as_it_is(name: str) -> None:
    """With e = 0 and l = beta, weight = raw: each class then takes its own steps, decay and all."""
    make = getattr(torch.optim, name)
    options = {**CLASSES[name], "weight_decay": 0.1} if name != "Rprop" else CLASSES[name]
    few = slice(0, 2) if name == "Muon" else slice(None)
    ours, theirs = parameters()[few], parameters()[few]
    curved, plain = Curved(make, ours, **FLAT, **options), make(theirs, **options)
    for step in range(10):
        for params, optimizer in ((ours, curved), (theirs, plain)):
            set_gradients(params, step)
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "Muon"])
def test_parameters_that_are_not_curved_are_stepped_bit_for_bit(name: str) -> None:
    make = getattr(torch.optim, name)
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    curved, plain = Curved(make, ours, curved="none", **CLASSES[name]), make(theirs, **CLASSES[name])
    for step in range(5):
        for params, optimizer in ((ours, curved), (theirs, plain)):
            set_gradients(params, step)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# ----------------------------------------------------------------------------------------------------- torch.optim's classes


def test_every_torch_class_is_in_one_of_the_two_lists() -> None:
    assert sorted(torch_classes()) == sorted([*CLASSES, *REFUSED])


@pytest.mark.parametrize("name", CLASSES)
def test_every_dense_class_descends_curved_and_keeps_the_invariant(name: str) -> None:
    net, loss_of = regression(bias=name != "Muon")
    optimizer = Curved(getattr(torch.optim, name), net.named_parameters(), scale_lr=SLOW_SCALES, **CLASSES[name])
    first = loss_of().item()
    start = {name: p.detach().clone() for name, p in optimizer.named_curved()}
    train(optimizer, loss_of, 60)
    assert loss_of().item() < 0.8 * first
    assert [name for name, _ in optimizer.named_curved()] == ["0.weight", "2.weight"]
    for name, p in optimizer.named_curved():
        assert not torch.equal(p, start[name])
        assert not torch.equal(p, optimizer.raw(p))
        assert not torch.equal(optimizer.scales(p)["e"][0], torch.ones_like(optimizer.scales(p)["e"][0]))
    assert_invariant(optimizer)


@pytest.mark.parametrize("name", REFUSED)
def test_classes_that_cannot_run_on_raw_weights_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}.*{REFUSED[name]}"):
        Curved(getattr(torch.optim, name), parameters())


def test_muon_for_matrices_with_adam_beside_it() -> None:
    net, loss_of = regression()
    matrices = Curved(
        torch.optim.Muon, [p for p in net.parameters() if p.dim() == 2], lr=0.02, scale_lr=SLOW_SCALES, weight_decay=0.0
    )
    rest = torch.optim.Adam([p for p in net.parameters() if p.dim() != 2], 0.01)
    first = loss_of().item()
    for _ in range(60):
        matrices.zero_grad()
        rest.zero_grad()
        loss_of().backward()
        matrices.step()
        rest.step()
    assert loss_of().item() < 0.8 * first
    assert_invariant(matrices)
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        Curved(torch.optim.Muon, net.parameters())


class Signed(torch.optim.Optimizer):
    """A class of a user's own: no options but lr, state that is replaced and not written to."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"count": self.state[p].get("count", 0) + 1}
                p.add_(p.grad.sign(), alpha=-group["lr"])


def test_a_class_of_ones_own() -> None:
    net, loss_of = regression()
    optimizer = Curved(Signed, net.parameters(), scale_lr=SLOW_SCALES)
    first = loss_of().item()
    train(optimizer, loss_of, 20)
    assert loss_of().item() < 0.8 * first
    weight, bias, *_ = net.parameters()
    assert optimizer.state[weight]["inner_count"] == 20
    assert optimizer.state[bias] == {"count": 20}


class Counting(Signed):
    """State in the group, as schedule-free optimizers have it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


@pytest.mark.parametrize("curved", ["matrices", "none"])
def test_a_class_that_keeps_state_in_its_groups_is_refused(curved: str) -> None:
    """It would begin anew at every step. Guard: Curved._run; the weights have not moved."""
    (p,) = parameters()[:1]
    before = p.detach().clone()
    optimizer = Curved(Counting, [p], curved=curved, scale_lr=SLOW_SCALES)
    set_gradients([p], 0)
    with pytest.raises(TypeError, match="Counting keeps k in its param groups"):
        optimizer.step()
    assert curved == "none" or torch.equal(p, before)


# -------------------------------------------------------------------------------------------------- groups and schedulers


def test_groups_have_options_of_both_kinds_and_the_inner_rate_follows_schedulers() -> None:
    ours, theirs = parameters(), parameters()
    curved = Curved(
        torch.optim.SGD,
        [{"params": ours[:1], "momentum": 0.5, "lr": 0.02}, {"params": ours[1:], "curved": False}],
        lr=0.01,
        **FLAT,
    )
    plain = torch.optim.SGD([{"params": theirs[:1], "momentum": 0.5, "lr": 0.02}, {"params": theirs[1:]}], lr=0.01)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) for optimizer in (curved, plain)]
    for step in range(10):
        for params, optimizer, scheduler in zip((ours, theirs), (curved, plain), schedulers, strict=True):
            set_gradients(params, step)
            optimizer.step()
            scheduler.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert [name for name, _ in curved.named_curved()] == ["0.0"]


def test_one_cycle_rewrites_momentum_of_the_inner_optimizer() -> None:
    ours, theirs = parameters(), parameters()
    optimizers = Curved(torch.optim.SGD, ours, lr=0.01, momentum=0.9, **FLAT), torch.optim.SGD(theirs, 0.01, 0.9)
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=10) for optimizer in optimizers]
    for step in range(9):
        for params, optimizer, scheduler in zip((ours, theirs), optimizers, schedulers, strict=True):
            set_gradients(params, step)
            optimizer.step()
            scheduler.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_group_added_later_is_curved_too() -> None:
    params = parameters()
    optimizer = Curved(torch.optim.SGD, params[:1], lr=0.01, momentum=0.9)
    set_gradients(params, 0)
    optimizer.step()
    optimizer.add_param_group({"params": params[1:2], "momentum": 0.0})
    optimizer.step()
    assert_invariant(optimizer)
    assert optimizer.state[params[0]]["inner_momentum_buffer"] is not None
    assert optimizer.state[params[1]].get("inner_momentum_buffer") is None
    with pytest.raises(ValueError, match="Invalid combine: 'x'"):
        optimizer.add_param_group({"params": params[2:], "combine": "x"})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("zero", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_step_at_rate_zero_moves_no_bit(name: str, zero: Any) -> None:
    params = parameters(torch.float32)[:2]
    optimizer = Curved(getattr(torch.optim, name), params, scale_lr=SLOW_SCALES, **CLASSES[name])
    set_gradients(params, 0)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = zero
    before = [(p.detach().clone(), optimizer.raw(p).clone(), optimizer.state[p]["scale_row"].clone()) for p in params]
    set_gradients(params, 1)
    optimizer.step()
    for p, (weight, raw, row) in zip(params, before, strict=True):
        assert torch.equal(p, weight)
        assert torch.equal(optimizer.raw(p), raw)
        assert torch.equal(optimizer.state[p]["scale_row"], row)


def test_a_step_reads_gradients_and_writes_none() -> None:
    params = parameters()
    optimizer = Curved(torch.optim.SGD, params, lr=0.01)
    set_gradients(params, 0)
    before = [p.grad.clone() for p in params if p.grad is not None]
    optimizer.step()
    assert all(p.grad is not None and torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))
    assert all(optimizer.raw(p).grad is None for _, p in optimizer.named_curved())


def test_hooks_fire_once_and_the_closure_runs_once() -> None:
    params = parameters()
    optimizer = Curved(torch.optim.SGD, params, lr=0.01)
    calls: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre")),
        optimizer.register_step_post_hook(lambda *_: calls.append("post")),
        register_optimizer_step_pre_hook(lambda *_: calls.append("global")),
    ]

    def closure() -> float:
        assert torch.is_grad_enabled()
        calls.append("closure")
        set_gradients(params, 0)
        return 1.5

    try:
        assert optimizer.step(closure) == 1.5
    finally:
        for handle in handles:
            handle.remove()
    assert sorted(calls) == ["closure", "global", "post", "pre"]


# ------------------------------------------------------------------------------------------------------- saving, copying


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CLASSES)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    make = getattr(torch.optim, name)
    few = slice(0, 2) if name == "Muon" else slice(None)
    params = parameters(dtype)[few]
    options = {**CLASSES[name], "scale_lr": SLOW_SCALES}
    optimizer = Curved(make, params, **options)
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = Curved(make, others, **options)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for step in range(3, 6):
        for ps, each in ((params, optimizer), (others, resumed)):
            set_gradients(ps, step)
            each.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    for a, b in zip(params, others, strict=True):
        ours, theirs = optimizer.state[a], resumed.state[b]
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            same = torch.equal(value, theirs[key]) if isinstance(value, Tensor) else value == theirs[key]
            assert same, key
            if isinstance(value, Tensor):
                assert value.dtype == theirs[key].dtype and value.data_ptr() != theirs[key].data_ptr()


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
def test_a_deep_copy_goes_on_alone(name: str) -> None:
    net, loss_of = regression()
    optimizer = Curved(getattr(torch.optim, name), net.parameters(), scale_lr=SLOW_SCALES, **CLASSES[name])
    train(optimizer, loss_of, 3)
    twin_optimizer, twin = copy.deepcopy((optimizer, net))
    for each in (optimizer, twin_optimizer):
        params = [p for group in each.param_groups for p in group["params"]]
        for step in range(3):
            set_gradients(params, step)
            each.step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))
    assert twin_optimizer.optimizer_class is optimizer.optimizer_class


def test_states_of_other_optimizers_are_refused_and_change_nothing() -> None:
    params = parameters()
    optimizer = Curved(torch.optim.SGD, params, lr=0.01)
    before = copy.deepcopy(optimizer.state_dict())
    for other, name in (
        (Curved(torch.optim.Adam, params), r"torch\.optim\.adam\.Adam"),
        (SELAdam(params), "SELAdam"),
        (torch.optim.SGD(params), "a plain optimizer"),
    ):
        with pytest.raises(ValueError, match=rf"saved by {name}.*Curved\(torch\.optim\.sgd\.SGD\)"):
            optimizer.load_state_dict(other.state_dict())
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------------ edits, accessors


def test_edits_are_taken_into_raw_and_the_inner_state_stays() -> None:
    params = parameters()
    optimizer = Curved(torch.optim.SGD, params, lr=0.01, momentum=0.9, structure="none")
    set_gradients(params, 0)
    optimizer.step()
    momentum = optimizer.state[params[0]]["inner_momentum_buffer"].clone()
    with torch.no_grad():
        params[0].mul_(0.5)
    params[1].data.mul_(0.5)
    optimizer.resync(params[1])
    edited = [p.detach().clone() for p in params[:2]]
    assert torch.equal(optimizer.state[params[0]]["inner_momentum_buffer"], momentum)
    optimizer.zero_grad()
    for p in params:
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    optimizer.step()
    for p, value in zip(params[:2], edited, strict=True):
        torch.testing.assert_close(p.detach(), value, rtol=1e-12, atol=1e-12)
    assert_invariant(optimizer)


def test_describe_counts_the_state_that_is_there() -> None:
    net, loss_of = regression()
    optimizer = Curved(torch.optim.SGD, net.named_parameters(), lr=0.01, momentum=0.9, beta=12.5)
    train(optimizer, loss_of, 1)
    rows = {line.split()[0]: line for line in optimizer.describe().splitlines()}
    weight = (8 * 4 * 2 + 3 * 8 * 4 + 3 * 4 * 4) * 4 + 4  # raw and momentum, both factors with two moments, the step
    assert rows["0.weight"].endswith(f" {weight}") and "mismatched" in rows["0.weight"]
    assert rows["0.bias"].endswith(f" {8 * 4}") and "no: 1-D" in rows["0.bias"]


def test_adagrad_s_state_is_made_with_ours() -> None:
    params = parameters()
    optimizer = Curved(torch.optim.Adagrad, params, initial_accumulator_value=0.5, curved="all")
    state = optimizer.state_dict()["state"][0]
    assert torch.equal(state["inner_sum"], torch.full((5, 4), 0.5).double())


# ----------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (torch.optim.SGD([nn.Parameter(torch.ones(1))]), {}, TypeError, r"takes an optimizer class first, got SGD"),
        (SELAdam, {}, TypeError, r"SELAdam curves weights by itself"),
        (torch.optim.SGD, {"lr": -1.0}, ValueError, r"Invalid learning rate: -1.0"),
        (torch.optim.SGD, {"momentun": 0.9}, TypeError, r"Curved\(SGD\) has no option momentun=0.9; .*'momentum'"),
        (torch.optim.SGD, {"curvd": "all"}, TypeError, r"has no option curvd='all'; did you mean 'curved'\?"),
        (torch.optim.SGD, {"curved": True}, ValueError, r"curved=True stands in a group"),
        (torch.optim.SGD, {"beta": (0.9, 0.99)}, ValueError, r"did you mean betas"),
        (torch.optim.SGD, {"differentiable": True}, ValueError, r"differentiable=True is not supported by Curved"),
        (torch.optim.SGD, {"batch_dims": 3}, ValueError, r"batch_dims=3"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(make: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Curved(make, parameters()[:1], **{"lr": 0.01, **options})


def test_a_class_without_a_rate_is_refused() -> None:
    class NoRate(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    with pytest.raises(TypeError, match="NoRate has no lr"):
        Curved(NoRate, parameters())


def test_scales_that_would_run_away_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"scales of SGD's parameters would move by 0.387 a step.*smaller scale_lr"):
        Curved(torch.optim.SGD, parameters(), lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Curved(torch.optim.SGD, parameters(), lr=0.5, scale_lr=SLOW_SCALES)
        Curved(torch.optim.SGD, parameters(), lr=0.5, structure="none")
        Curved(torch.optim.SGD, parameters(), lr=0.5, curved="none")


def test_sparse_gradients_are_refused() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    p.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(RuntimeError, match="Curved does not support sparse gradients"):
        Curved(torch.optim.SGD, [p], lr=0.01).step()
