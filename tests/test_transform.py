"""The TorchOpt transformations: equal to SELAdam, pure, differentiable, accepted wherever TorchOpt takes one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seloptim import SELAdam
from seloptim._rule import Hyper, Slot, update
from seloptim.functional import sel_forward
from seloptim.transform import SELState, sel, sel_adam

from .cases import STRUCTURES, mixed

torchopt = pytest.importorskip("torchopt")

SHAPES = {"matrix": (5, 4), "vector": (4,), "conv": (3, 2, 2, 2), "number": ()}
ALIASES: dict[str, Callable[[], Any]] = {
    "adadelta": lambda: torchopt.adadelta(1.0),
    "adagrad": lambda: torchopt.adagrad(0.05),
    "adam": lambda: torchopt.adam(0.01),
    "adamax": lambda: torchopt.adamax(0.01),
    "adamw": lambda: torchopt.adamw(0.01),
    "radam": lambda: torchopt.radam(0.03),
    "rmsprop": lambda: torchopt.rmsprop(0.01),
    "sgd": lambda: torchopt.sgd(0.005, momentum=0.9),
}


def start(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {name: some(shape, seed + k, dtype) * 0.2 for k, (name, shape) in enumerate(SHAPES.items())}


def some(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    return mixed(*shape, seed=seed, dtype=dtype) if shape else mixed(2, seed=seed, dtype=dtype)[1]


def gradients(params: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """Of both signs, with exact zeros; they depend on where the parameters are."""
    return {
        name: some(tuple(p.shape), 100 * step + k, p.dtype) + 0.3 * p.detach()
        for k, (name, p) in enumerate(params.items())
    }


def leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torchopt.pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


# -------------------------------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        *({"structure": structure} for structure in STRUCTURES),
        {"combine": "congruent", "beta": 12.5},
        {"anneal_steps": 10, "scale_lr": {"e": (8.0, 1.3), "m": 0.5, "n": 2.0}},
        {"scale_init": {"e": "beta", "n": 0.3}, "beta": 3.0, "weight_decay": 0.1, "b1": 0.8, "b2": 0.9, "eps": 1e-6},
    ],
    ids=str,
)
def test_sel_adam_is_seladam_in_curved_weight_space(options: dict[str, Any], inplace: bool) -> None:
    params = start()
    twins = {name: nn.Parameter(p.clone()) for name, p in params.items()}
    named = dict(options)
    betas, eps = (named.pop("b1", 0.9), named.pop("b2", 0.999)), named.pop("eps", 1e-8)
    optimizer = SELAdam(
        twins.items(), 1e-2, betas, eps, curved="all", lr_space="raw", decoupled_weight_decay=True, **named
    )
    transformation = sel_adam(1e-2, **options)
    state = transformation.init(params)
    for step in range(25):
        grads: dict[str, Any] = gradients(params, step)
        if step % 3 == 1:
            grads["vector"] = None  # each parameter counts its own steps
        for name, twin in twins.items():
            twin.grad = None if grads[name] is None else grads[name].clone()
        updates, state = transformation.update(grads, state, params=params, inplace=inplace)
        params = torchopt.apply_updates(params, updates, inplace=inplace)
        optimizer.step()
        for name, twin in twins.items():
            torch.testing.assert_close(params[name], twin.detach(), rtol=0, atol=1e-9)
    for name, twin in twins.items():
        assert not torch.equal(params[name], start()[name])
        torch.testing.assert_close(state.raw[name], optimizer.raw(twin), rtol=0, atol=1e-9)
        for key in ("scale_row", "scale_col_exp_avg_sq"):
            torch.testing.assert_close(
                getattr(state.scales[name], key), optimizer.state[twin].get(key), rtol=0, atol=1e-9
            )


@pytest.mark.parametrize("curvature", ["auto", "width"])
def test_stacked_matrices_are_seladam_s(curvature: str) -> None:
    p = mixed(3, 4, 5, seed=1, size=0.1)
    twin = nn.Parameter(p.clone())
    optimizer = SELAdam([twin], 1e-2, batch_dims=1, beta=curvature, lr_space="raw")
    params = (p,)
    transformation = sel_adam(1e-2, batch_dims=1, beta=curvature)
    state = transformation.init(params)
    for step in range(5):
        twin.grad = mixed(3, 4, 5, seed=step)
        updates, state = transformation.update((twin.grad.clone(),), state, params=params, inplace=False)
        params = torchopt.apply_updates(params, updates, inplace=False)
        optimizer.step()
    torch.testing.assert_close(params[0], twin.detach(), rtol=0, atol=1e-9)


def test_a_schedule_counts_completed_updates_as_a_scheduler_does() -> None:
    params = start()
    twins = {name: nn.Parameter(p.clone()) for name, p in params.items()}
    optimizer = SELAdam(twins.items(), 1e-2, curved="all", lr_space="raw")
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)
    # TorchOpt's own schedules compute in float32.
    transformation = sel_adam(lambda count: 1e-2 + (1e-3 - 1e-2) * min(int(count), 10) / 10)
    state = transformation.init(params)
    for step in range(12):
        grads = gradients(params, step)
        for name, twin in twins.items():
            twin.grad = grads[name].clone()
        updates, state = transformation.update(grads, state, params=params, inplace=False)
        params = torchopt.apply_updates(params, updates, inplace=False)
        optimizer.step()
        scheduler.step()
    for name, twin in twins.items():
        torch.testing.assert_close(params[name], twin.detach(), rtol=0, atol=1e-9)


def test_torchopt_s_schedules_are_read() -> None:
    params = start()
    ends = []
    for lr in (torchopt.schedule.linear_schedule(1e-2, 1e-2, 10), 1e-2):
        transformation = sel(torchopt.adam(lr), lr=lr)
        updates, _ = transformation.update(
            gradients(params, 0), transformation.init(params), params=params, inplace=False
        )
        ends.append(updates)
    for name in SHAPES:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=1e-6, atol=0)


def test_the_inner_transformation_may_be_torchopt_s_adam() -> None:
    """Its moments are exact to float32 rounding: it raises float32 powers of the decay rates."""
    found = []
    for transformation in (sel_adam(1e-2), sel(torchopt.adam(1e-2), lr=1e-2)):
        params = start()
        state = transformation.init(params)
        for step in range(10):
            updates, state = transformation.update(gradients(params, step), state, params=params, inplace=False)
            params = torchopt.apply_updates(params, updates, inplace=False)
        found.append(params)
    for name in SHAPES:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=0, atol=1e-4 * 1e-2 * 10)


@pytest.mark.parametrize("alias", ALIASES)
def test_the_flat_map_leaves_the_inner_transformation_as_it_is(alias: str) -> None:
    """With e = 0 and l = beta, weight = raw: every alias then takes its own steps."""
    plain, curved = start(), start()
    flat = {"beta": 2.0, "combine": "congruent", "structure": "none", "scale_init": {"e": 0.0, "l": "beta"}}
    inner, transformation = ALIASES[alias](), sel(ALIASES[alias](), **flat)
    states = inner.init(plain), transformation.init(curved)
    for step in range(10):
        grads = gradients(plain, step)
        ours, state = transformation.update(grads, states[1], params=curved, inplace=False)
        theirs, inner_state = inner.update(grads, states[0], params=plain, inplace=False)
        states = inner_state, state
        curved = torchopt.apply_updates(curved, ours, inplace=False)
        plain = torchopt.apply_updates(plain, theirs, inplace=False)
    for name in SHAPES:
        torch.testing.assert_close(curved[name], plain[name], rtol=0, atol=1e-12)


# -------------------------------------------------------------------------------------------------------- differentiation


def inner_loop(
    initial: dict[str, Tensor], rate: Tensor, lr: Tensor, make: Callable[[Tensor, Tensor], Any], steps: int = 4
) -> Tensor:
    """The loss behind a few steps, differentiable in the initialisation, a scale's rate and the learning rate."""
    x, y = mixed(6, 4, seed=7), mixed(6, 5, seed=8)

    def loss_of(params: dict[str, Tensor]) -> Tensor:
        return (torch.tanh(x @ params["matrix"].T + params["vector"]) - y).square().mean()

    transformation = make(rate, lr)
    params, state = initial, transformation.init(initial)
    for _ in range(steps):
        grads = torch.autograd.grad(loss_of(params), list(params.values()), create_graph=True)
        updates, state = transformation.update(
            dict(zip(params, grads, strict=True)), state, params=params, inplace=False
        )
        params = torchopt.apply_updates(params, updates, inplace=False)
    return loss_of(params)


MAKERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sel_adam": lambda rate, lr: sel_adam(lr, eps=1e-3, scale_lr={"e": rate, "l": 3.0, "m": 0.5}, beta=4.0),
    "sel_adam, congruent, decay, n": lambda rate, lr: sel_adam(
        lr, eps=1e-3, weight_decay=0.1, combine="congruent", beta=4.0, scale_lr={"e": 1.0, "n": rate}
    ),
    "sel(sgd)": lambda rate, lr: sel(
        torchopt.sgd(0.1, momentum=0.9, moment_requires_grad=True), lr=lr, eps=1e-3, beta=4.0, scale_lr={"e": rate}
    ),
    "sel(adam), one number a scale": lambda rate, lr: sel(
        torchopt.adam(0.01, eps_root=1e-6),
        lr=lr,
        eps=1e-3,
        beta=4.0,
        structure="scalar",
        scale_lr={"e": rate, "m": 1.0},
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_meta_gradients_equal_finite_differences(name: str) -> None:
    make = MAKERS[name]
    matrix, vector = mixed(5, 4, seed=3, size=0.3), mixed(5, seed=4, size=0.3)
    # Central differences do not see the kink that the map has at a weight of exactly zero.
    matrix[matrix == 0], vector[vector == 0] = 0.1, -0.1

    def meta(matrix: Tensor, vector: Tensor, rate: Tensor, lr: Tensor) -> Tensor:
        return inner_loop({"matrix": matrix, "vector": vector}, rate, lr, make)

    inputs = [t.requires_grad_() for t in (matrix, vector, torch.tensor(2.0).double(), torch.tensor(0.02).double())]
    grads = torch.autograd.grad(meta(*inputs), inputs)
    assert all(bool((grad != 0).any()) for grad in grads)
    assert torch.autograd.gradcheck(meta, inputs, eps=1e-6, atol=1e-8, rtol=1e-5)


def test_meta_gradients_are_finite_where_gradients_are_exactly_zero() -> None:
    """Column factors of n have zero gradients at the start, and so do weights of inputs that are always zero."""
    initial = {"matrix": mixed(5, 4, size=0.3).requires_grad_(), "vector": torch.zeros(5).double().requires_grad_()}
    rate, lr = (torch.tensor(v).double().requires_grad_() for v in (1.0, 0.01))
    loss = inner_loop(initial, rate, lr, lambda rate, lr: sel_adam(lr, scale_lr={"e": rate, "n": 1.0}), steps=3)
    for grad in torch.autograd.grad(loss, [*initial.values(), rate, lr]):
        assert bool(grad.isfinite().all())


def test_the_guarded_root_keeps_the_bits_of_the_eager_step() -> None:
    values = mixed(50, seed=1).abs()
    hyper = Hyper(0.1, 0.9, 0.999, 1e-8, 0.0, True, False, False)
    found = []
    for requires_grad in (False, True):
        slot = Slot(values.clone(), values.clone(), values.clone(), None)
        grad = torch.where(values == 0, 0.0, mixed(50, seed=2)).requires_grad_(requires_grad)
        update(slot, grad, hyper, 3, 0.1)
        found.append(slot)
    assert all(torch.equal(a, b.detach()) for a, b in zip(found[0][:3], found[1][:3], strict=True))


def test_inplace_updates_record_no_graph() -> None:
    params = {name: nn.Parameter(p) for name, p in start().items()}
    transformation = sel_adam(1e-2)
    state = transformation.init(params)
    assert leaves(state.raw)[0].requires_grad
    updates = None
    for step in range(2):
        updates, state = transformation.update(gradients(params, step), state, params=params, inplace=True)
        torchopt.apply_updates(params, updates, inplace=True)
    assert not any(leaf.requires_grad for leaf in leaves((updates, state)))


# ----------------------------------------------------------------------------------------------------------------- purity


@pytest.mark.parametrize("alias", [*ALIASES, None])
def test_without_inplace_nothing_that_was_given_changes_and_nothing_is_shared(alias: str | None) -> None:
    transformation = sel(ALIASES[alias](), lr=1e-2) if alias else sel_adam(1e-2)
    params = start()
    state = transformation.init(params)
    assert not {t.data_ptr() for t in leaves(state)} & {t.data_ptr() for t in params.values()}
    for step in range(3):
        grads = gradients(params, step)
        given = [params, grads, state]
        before = [leaf.clone() for leaf in leaves(given)]
        updates, new = transformation.update(grads, state, params=params, inplace=False)
        assert all(torch.equal(a, b) for a, b in zip(leaves(given), before, strict=True))
        ours = leaves((updates, new.raw, new.scales, new.count))
        pointers = [t.data_ptr() for t in ours]
        assert len(set(pointers)) == len(pointers)
        assert not set(pointers) & {t.data_ptr() for t in leaves(given)}
        params, state = torchopt.apply_updates(params, updates, inplace=False), new


def test_inplace_gives_the_same_numbers_and_leaves_gradients_alone() -> None:
    found = []
    for inplace in (True, False):
        params = start(dtype=torch.float32)
        transformation = sel(torchopt.sgd(1e-3, momentum=0.9), lr=1e-2)
        state = transformation.init(params)
        for step in range(5):
            grads = gradients(start(dtype=torch.float32), step)
            before = {name: grad.clone() for name, grad in grads.items()}
            updates, state = transformation.update(grads, state, params=params, inplace=inplace)
            assert all(torch.equal(grads[name], before[name]) for name in grads)
            params = torchopt.apply_updates(params, updates, inplace=inplace)
        found.append((params, state))
    for a, b in zip(leaves(found[0]), leaves(found[1]), strict=True):
        assert torch.equal(a, b)


def test_none_leaves_of_parameters_and_of_gradients() -> None:
    params: dict[str, Any] = {**start(), "nothing": None, "unused": mixed(2, 2, size=0.1)}
    transformation = sel_adam(1e-2)
    state = transformation.init(params)
    assert state.raw["nothing"] is None and state.scales["nothing"] is None
    grads: dict[str, Any] = {**gradients(start(), 0), "nothing": None, "unused": None}
    updates, new = transformation.update(grads, state, params=params, inplace=False)
    assert updates["nothing"] is None and updates["unused"] is None
    assert int(new.count["unused"]) == 0 and int(new.count["matrix"]) == 1
    assert torch.equal(new.raw["unused"], state.raw["unused"])
    moved = torchopt.apply_updates(params, updates, inplace=False)
    assert torch.equal(moved["unused"], params["unused"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_float32_state_and_lands_on_its_map(dtype: torch.dtype) -> None:
    params = start(dtype=dtype)
    transformation = sel_adam(1e-3, structure="none", beta=12.5)
    state = transformation.init(params)
    for step in range(10):
        updates, state = transformation.update(gradients(params, step), state, params=params, inplace=False)
        assert {u.dtype for u in updates.values()} == {dtype}
        params = torchopt.apply_updates(params, updates, inplace=False)
    for name, p in params.items():
        assert state.raw[name].dtype == torch.float32
        weight = sel_forward(state.raw[name], beta=12.5).to(dtype)
        assert bool(((p - weight).abs() <= torch.finfo(dtype).eps * weight.abs()).all())
        assert float((p == weight).double().mean()) > 0.7


def test_an_edit_of_the_parameters_is_taken_back() -> None:
    params = start()
    transformation = sel_adam(1e-2)
    state = transformation.init(params)
    edited = {name: p + 1 for name, p in params.items()}
    ends = []
    for given in (params, edited):
        updates, _ = transformation.update(gradients(params, 0), state, params=given, inplace=False)
        ends.append(torchopt.apply_updates(given, updates, inplace=False))
    for name in SHAPES:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=0, atol=1e-12)


# --------------------------------------------------------------------------------------------------- TorchOpt's interface


def regression() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(64, 4)
    y = torch.sin(x.sum(1, keepdim=True))
    return net, lambda net: (net(x) - y).square().mean()


def clipped(transformation: Any) -> Any:
    return torchopt.chain(torchopt.clip.clip_grad_norm(0.5), transformation)


@pytest.mark.parametrize("wrap", [lambda t: t, clipped], ids=["bare", "chain(clip)"])
@pytest.mark.parametrize("alias", [*ALIASES, None])
def test_every_alias_descends_curved(alias: str | None, wrap: Callable[[Any], Any]) -> None:
    net, loss_of = regression()
    transformation = sel(ALIASES[alias](), lr=1e-3) if alias else sel_adam(1e-2)
    optimizer = torchopt.Optimizer(net.parameters(), wrap(transformation))
    first = loss_of(net).item()
    for _ in range(30):
        optimizer.zero_grad()
        loss_of(net).backward()
        optimizer.step()
    assert loss_of(net).item() < 0.8 * first
    state = optimizer.state_groups[0]
    state = state if isinstance(state, SELState) else state[-1]
    for p, raw, scales in zip(net.parameters(), state.raw, state.scales, strict=True):
        row, col = scales.scale_row, scales.scale_col
        e, l, m, n = row.unbind(-1) if col is None else (row.unsqueeze(1) * col).unbind(-1)
        weight = sel_forward(raw, e, l, m, n, beta=float(scales.beta))
        torch.testing.assert_close(weight, p.detach(), rtol=1e-5, atol=1e-6)
        assert not torch.equal(raw, p)


@pytest.mark.parametrize("wrap", [lambda t: t, clipped], ids=["bare", "chain(clip)"])
def test_func_optimizer(wrap: Callable[[Any], Any]) -> None:
    x, y = mixed(32, 4, seed=1), mixed(32, 3, seed=2)
    params = (mixed(3, 4, size=0.2).requires_grad_(), torch.zeros(3).double().requires_grad_())
    optimizer = torchopt.FuncOptimizer(wrap(sel_adam(1e-2)))

    def loss_of(params: tuple[Tensor, ...]) -> Tensor:
        return (x @ params[0].T + params[1] - y).square().mean()

    first = loss_of(params).item()
    initial = params
    for _ in range(5):
        params = optimizer.step(loss_of(params), params)
    assert loss_of(params).item() < first
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(loss_of(params), initial))


def test_meta_optimizer_in_a_loop_over_tasks() -> None:
    """Model-agnostic meta-learning as TorchOpt writes it: extract, adapt, recover, stop the gradient."""
    net, loss_of = regression()
    rate = torch.tensor(1.0, requires_grad=True)
    inner = torchopt.MetaOptimizer(net, sel_adam(1e-2, scale_lr={"e": rate, "l": 1.0}))
    outer = torch.optim.Adam([*net.parameters(), rate], 1e-2)
    first = loss_of(net).item()
    for _ in range(3):
        outer.zero_grad()
        net_state = torchopt.extract_state_dict(net, by="reference")
        optimizer_state = torchopt.extract_state_dict(inner, by="copy")
        for _ in range(3):
            inner.step(loss_of(net))
        loss_of(net).backward()
        torchopt.recover_state_dict(net, net_state)
        torchopt.recover_state_dict(inner, optimizer_state)
        assert rate.grad is not None and bool(rate.grad != 0)
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in net.parameters())
        outer.step()
    assert loss_of(net).item() < first
    inner.step(loss_of(net))
    torchopt.stop_gradient(inner)
    assert all(leaf.is_leaf for leaf in leaves(inner.state_dict()))


def test_masked_curves_matrices_alone() -> None:
    net, loss_of = regression()
    matrices = [p.dim() >= 2 for p in net.parameters()]
    transformation = torchopt.chain(
        torchopt.transform.masked(sel_adam(1e-2), tuple(matrices)),
        torchopt.transform.masked(torchopt.adam(1e-2), tuple(not matrix for matrix in matrices)),
    )
    optimizer = torchopt.Optimizer(net.parameters(), transformation)
    first = loss_of(net).item()
    for _ in range(20):
        optimizer.zero_grad()
        loss_of(net).backward()
        optimizer.step()
    assert loss_of(net).item() < 0.8 * first


# ----------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, r"Invalid lr: -1.0; use a number >= 0"),
        ({"lr": True}, ValueError, r"Invalid lr: True"),
        ({"b1": 1.0}, ValueError, r"Invalid b1: 1.0; use a number in \[0, 1\)"),
        ({"b2": "0.9"}, ValueError, r"Invalid b2: '0.9'"),
        ({"eps": -1e-8}, ValueError, r"Invalid eps: -1e-08; use a number >= 0"),
        ({"weight_decay": -0.1}, ValueError, r"Invalid weight_decay: -0.1"),
        ({"beta": (0.9, 0.999)}, ValueError, r"did you mean betas"),
        ({"beta": 0.0}, ValueError, r"Invalid beta: 0.0"),
        ({"combine": "other"}, ValueError, r"Invalid combine: 'other'; use one of 'mismatched', 'congruent'"),
        ({"structure": "rows"}, ValueError, r"Invalid structure: 'rows'; use one of 'row_col'"),
        ({"batch_dims": -1}, ValueError, r"Invalid batch_dims: -1; use an int >= 0"),
        ({"batch_dims": 2}, ValueError, r"parameter w: batch_dims=2 is more than its 1 dimensions"),
        ({"scale_lr": {"x": 1.0}}, ValueError, r"Invalid scale_lr: unknown kind 'x'"),
        ({"scale_lr": {"e": -1.0}}, ValueError, r"Invalid scale_lr for e: -1.0"),
        ({"scale_lr": {"e": torch.ones(2)}}, ValueError, r"Invalid scale_lr for e: a tensor of shape \(2,\)"),
        ({"scale_init": {"e": "big"}}, ValueError, r"Invalid scale_init for e: 'big'"),
        ({"anneal_steps": 0}, ValueError, r"anneal_steps must be positive or None, got 0"),
        ({"beta": 0.5}, ValueError, r"parameter w: weight -0.1 .* has no inverse .* least beta that would do is 1"),
        ({"unknown": 1}, TypeError, r"unexpected keyword argument 'unknown'"),
    ],
    ids=str,
)
def test_bad_options_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sel_adam(**options).init({"w": torch.tensor([-0.1, 0.1])})


def test_bad_parameters_and_updates_are_named() -> None:
    transformation = sel_adam()
    with pytest.raises(
        TypeError, match=r"parameter layers.0.w: weights must be real and floating, got torch.complex64"
    ):
        transformation.init({"layers": [{"w": torch.zeros(2, dtype=torch.complex64)}]})
    with pytest.raises(ValueError, match=r"parameter w: .*finite"):
        transformation.init({"w": torch.tensor([1.0, float("nan")])})
    with pytest.raises(ValueError, match=r"parameter w: weights on the meta device, .* materialise them before"):
        transformation.init({"w": torch.empty(2, device="meta")})
    params = {"w": torch.ones(2)}
    with pytest.raises(ValueError, match=r"call update\(updates, state, params=params\)"):
        transformation.update(params, transformation.init(params))


def test_a_missing_torchopt_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchopt", None)
    with pytest.raises(ImportError, match=r'pip install "seloptim\[torchopt\]"'):
        sel_adam()


# ---------------------------------------------------------------------------------------------------------------- example


def test_the_example_learns_to_learn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    path = Path(__file__).parents[1] / "examples" / "meta_learning.py"
    spec = importlib.util.spec_from_file_location("meta_learning", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    threads = torch.get_num_threads()
    try:
        picture = tmp_path / "meta.png"
        before, after = example.main(["--steps", "25", "--tasks", "2", "--test-tasks", "10", "--plot", str(picture)])
    finally:
        torch.set_num_threads(threads)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert after[0, -1] < 0.9 * before[0, -1]
    assert "rates of the scales: e " in capsys.readouterr().out
