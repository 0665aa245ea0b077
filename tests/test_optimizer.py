"""SELAdam's interface: torch.optim.Adam's, its own options, and what an optimizer has to survive."""

from __future__ import annotations

import copy
import inspect
import io
import json
import logging
import math
import pickle
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.testing._internal.common_optimizers import (
    optim_error_inputs_func_adam,
    optim_inputs_func_adam,
    optim_inputs_func_adamw,
)

from seloptim import PAPER_SCALE_LR, SELAdam, SELAdamW, _execute, _rule, init, param_groups
from seloptim.functional import sel_forward
from tests.cases import STRUCTURES, mixed

both = pytest.mark.parametrize("foreach", [False, True], ids=["single", "batched"])
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(6, 4), (6, 4), (3, 2, 2, 2), (5,), (5,), ()]
# weight = raw
DEGENERATE: dict[str, Any] = {
    "curved": "all",
    "combine": "congruent",
    "structure": "none",
    "scale_init": {"e": 0.0, "l": "beta"},
}


def drawn(shape: tuple[int, ...] | torch.Size, seed: int, size: float = 1.0) -> Tensor:
    """Mixed signs and exact zeros, but a lone number is not zero."""
    return (
        mixed(*shape, seed=seed, size=size) if math.prod(shape) != 1 else mixed(2, seed=seed, size=size)[1:].view(shape)
    )


def make(
    shapes: list[tuple[int, ...]] | None = None, dtype: torch.dtype = torch.float32, size: float = 0.1
) -> list[nn.Parameter]:
    return [
        nn.Parameter(drawn(shape, i, size).to(dtype, copy=True))
        for i, shape in enumerate(SHAPES if shapes is None else shapes)
    ]


def give_grads(params: list[nn.Parameter], t: int) -> None:
    for i, p in enumerate(params):
        grad = drawn(p.shape, 1000 * t + i + 7)
        if p.is_complex():
            grad = torch.complex(grad, drawn(p.shape, 1000 * t + i + 500))
        p.grad = torch.empty_like(p).copy_(grad.to(p.dtype))


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 5, start: int = 0) -> None:
    for t in range(start, start + steps):
        give_grads(params, t)
        optimizer.step()


def same(a: Tensor, b: Tensor) -> None:
    """Bit for bit: NaN equals itself, 0.0 is not -0.0."""
    assert a.dtype == b.dtype and a.shape == b.shape
    assert a.detach().contiguous().view(-1).view(torch.uint8).equal(b.detach().contiguous().view(-1).view(torch.uint8))


def bits(optimizer: SELAdam, what: tuple[str, ...] = _rule.VALUES) -> list[Tensor]:
    """Copies of everything of the state that a step with lr = 0 must not touch."""
    return [
        state[key].clone() for state in optimizer.state.values() for key in what if isinstance(state.get(key), Tensor)
    ]


def mapped(optimizer: SELAdam, p: Tensor) -> Tensor:
    group = optimizer._find(p)[0]
    return _rule.push(optimizer._views(p, group), optimizer._curve(p, group)).view(p.shape).to(p.dtype)


def curved_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).to(dtype)


def model_step(model: nn.Module, optimizer: torch.optim.Optimizer, t: int = 0) -> None:
    optimizer.zero_grad()
    p = next(model.parameters())
    model(mixed(8, 4, seed=t + 50, dtype=p.dtype)).square().mean().backward()
    optimizer.step()


# ------------------------------------------------------------------------------------------------ the degenerate setting

ADAM_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "lr": {"lr": 3e-2},
    "betas": {"betas": (0.3, 0.7)},
    "eps": {"eps": 1e-3},
    "coupled_decay": {"weight_decay": 0.1},
    "decoupled_decay": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "amsgrad": {"amsgrad": True, "betas": (0.5, 0.6)},
    "maximize": {"maximize": True},
    "together": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.2, "amsgrad": True, "maximize": True},
    "tensor_lr": {"lr": torch.tensor(3e-3)},
    "tensor_lr_decay": {"lr": torch.tensor(3e-3), "weight_decay": 0.1, "decoupled_weight_decay": True},
    "tensor_lr_1d": {"lr": torch.tensor([3e-3]), "weight_decay": 0.1},
    "tensor_lr_float64": {"lr": torch.tensor(3e-3, dtype=torch.float64), "amsgrad": True},
}


def sel_options(options: dict[str, Any], foreach: bool) -> dict[str, Any]:
    """Adam refuses a tensor lr under foreach=True, and so do we: there, batching starts behind the constructor."""
    return {**copy.deepcopy(options), "foreach": foreach if not isinstance(options.get("lr"), Tensor) else None}


@both
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("beta", [12.5, 3.1])
@pytest.mark.parametrize("name", ADAM_OPTIONS)
def test_degenerate_is_adam_bit_for_bit(name: str, beta: float, dtype: torch.dtype, foreach: bool) -> None:
    options = ADAM_OPTIONS[name]
    ours, theirs = make(dtype=dtype), make(dtype=dtype)
    optimizer = SELAdam(ours, beta=beta, **DEGENERATE, **sel_options(options, foreach))
    optimizer.param_groups[0]["foreach"] = foreach
    adam = torch.optim.Adam(theirs, foreach=False, fused=False, **copy.deepcopy(options))
    for t in range(20):
        train(optimizer, ours, 1, t)
        train(adam, theirs, 1, t)
        for p, q in zip(ours, theirs, strict=True):
            same(p, q)
            same(optimizer.raw(p), q)
            for key in adam.state[q]:
                same(optimizer.state[p][key], adam.state[q][key])


@both
def test_degenerate_is_adam_over_blocks(foreach: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond BLOCK_ELEMENTS a step is cut: rows of a matrix, matrices of a stack."""
    monkeypatch.setattr(_execute, "BLOCK_ELEMENTS", 1 << 18)
    shapes = [(700, 600), (3, 300, 400)]
    ours, theirs = make(shapes), make(shapes)
    options = {**DEGENERATE, "curved": [True, True], "beta": 12.5, "foreach": foreach, "weight_decay": 0.1}
    optimizer = SELAdam([{"params": ours[:1]}, {"params": ours[1:], "batch_dims": 1}], **{**options, "curved": "all"})
    adam = torch.optim.Adam(theirs, foreach=False, fused=False, weight_decay=0.1)
    train(optimizer, ours, 3)
    train(adam, theirs, 3)
    for p, q in zip(ours, theirs, strict=True):
        same(p, q)


@both
def test_degenerate_is_adam_under_onecycle(foreach: bool) -> None:
    """OneCycleLR rewrites lr and betas in the group at every step: both are read there."""
    ours, theirs = make(), make()
    optimizer = SELAdam(ours, beta=12.5, foreach=foreach, **DEGENERATE)
    adam = torch.optim.Adam(theirs, foreach=False, fused=False)
    pairs = [(o, OneCycleLR(o, max_lr=1e-2, total_steps=12)) for o in (optimizer, adam)]
    seen = set()
    for t in range(11):
        for (o, scheduler), params in zip(pairs, (ours, theirs), strict=True):
            train(o, params, 1, t)
            scheduler.step()
        seen.add(optimizer.param_groups[0]["betas"][0])
        for p, q in zip(ours, theirs, strict=True):
            same(p, q)
    assert len(seen) > 5


@both
def test_tensor_lr_as_on_a_device(foreach: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a tensor lr that lives on an accelerator, which never asks for its value, taken on the host."""
    ours, theirs = make(SHAPES[:3]), make(SHAPES[:3])
    options: dict[str, Any] = {"weight_decay": 0.1, "decoupled_weight_decay": True, "residual_rank": 1}
    expected = SELAdam(theirs, lr=2e-3, foreach=foreach, **options)
    train(expected, theirs, 5)
    monkeypatch.setattr(_rule, "on_host", lambda rate: not isinstance(rate, Tensor))
    optimizer = SELAdam(ours, lr=torch.tensor(2e-3), **options)
    optimizer.param_groups[0]["foreach"] = foreach
    train(optimizer, ours, 5)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


# ------------------------------------------------------------------------------------------------------ plain parameters


def plain_pairs() -> Iterator[tuple[type, type, str, dict[str, Any]]]:
    for ours, theirs, table in (
        (SELAdam, torch.optim.Adam, optim_inputs_func_adam),
        (SELAdamW, torch.optim.AdamW, optim_inputs_func_adamw),
    ):
        for entry in table("cpu", torch.float32):
            yield ours, theirs, entry.desc, entry.kwargs
        yield ours, theirs, "tensor lr", {"lr": torch.tensor(2e-3)}
        yield ours, theirs, "fused", {"fused": True, "amsgrad": True}
        yield ours, theirs, "tensor betas", {"betas": (torch.tensor(0.8), torch.tensor(0.95))}


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize(
    ("ours", "theirs", "kwargs"), [pytest.param(a, b, k, id=f"{b.__name__}-{d}") for a, b, d, k in plain_pairs()]
)
def test_plain_is_adam_bit_for_bit(ours: type, theirs: type, kwargs: dict[str, Any], foreach: bool | None) -> None:
    if foreach and (
        kwargs.get("fused") or any(isinstance(v, Tensor) for v in (kwargs.get("lr"), kwargs.get("betas", [0])[0]))
    ):
        for kind in (ours, theirs):
            with pytest.raises((ValueError, RuntimeError), match="foreach"):
                kind(make(), foreach=True, **kwargs)
        return
    dtypes = DTYPES[:2] if kwargs.get("fused") else [*DTYPES[:3], torch.complex64]
    p = [q for dtype in dtypes for q in make(dtype=dtype)]
    q = [nn.Parameter(v.detach().clone()) for v in p]
    optimizer = ours(p, curved="none", foreach=foreach, **copy.deepcopy(kwargs))
    adam = theirs(q, foreach=foreach, **copy.deepcopy(kwargs))
    train(optimizer, p, 10)
    train(adam, q, 10)
    for a, b in zip(p, q, strict=True):
        same(a, b)
        assert optimizer.state[a].keys() == adam.state[b].keys()
        for key, value in adam.state[b].items():
            same(optimizer.state[a][key], value)


@pytest.mark.parametrize("curved", ["none", "matrices"])
@pytest.mark.parametrize(
    "entry", optim_error_inputs_func_adam("cpu", torch.float32), ids=lambda e: e.optimizer_error_input.desc
)
def test_adams_own_errors(entry: Any, curved: str) -> None:
    given = entry.optimizer_error_input
    params = make() if given.params is None else given.params
    if issubclass(entry.error_type, Warning):
        with pytest.warns(entry.error_type, match=entry.error_regex):
            SELAdam(params, curved=curved, **given.kwargs)
    else:
        with pytest.raises(entry.error_type, match=entry.error_regex):
            SELAdam(params, curved=curved, **given.kwargs)


def test_complex_parameters_are_plain_whatever_curved_says() -> None:
    """Contract 21. Guard: `is_floating_point` in Shadow._choice."""
    start = torch.complex(mixed(3, 3), mixed(3, 3, seed=1))
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = SELAdam([{"params": [p], "curved": True}], init="mismatched")
    adam = torch.optim.Adam([q])
    assert "no: complex128" in optimizer.describe()
    train(optimizer, [p])
    train(adam, [q])
    same(torch.view_as_real(p), torch.view_as_real(q))


# ---------------------------------------------------------------------------------------------------------- the interface


def test_signatures_begin_as_torchs() -> None:
    """Contract 16. Guard: the order and defaults of the constructors' arguments."""
    for ours, theirs in ((SELAdam, torch.optim.Adam), (SELAdamW, torch.optim.AdamW)):
        have = list(inspect.signature(ours.__init__).parameters.values())
        want = list(inspect.signature(theirs.__init__).parameters.values())
        for a, b in zip(have, want, strict=False):
            assert (a.name, a.kind, a.default) == (b.name, b.kind, b.default)


def test_overridden_methods_keep_their_argument_names() -> None:
    """Contract 16. Guard: argument names of overridden methods: distributed checkpoints pass `state_dict` by keyword."""
    for name, method in inspect.getmembers(torch.optim.Optimizer, inspect.isfunction):
        if not name.startswith("_"):
            have, want = (inspect.signature(inspect.unwrap(m)) for m in (getattr(SELAdam, name), method))
            assert list(have.parameters) == list(want.parameters), name


def test_every_way_to_hand_over_parameters() -> None:
    """Contract 16. Guard: `_members`, which takes names from the group where there are some."""
    model = curved_model()
    names = [name for name, p in model.named_parameters() if p.dim() >= 2]
    for params, expected in (
        (list(model.parameters()), ["0.0", "0.2", "0.6"]),
        (model.parameters(), ["0.0", "0.2", "0.6"]),
        (model.named_parameters(), names),
        (dict(model.named_parameters()).items(), names),
        ([{"params": model.parameters(), "lr": 1e-2}], ["0.0", "0.2", "0.6"]),
        ([{"params": []}, {"params": model.parameters()}], ["1.0", "1.2", "1.6"]),
        ([{"params": model.named_parameters()}, {"params": [], "param_names": []}], names),
        (param_groups(model, lr=torch.tensor(1e-3)), [n for n, _ in model.named_parameters() if "3." not in n]),
    ):
        optimizer = SELAdam(params)
        assert sorted(name for name, _ in optimizer.named_curved()) == sorted(expected)
        model_step(model, optimizer)


def test_every_option_stands_in_every_group() -> None:
    """Contract 16. Guard: options live in `defaults`, from which torch fills the groups."""
    optimizer = SELAdam(
        [{"params": make([(2, 2)]), "beta": 3.0}, {"params": make([(2, 2)])}], beta=7.0, scale_lr=PAPER_SCALE_LR
    )
    options = set(inspect.signature(SELAdam.__init__).parameters) - {"self", "params", "unknown"}
    for group in optimizer.param_groups:
        assert options <= group.keys()
    assert [group["beta"] for group in optimizer.param_groups] == [3.0, 7.0]
    assert optimizer.param_groups[0]["scale_lr"] == {"e": [50.0, 8.0], "l": [50.0, 8.0], "m": [0.01, 0.5], "n": None}


@both
@pytest.mark.parametrize(
    ("option", "value"),
    [("lr", 3e-2), ("betas", [0.1, 0.2]), ("eps", 0.1), ("weight_decay", 0.5), ("maximize", True), ("amsgrad", True),
     ("scale_lr", {"e": 100.0}), ("anneal_steps", 7), ("lr_space", "raw"), ("decoupled_weight_decay", True)],
)  # fmt: skip
def test_options_are_read_from_the_group_at_each_step(option: str, value: Any, foreach: bool) -> None:
    """Contract 15 and 16. Guard: `_hyper` and `_rates` read the group at each step; betas may be a list (contract 15)."""
    params = [make([(4, 3), (4, 3)]) for _ in range(3)]
    common: dict[str, Any] = {"foreach": foreach, "weight_decay": 0.1, "betas": (0.5, 0.9)}
    early, late, never = (
        SELAdam(p, **{**common, **extra}) for p, extra in zip(params, ({option: value}, {}, {}), strict=True)
    )
    late.param_groups[0][option] = value
    for optimizer, p in zip((early, late, never), params, strict=True):
        train(optimizer, p, 4)
    for a, b, c in zip(*params, strict=True):
        same(a, b)
        assert not torch.equal(a, c)


@both
def test_amsgrad_may_begin_later(foreach: bool) -> None:
    """For plain parameters as for curved ones: from a maximum of 0. Guard: SELAdam._settle_plain."""
    (curved, plain), (alone,) = make([(4, 3), (5,)]), make([(4, 3)])
    optimizer, other = SELAdam([curved, plain], foreach=foreach), SELAdam([alone], foreach=foreach)
    for amsgrad in (False, True):
        for each, params in ((optimizer, [curved, plain]), (other, [alone])):
            each.param_groups[0]["amsgrad"] = amsgrad
            train(each, params, 2)
    same(curved, alone)
    assert bool(optimizer.state[plain]["max_exp_avg_sq"].any())


def test_betas_may_come_back_as_a_list() -> None:
    """Contract 15. Guard: `list` in _check_betas, and `_hyper`, which unpacks what it finds."""
    model = curved_model()
    optimizer = SELAdam([{"params": model.parameters(), "betas": [0.8, 0.9]}])
    saved = optimizer.state_dict()
    saved["param_groups"] = json.loads(json.dumps(saved["param_groups"]))
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["betas"] == [0.8, 0.9]
    model_step(model, optimizer)


def test_closure_runs_once_with_gradients_and_before_they_are_read() -> None:
    """Contract 17. Guard: `enable_grad` around the closure, ahead of the first look at p.grad."""
    model = curved_model()
    optimizer = SELAdam(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(mixed(3, 4, dtype=torch.float32)).square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True] and isinstance(loss, Tensor)
    assert all(not p.equal(q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", [SELAdam, SELAdamW])
def test_step_hooks_fire_once(kind: type[SELAdam]) -> None:
    """Contract 17. Guard: one `step`, which torch wraps once for the class and its subclasses."""
    model = curved_model()
    optimizer = kind(model.parameters())
    fired: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    optimizer.register_step_post_hook(lambda *_: fired.append("post"))
    model_step(model, optimizer)
    assert fired == ["pre", "post"]


def test_no_modes() -> None:
    """Contract 20. Guard: no train() or eval(); the weights after a step are the map of raw, which the model computes with."""
    model = curved_model()
    optimizer = SELAdam(model.parameters())
    assert not hasattr(optimizer, "train") and not hasattr(optimizer, "eval")
    for t in range(3):
        model_step(model, optimizer, t)
        for mode in (False, True):
            model.train(mode)
            for _, p in optimizer.named_curved():
                same(p, mapped(optimizer, p))


@both
@pytest.mark.parametrize("options", [{"maximize": True}, {"weight_decay": 0.1}, {}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_only_read(dtype: torch.dtype, options: dict[str, Any], foreach: bool) -> None:
    """Contract 21. Guard: `_gradient` and `pull` make new tensors (maximize, decay and casts would be the in-place ones)."""
    params = make(dtype=dtype)
    optimizer = SELAdam(params, curved="all", foreach=foreach, residual_rank=1, **options)
    for t in range(2):
        give_grads(params, t)
        grads = [p.grad for p in params]
        before = [(g, g._version, g.clone()) for g in grads if g is not None]
        optimizer.step()
        for p, (g, version, value) in zip(params, before, strict=True):
            assert p.grad is g and g._version == version
            same(g, value)


def test_sparse_gradients_are_refused_and_nothing_moves() -> None:
    """Contract 21. Guard: the look for sparse gradients ahead of everything else in step()."""
    table = nn.Embedding(5, 3, sparse=True)
    other = nn.Parameter(mixed(4, 4, size=0.1))
    optimizer = SELAdam([("other", other), ("table", table.weight)])
    before = other.detach().clone(), table.weight.detach().clone()
    (table(torch.tensor([1, 2])).sum() + other.sum()).backward()
    with pytest.raises(RuntimeError, match=r"sparse gradients \(parameter table\), please consider SparseAdam instead"):
        optimizer.step()
    same(other, before[0])
    same(table.weight, before[1])
    assert not optimizer.state


@both
def test_add_param_group_after_steps(foreach: bool) -> None:
    """The newcomer starts its own count, beta and schedule, and is saved."""
    first, second = make([(4, 4), (4, 4)]), make([(4, 4), (3,)], size=0.02)
    alone = [nn.Parameter(p.detach().clone()) for p in second]
    options: dict[str, Any] = {"foreach": foreach, "anneal_steps": 5}
    optimizer = SELAdam([("a", first[0]), ("b", first[1])], **options)
    train(optimizer, first, 3)
    optimizer.add_param_group({"params": [("c", second[0]), ("d", second[1])], "lr": 2e-3, "structure": "row"})
    assert [n for n, _ in optimizer.named_curved()] == ["a", "b", "c"]
    assert 2 in optimizer.state_dict()["state"]
    reference = SELAdam(alone, lr=2e-3, structure="row", **options)
    train(reference, alone, 4)
    for t in range(4):
        give_grads(second, t)
        optimizer.step()
    for p, q in zip(second, alone, strict=True):
        same(p, q)
    assert float(optimizer.state[first[0]]["step"]) == 7 and float(optimizer.state[second[0]]["step"]) == 4


def test_a_refused_group_leaves_nothing() -> None:
    first, second = make([(3, 3)]), make([(3, 3)], size=0.2)
    optimizer = SELAdam(first)
    before = second[0].detach().clone()
    for options in (
        {"beta": -1.0},
        {"curved": lambda *_: 1 / 0},
        {"init": "mismatched", "scale_init": {"e": -1.0, "l": 100.0}},
    ):
        with pytest.raises((ValueError, ZeroDivisionError)):
            optimizer.add_param_group({"params": second, **options})
        assert len(optimizer.param_groups) == 1
        same(second[0], before)
    optimizer.add_param_group({"params": second})


def test_unfreezing() -> None:
    model = curved_model()
    model[0].requires_grad_(False)  # type: ignore[index]
    frozen = model.get_parameter("0.weight")
    optimizer = SELAdam(model.named_parameters())
    before = frozen.detach().clone()
    model_step(model, optimizer)
    same(frozen, before)
    assert 0 not in optimizer.state_dict()["state"] and "frozen" in optimizer.describe()
    frozen.requires_grad_(True)
    assert 0 in optimizer.state_dict()["state"]
    model_step(model, optimizer, 1)
    assert not frozen.equal(before) and float(optimizer.state[frozen]["step"]) == 1


# --------------------------------------------------------------------------------------------- what may not move, and when


def every_setting() -> Iterator[dict[str, Any]]:
    for combine in ("mismatched", "congruent"):
        for structure in STRUCTURES:
            yield {"combine": combine, "structure": structure}
        yield {"combine": combine, "residual_rank": 2, "weight_decay": 0.1}
        yield {"combine": combine, "amsgrad": True, "lr_space": "weight", "weight_decay": 0.1}
        yield {"combine": combine, "decoupled_weight_decay": True, "weight_decay": 0.1, "maximize": True}
        yield {"combine": combine, "scale_init": {"e": 1.5, "l": 0.5, "n": 0.3}, "scale_lr": {"e": 1.0, "n": 2.0}}


SETTINGS = [pytest.param(s, id="-".join(map(str, s.values()))) for s in every_setting()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_construction_and_state_move_no_bit(setting: dict[str, Any], dtype: torch.dtype) -> None:
    params = make(dtype=dtype)
    before = [p.detach().clone() for p in params]
    versions = [p._version for p in params]
    random = torch.get_rng_state()
    optimizer = SELAdam(params, curved="all", **setting)
    optimizer.state_dict()
    optimizer.describe()
    for p, q in zip(params, before, strict=True):
        for read in (optimizer.raw, optimizer.scales, optimizer.beta):
            read(p)
        same(p, q)
    assert [p._version for p in params] == versions
    assert torch.equal(torch.get_rng_state(), random)


@both
@pytest.mark.parametrize("lr", ["number", "tensor", "device tensor"])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("setting", SETTINGS)
def test_lr_zero_moves_no_bit_but_the_moments(
    setting: dict[str, Any], steps: int, lr: str, foreach: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where the weight is -0.0 or an inverse is rounded, nor where a gradient is infinite.

    "device tensor": the path of a tensor that lives on an accelerator, which never asks for its value.
    """
    params = make([*SHAPES, (2, 0)])
    for p in params[:4]:
        p.data.view(-1)[1] = -0.0
    optimizer = SELAdam(params, curved="all", foreach=foreach, **setting)
    train(optimizer, params, steps)
    optimizer.state_dict()
    before = [p.detach().clone() for p in params], bits(optimizer)
    moments = bits(optimizer, ("exp_avg", "exp_avg_sq"))
    if lr == "device tensor":
        monkeypatch.setattr(_rule, "on_host", lambda rate: not isinstance(rate, Tensor))
    optimizer.param_groups[0]["lr"] = 0.0 if lr == "number" else torch.tensor(0.0)
    for t in range(steps, steps + 2):
        give_grads(params, t)
        assert params[0].grad is not None
        params[0].grad[2, 1] = math.inf
        optimizer.step()
    for p, q in zip(params, before[0], strict=True):
        same(p, q)
    for now, then in zip(bits(optimizer), before[1], strict=True):
        same(now, then)
    for now, then in zip(bits(optimizer, ("exp_avg", "exp_avg_sq")), moments, strict=True):
        assert now.numel() == 0 or not now.equal(then)
    assert [float(optimizer.state[p]["step"]) for p in params] == [steps + 2.0] * len(params)


def test_a_host_tensor_lr_serves_parameters_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch allows: lr=torch.tensor(1e-3) beside parameters on an accelerator, for which the meta device stands in.

    Guard: `on_host`. An accelerator's `where` takes no condition from the host, which the meta device does not mind.
    """
    where = torch.where

    def strict_where(condition: Tensor, *values: Any) -> Tensor:
        assert condition.device.type == "meta"
        return where(condition, *values)

    monkeypatch.setattr(torch, "where", strict_where)
    assert not _rule.on_host(torch.empty((), device="meta")) and not _rule.is_zero(torch.empty((), device="meta"))
    for foreach in (False, True):
        p = torch.empty(4, 3, device="meta")
        state = {key: torch.empty_like(p) for key in ("raw", "exp_avg", "exp_avg_sq")}
        curve = _rule.Curve(12.5, "mismatched", (), False)
        state |= {f"scale_row{moment}": torch.empty(4, 4, device="meta") for moment in ("", "_exp_avg", "_exp_avg_sq")}
        items = [_execute.Item(p, p, _rule.views(state, 0, False), curve, 1.0, 1.0, torch.empty(4, device="meta"))] * 2
        hyper = _rule.Hyper(torch.tensor(1e-3), 0.9, 0.999, 1e-8, 0.1, True, False, False)
        _execute.run(items, hyper, batched=foreach)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_weights_are_the_map_of_raw_after_every_step(
    setting: dict[str, Any], dtype: torch.dtype, foreach: bool
) -> None:
    params = make(dtype=dtype)
    optimizer = SELAdam(params, curved="all", foreach=foreach, lr=3e-3, **setting)
    for t in range(4):
        train(optimizer, params, 1, t)
        for p in params:
            same(p, mapped(optimizer, p))
            if setting.get("residual_rank"):
                continue
            scales = {kind: row * col for kind, (row, col) in optimizer.scales(p).items()}
            raw = optimizer.raw(p)
            formula = sel_forward(raw, **scales, beta=optimizer.beta(p), combine=setting["combine"])
            unit = torch.finfo(raw.dtype).eps
            larger = (sel_forward(raw.abs(), **scales, beta=optimizer.beta(p), combine="congruent")).abs()
            slack = 16 * unit * larger
            assert ((p >= (formula - slack).to(dtype)) & (p <= (formula + slack).to(dtype))).all()


@pytest.mark.parametrize("rule", [("auto",), ("width",), ()])
def test_mismatched_initialisation_is_the_functions(rule: Any) -> None:
    """By default too. The second matrix is larger than its shape suggests."""
    shapes = [(40, 30), (900, 2), (3, 2, 2, 2)]
    ours, theirs = (
        [p for size, s in zip((0.1, 0.4, 0.1), shapes, strict=True) for p in make([s], size=size)] for _ in "ab"
    )
    optimizer = SELAdam(ours, init="mismatched", **dict(zip(["beta"], rule, strict=False)))
    betas = [init.choose_beta(p, rule[0] if rule else "width") for p in theirs]
    assert betas[1] == pytest.approx(1.1 / 0.4, rel=0.2)
    for p, q, beta in zip(ours, theirs, betas, strict=True):
        init.mismatched_(q.data, *rule)
        same(p, q)
        assert optimizer.beta(p) == beta  # resolved before the weights shrank
    assert optimizer.param_groups[0]["curved"] == [True] * 3


@pytest.mark.parametrize("bad", ["non-finite", "meta", "beta", "option"])
def test_a_refused_construction_moves_nothing(bad: str) -> None:
    """One group's weights may not have shrunk when another one is refused."""
    first = make([(4, 4)])
    second: dict[str, Any] = {"params": make([(4, 4)])}
    if bad == "non-finite":
        second["params"][0].data[0, 0] = math.nan
    elif bad == "meta":
        second["params"] = [nn.Parameter(torch.empty(2, 2, device="meta"))]
    elif bad == "beta":
        second["scale_init"] = {"e": -1.0, "l": 100.0}
    else:
        second["structure"] = "cols"
    before = first[0].detach().clone()
    with pytest.raises(ValueError, match=r"1\.0|structure"):
        SELAdam([{"params": first}, second], init="mismatched")
    same(first[0], before)


def test_callables_see_only_what_may_be_curved() -> None:
    model = curved_model()
    optimizer = SELAdam(model.named_parameters(), beta=lambda name, p: 2.0 + p.shape[1])
    assert [optimizer.beta(p) for _, p in optimizer.named_curved()] == [6.0, 6.0, 6.0]
    optimizer = SELAdam(
        model.named_parameters(), curved=lambda name, p: name == "0.bias", beta=lambda name, p: p.numel()
    )
    assert [(name, optimizer.beta(p)) for name, p in optimizer.named_curved()] == [("0.bias", 4.0)]
    model_step(model, optimizer)


# ----------------------------------------------------------------------------------------------------------- what is refused


def bad(value: float) -> list[nn.Parameter]:
    good, spoilt = make([(3, 3), (3, 3)])
    spoilt.data[1, 2] = value
    return [good, spoilt]


@both
@pytest.mark.parametrize("curved", ["matrices", "all"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("beta", ["auto", 12.5])
def test_non_finite_weights_are_refused_by_name_and_nothing_moves(
    beta: Any, value: float, curved: str, foreach: bool
) -> None:
    params = bad(value)
    optimizer = SELAdam([("good", params[0]), ("spoilt", params[1])], beta=beta, curved=curved, foreach=foreach)
    before = [p.detach().clone() for p in params]
    give_grads(params, 0)
    for read in (optimizer.step, optimizer.state_dict, optimizer.describe, lambda: optimizer.raw(params[1])):
        with pytest.raises(ValueError, match=r"parameter spoilt: .*(finite|repair)"):
            read()
    for p, q in zip(params, before, strict=True):
        same(p, q)
    params[1].data[1, 2] = 0.1
    optimizer.step()


@both
def test_a_beta_without_inverse_is_refused_by_name_and_nothing_moves(foreach: bool) -> None:
    params = make([(3, 3), (3, 3)])
    options: dict[str, Any] = {"beta": 0.5, "foreach": foreach}
    optimizer = SELAdam(
        [{"params": [("fine", params[0])], "beta": 12.5}, {"params": [("steep", params[1])]}], **options
    )
    before = [p.detach().clone() for p in params]
    give_grads(params, 0)
    with pytest.raises(ValueError, match=r"parameter steep: .*beta=0\.5.*the least beta that would do is 1$"):
        optimizer.step()
    for p, q in zip(params, before, strict=True):
        same(p, q)


P = [(3, 3)]


def stepped(p: nn.Parameter, **options: Any) -> None:
    p.grad = torch.ones_like(p)
    SELAdam([("w", p)], **options).step()


ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: SELAdam(make(P), beta=(0.9, 0.999)), ValueError,  # type: ignore[arg-type]
     r"beta is the curvature, one number, got \(0\.9, 0\.999\); did you mean betas=\(0\.9, 0\.999\)\?"),
    (lambda: SELAdam(make([(3, 3)] * 2), beta=[0.9, 0.999]), ValueError, r"got \[0\.9, 0\.999\]; did you mean betas="),
    (lambda: SELAdam(make(P), betas=12.5), ValueError,  # type: ignore[arg-type]
     r"betas is Adam's pair of decay rates, got 12\.5; did you mean beta=12\.5, the curvature\?"),
    (lambda: SELAdam(make(P), 1e-3, 12.5), ValueError, r"betas .* got 12\.5; did you mean beta="),  # type: ignore[arg-type]
    (lambda: SELAdam([{"params": make(P), "betas": 0.9}]), ValueError, r"betas .* got 0\.9; did you mean beta="),
    (lambda: SELAdam([{"params": make(P), "beta": (0.9, 0.99)}]), ValueError, "did you mean betas="),
    (lambda: SELAdam(make(P), betaa=3.0), TypeError, r"SELAdam has no option betaa=3\.0; did you mean 'beta' or 'betas'"),
    (lambda: SELAdam(make(P), beta1=0.9), TypeError, r"beta1=0\.9; did you mean 'beta' or 'betas'"),
    (lambda: SELAdamW(make(P), weigth_decay=0.1), TypeError, r"SELAdamW has no option weigth_decay=0\.1; did you mean 'weight_decay'"),
    (lambda: SELAdam(make(P), momentum=0.1), TypeError, r"no option momentum=0\.1; it has Adam's and curved, combine, init"),
    (lambda: SELAdam([{"params": make(P), "curve": True}]), ValueError, "no option curve=True; did you mean 'curved'"),
    (lambda: SELAdam(make(P), beta=-1.0), ValueError, r"Invalid beta: -1\.0; use a positive number, 'auto', 'width' or a callable"),
    (lambda: SELAdam(make(P), beta=math.inf), ValueError, "Invalid beta: inf; use a positive number"),
    (lambda: SELAdam(make(P), beta=math.nan), ValueError, "Invalid beta: nan; use a positive number"),
    (lambda: SELAdam(make(P), beta=True), ValueError, "Invalid beta: True; use a positive number"),
    (lambda: SELAdam(make(P), beta="12"), ValueError, "Invalid beta: '12'; use a positive number, 'auto', 'width'"),
    (lambda: SELAdam(make(P), beta=None), ValueError, "Invalid beta: None; use a positive number"),
    (lambda: SELAdam([("w", make(P)[0])], beta=lambda name, p: 0.0), ValueError, r"Invalid beta: 0\.0 for parameter w; use"),
    (lambda: SELAdam([{"params": make(P), "beta": 3.0}], beta=-2.0), ValueError, r"Invalid beta: -2\.0; use a positive"),
    (lambda: SELAdam(make(P), curved=True), ValueError, 'curved=True stands in a group; the constructor takes "matrices", "all"'),
    (lambda: SELAdam(make(P), curved="matrix"), ValueError, "Invalid curved: 'matrix'; use 'matrices', 'all', 'none', a bool"),
    (lambda: SELAdam(make(P), curved=None), ValueError, "Invalid curved: None; use 'matrices'"),
    (lambda: SELAdam([{"params": make(P), "curved": [True, False]}]), ValueError, "Invalid curved: 2 entries for 1 parameters"),
    (lambda: SELAdam(make(P), combine="matched"), ValueError, "Invalid combine: 'matched'; use one of 'mismatched', 'congruent'"),
    (lambda: SELAdam(make(P), init="zero"), ValueError, "Invalid init: 'zero'; use one of 'preserve', 'mismatched'"),
    (lambda: SELAdam(make(P), lr_space="log"), ValueError, "Invalid lr_space: 'log'; use one of 'raw', 'weight'"),
    (lambda: SELAdam(make(P), structure="rows"), ValueError, "Invalid structure: 'rows'; use one of 'row_col', 'row', 'col', 'scalar'"),
    (lambda: SELAdam(make(P), check_edits="never"), ValueError, "Invalid check_edits: 'never'; use one of 'tracked', 'full'"),
    (lambda: SELAdam(make(P), batch_dims=-1), ValueError, "Invalid batch_dims: -1; use an int >= 0"),
    (lambda: SELAdam(make(P), batch_dims=True), ValueError, "Invalid batch_dims: True; use an int >= 0"),
    (lambda: SELAdam([("w", make(P)[0])], batch_dims=3), ValueError,
     "batch_dims=3 is more than the 2 dimensions of parameter w; put it into a group with fewer"),
    (lambda: SELAdam(make(P), residual_rank=1.5), ValueError, r"Invalid residual_rank: 1\.5; use an int >= 0"),  # type: ignore[arg-type]
    (lambda: SELAdam(make(P), anneal_steps=0), ValueError, "Invalid anneal_steps: 0; use a positive number of steps, or None"),
    (lambda: SELAdam(make(P), anneal_steps="all"), ValueError, "Invalid anneal_steps: 'all'; use a positive"),  # type: ignore[arg-type]
    (lambda: SELAdam(make(P), scale_init={"k": 1.0}), ValueError, "Invalid scale_init: unknown kind 'k'; the kinds are e, l, m, n"),
    (lambda: SELAdam(make(P), scale_init={"e": math.nan}), ValueError, "Invalid scale_init for e: nan; use a finite number or 'beta'"),
    (lambda: SELAdam(make(P), scale_init={"e": "width"}), ValueError, "Invalid scale_init for e: 'width'; use a finite number"),
    (lambda: SELAdam(make(P), scale_init=2.0), ValueError, r"Invalid scale_init: 2\.0; use None or a mapping from e, l, m, n"),  # type: ignore[arg-type]
    (lambda: SELAdam(make(P), scale_lr={"beta": 1.0}), ValueError, "Invalid scale_lr: unknown kind 'beta'; the kinds are"),
    (lambda: SELAdam(make(P), scale_lr={"e": (8.0, 0.0)}), ValueError,
     r"Invalid scale_lr for e: \(8\.0, 0\.0\); use None \(frozen\), a positive number or a pair"),
    (lambda: SELAdam(make(P), scale_lr={"e": (1.0, 2.0, 3.0)}), ValueError, r"Invalid scale_lr for e: \(1\.0, 2\.0, 3\.0\); use"),
    (lambda: SELAdam(make(P), scale_lr={"e": 0}), ValueError, r"Invalid scale_lr for e: 0; use None \(frozen\)"),
    (lambda: SELAdam(make(P), scale_lr=50.0), ValueError, r"Invalid scale_lr: 50\.0; use None or a mapping"),  # type: ignore[arg-type]
    (lambda: SELAdam([("w", make(P)[0])], fused=True, residual_rank=2), ValueError,
     r"fused=True has no kernel for parameter w: it has a residual .*; leave fused=None"),
    (lambda: SELAdam([("w", make(P)[0])], capturable=True, check_edits="full"), ValueError,
     r"capturable=True cannot have check_edits='full' \(parameter w\): .*; use check_edits='tracked'"),
    (lambda: SELAdam(make(P), differentiable=True), ValueError, r"differentiable=True is not supported by SELAdam; seloptim\.transform"),
    (lambda: SELAdam(make(P), curved="none", differentiable=True), ValueError, r"differentiable=True .* seloptim\.transform"),
    (lambda: SELAdam([nn.Parameter(torch.empty(2, 2, device="meta"))], init="mismatched"), ValueError,
     r"init='mismatched' needs the weights of parameter 0\.0, which is on the meta device; materialise it"),
    (lambda: SELAdam(make(P)).raw(torch.ones(3, 3)), KeyError, "not a parameter of the optimizer; pass one of its parameters itself"),
    (lambda: (o := SELAdam(make([(3,)]))).raw(o.param_groups[0]["params"][0]), KeyError,
     r"parameter 0\.0 is not curved; named_curved\(\) lists those that are"),
    (lambda: (o := SELAdam([nn.Parameter(torch.empty(2, 2, device="meta"))])).beta(o.param_groups[0]["params"][0]), ValueError,
     r"parameter 0\.0 is on the meta device and has no values yet; materialise it"),
    *((lambda beta=beta: stepped(nn.Parameter(torch.empty(2, 2, device="meta")), beta=beta), ValueError,
       r"parameter w: weights on the meta device, which have no values: materialise them before \(to_empty")
      for beta in ("auto", "width", 3.0)),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), ERRORS, ids=[m[:40] for _, _, m in ERRORS])
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("key", ["lr_scale", "initial_lr", "max_lr", "name", "swa_lr", "group_name", "layer", "fix_lr"])
def test_a_users_own_keys_in_groups_are_kept(key: str) -> None:
    optimizer = SELAdam([{"params": make(P), key: 1.0}])
    assert optimizer.param_groups[0][key] == 1.0


# ------------------------------------------------------------------------------------------------------------ calibration


def test_large_embeddings_are_left_alone_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 4))
    optimizer = SELAdam(model.named_parameters())
    with caplog.at_level(logging.WARNING, "seloptim"):
        for _ in range(3):
            assert [name for name, _ in optimizer.named_curved()] == ["1.weight"]
            optimizer.describe()
            model(torch.arange(20)).sum().backward()
            optimizer.step()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("0.weight: not curved, its rms ") and "curved=True in its group" in said[0]
    assert "no: rms > 0.8" not in optimizer.describe() or "raw" not in optimizer.state[model[0].weight]


@pytest.mark.parametrize("rule", ["auto", "width"])
@pytest.mark.parametrize("size", [0.9, 2.0, 0.5])
@pytest.mark.parametrize("how", ["group", "all", "callable"])
def test_asked_for_it_is_curved_with_a_small_beta(how: str, size: float, rule: str) -> None:
    """Guard: init.choose_beta, for the rule "width", whose 2.81 for this shape is the larger one."""
    p = nn.Parameter(mixed(200, 8, size=1.0))
    p.data.mul_(size / init._rms(p))
    group: Any = {"group": [{"params": [p], "curved": True}]}.get(how, [p])
    curved: Any = {"all": "all", "callable": lambda name, p: True}.get(how, "matrices")
    optimizer = SELAdam(group, curved=curved, beta=rule)
    assert optimizer.beta(p) == pytest.approx(max(2.0, 1.1 / size))


def test_a_frozen_weight_keeps_its_own_beta_under_the_mismatched_initialisation() -> None:
    """Guard: SELOptimizer._shrink leaves the beta of what it does not shrink as it was asked for."""
    p = make(P)[0].requires_grad_(False)
    optimizer = SELAdam([p], init="mismatched", beta=6.0)
    p.requires_grad_(True)
    assert optimizer.beta(p) == 6.0


def test_a_step_that_could_multiply_weights_is_warned_of() -> None:
    def state_of(lr: Any, **options: Any) -> None:
        p = make(P)[0]
        SELAdam([("w", p)], lr=lr, beta=12.5, lr_space="raw", **options).raw(p)

    for lr in (0.05, torch.tensor(0.05)):
        with pytest.warns(
            UserWarning, match=r"lr \* beta = 0\.05 \* 12\.5 = 0\.625 for parameter w: .*lower lr below 0\.04"
        ):
            state_of(lr)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state_of(0.04)


# ------------------------------------------------------------------------------------------------------------ what users read

SCALE_SHAPES: list[tuple[tuple[int, ...], int, str, tuple[int, ...], tuple[int, ...]]] = [
    ((4, 3), 0, "row_col", (4, 1), (1, 3)),
    ((4, 3), 0, "row", (4, 1), (1, 1)),
    ((4, 3), 0, "col", (1, 1), (1, 3)),
    ((4, 3), 0, "scalar", (1, 1), (1, 1)),
    ((4, 3), 0, "none", (1, 1), (1, 1)),
    ((4, 3, 2, 2), 0, "row_col", (4, 1, 1, 1), (1, 3, 2, 2)),
    ((4, 3, 2, 2), 0, "col", (1, 1, 1, 1), (1, 3, 2, 2)),
    ((4, 3, 2, 2), 0, "scalar", (1, 1, 1, 1), (1, 1, 1, 1)),
    ((2, 4, 3), 1, "row_col", (2, 4, 1), (2, 1, 3)),
    ((2, 4, 3), 1, "row", (2, 4, 1), (1, 1, 1)),
    ((2, 4, 3), 1, "col", (1, 1, 1), (2, 1, 3)),
    ((2, 4, 3), 1, "scalar", (2, 1, 1), (1, 1, 1)),
    ((5, 2, 4, 3), 2, "row_col", (5, 2, 4, 1), (5, 2, 1, 3)),
    ((5, 2, 4, 3), 2, "none", (5, 2, 1, 1), (1, 1, 1, 1)),
    ((2, 4), 1, "row_col", (2, 4), (1, 1)),
    ((2, 4), 1, "scalar", (2, 1), (1, 1)),
    ((2, 4), 2, "row_col", (2, 4), (1, 1)),
    ((4,), 0, "row_col", (4,), (1,)),
    ((4,), 0, "col", (4,), (1,)),
    ((4,), 0, "scalar", (1,), (1,)),
    ((4,), 1, "row", (4,), (1,)),
    ((), 0, "row_col", (), ()),
    ((), 0, "none", (), ()),
    ((0, 3), 0, "row_col", (0, 1), (1, 3)),
    ((3, 0), 0, "row_col", (3, 1), (1, 0)),
]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("shape", "batch_dims", "structure", "row", "col"), SCALE_SHAPES)
def test_shapes_of_scales(
    shape: tuple[int, ...], batch_dims: int, structure: str, row: tuple[int, ...], col: tuple[int, ...], foreach: bool
) -> None:
    params = make([shape, shape])
    optimizer = SELAdam(params, curved="all", structure=structure, batch_dims=batch_dims, foreach=foreach)
    train(optimizer, params, 2)
    for p in params:
        assert optimizer.raw(p).shape == shape and isinstance(optimizer.beta(p), float)
        scales = optimizer.scales(p)
        assert list(scales) == ["e", "l", "m", "n"]
        for a, b in scales.values():
            assert tuple(a.shape) == row and tuple(b.shape) == col
            assert torch.broadcast_shapes(a.shape, b.shape, shape) == torch.Size(shape)
        moved = [not torch.equal(a * b, torch.ones_like(a * b)) for kind, (a, b) in scales.items() if kind in "elm"]
        assert all(moved) == (structure != "none" and p.numel() > 0)


def test_describe_says_what_becomes_of_each_parameter() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"table": nn.Embedding(9, 3), "linear": nn.Linear(3, 2), "still": nn.Linear(3, 3, bias=False)}
    )
    model["still"].requires_grad_(False)
    model["far"] = nn.Linear(2, 2, bias=False, device="meta")
    named = [*model.named_parameters(), ("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))]
    optimizer = SELAdam(named, beta=12.5)
    lines = optimizer.describe().splitlines()
    assert lines[0].split("  ")[0] == "name" and all(
        x in lines[0] for x in ("shape", "curved", "beta", "mean slope", "state bytes")
    )
    table = {line.split()[0]: line for line in lines[1:]}
    assert list(table) == [name for name, _ in named]
    # raw and two moments, two factors of four kinds with two moments each, one counter; all in float32.
    assert table["linear.weight"].split() == [
        "linear.weight",
        "2x3",
        "mismatched",
        "12.5",
        table["linear.weight"].split()[4],
        str(4 * (18 + 60 + 1)),
    ]
    assert float(table["linear.weight"].split()[4]) > 1.0
    for name, why in (("table.weight", "no: rms > 0.8"), ("linear.bias", "no: 1-D"), ("still.weight", "frozen"),
                      ("far.weight", "on meta"), ("phase", "no: complex64")):  # fmt: skip
        assert why in table[name]
    assert "no: group" in SELAdam(make(P), curved="none").describe()


def test_describe_counts_no_state_where_there_will_be_none() -> None:
    """Frozen parameters have none until they are trained; a plain one has as much before its first step as after it."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4))
    model[0].requires_grad_(False)
    optimizer = SELAdam(model.named_parameters(), amsgrad=True)
    before = [line.split()[-1] for line in optimizer.describe().splitlines()[1:]]
    assert before[:2] == ["0", "0"] and before[3] == str(4 * (3 * 4 + 1))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert [line.split()[-1] for line in optimizer.describe().splitlines()[1:]] == before


@pytest.mark.parametrize(
    ("how", "read"),
    [*(("stepped", read) for read in ("step", "state_dict", "raw", "stats", "resync", "describe")),
     ("copied", "step"), ("pickled", "step"), ("loaded", "step")],
)  # fmt: skip
@pytest.mark.parametrize(
    ("option", "value"),
    [("combine", "congruent"), ("batch_dims", 0), ("structure", "row"), ("structure", "none"), ("beta", 6.0), ("beta", [6.0]),
     ("scale_init", {"e": 2.0}), ("residual_rank", 2), ("init", "mismatched"), ("curved", "none"), ("curved", [False])],
)  # fmt: skip
def test_what_a_state_was_made_under_may_not_change(option: str, value: Any, how: str, read: str) -> None:
    """Neither weights nor state move, and the error names parameter and option. Guard: Shadow._check_options, Shadow._made."""
    stack = nn.Parameter(mixed(2, 4, 3, size=0.1, dtype=torch.float32))
    optimizer = SELAdam([("experts", stack)], batch_dims=1)
    stack.grad = torch.ones_like(stack)
    optimizer.step()
    if how == "copied":
        stack, optimizer = copy.deepcopy((stack, optimizer))
    elif how == "pickled":
        stack, optimizer = pickle.loads(pickle.dumps((stack, optimizer)))
    elif how == "loaded":
        saved, optimizer = optimizer.state_dict(), SELAdam([("experts", stack)], batch_dims=1)
        optimizer.load_state_dict(saved)
    else:
        optimizer.state_dict()  # what was looked at and found in order is looked at again
    stack.grad = torch.ones_like(stack)
    weights, state = stack.detach().clone(), copy.deepcopy(optimizer.state[stack])
    kept = optimizer.param_groups[0][option]
    optimizer.param_groups[0][option] = value
    now, then = re.escape(repr(value[0] if isinstance(value, list) else value)), re.escape(repr(kept))
    then = "curved" if option == "curved" else f"{option}={then}"
    for _ in range(2):  # a refusal is no look
        with pytest.raises(
            ValueError, match=f"{option}={now} .*parameter experts, .*made (with )?{then} .*set it back"
        ):
            getattr(optimizer, read)(*[stack] if read == "raw" else [])
    optimizer.param_groups[0][option] = kept
    same(stack, weights)
    for key, was in optimizer.state_dict()["state"][0].items():
        assert torch.equal(torch.as_tensor(was), torch.as_tensor(state[key])), key
    optimizer.step()


def test_an_option_may_change_as_long_as_there_is_no_state() -> None:
    """It counts then. Guard: Shadow._check_options looks at states alone."""
    late, trained = make([(4, 3), (4, 3)])
    optimizer = SELAdam([{"params": [late]}, {"params": [trained]}])
    trained.grad = torch.ones_like(trained)
    optimizer.step()
    optimizer.param_groups[0].update(beta=6.0, structure="row")
    assert optimizer.beta(late) == 6.0 and optimizer.scales(late)["e"][1].shape == (1, 1)
    optimizer.param_groups[0].update(beta=lambda name, p: 6.0)  # resolved as in a group that is added
    optimizer.step()
    assert optimizer.param_groups[0]["beta"] == [6.0]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("lr_space", "wieght", "Invalid lr_space: 'wieght'"),
        ("check_edits", "ful", "Invalid check_edits: 'ful'"),
        ("structure", "rows", "Invalid structure: 'rows'"),
        ("scale_lr", {"x": 1.0}, "Invalid scale_lr: unknown kind 'x'"),
        ("scale_lr", {"e": (1, 2, 3)}, "Invalid scale_lr for e"),
        ("anneal_steps", "many", "Invalid anneal_steps: 'many'"),
        ("curved", [True, True], "Invalid curved: 2 entries for 1 parameters; .*take out"),
        ("beta", [3.0, 4.0, 5.0], "Invalid beta: 3 entries for 1 parameters; .*take out"),
    ],
)
def test_a_bad_value_in_a_group_is_refused_before_anything_moves(option: str, value: Any, message: str) -> None:
    """Guard: Shadow._check_options before the first write: the group stands behind one that is in order."""
    params = make([(4, 3), (4, 3)])
    optimizer = SELAdam([{"params": [p]} for p in params])
    train(optimizer, params, 1)
    before = [p.detach().clone() for p in params]
    optimizer.param_groups[1][option] = value
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    for p, was in zip(params, before, strict=True):
        same(p, was)


def test_plain_parameters_with_state_stay_plain() -> None:
    """Guard: Shadow._check_options, which knows a plain state by what it lacks."""
    (p,) = make([(4, 3)])
    optimizer = SELAdam([("w", p)], curved="none")
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.param_groups[0]["curved"] = "all"
    with pytest.raises(ValueError, match="curved='all' in the group of parameter w, whose state was made not curved"):
        optimizer.step()


def test_a_load_says_where_its_options_are_others(caplog: pytest.LogCaptureFixture) -> None:
    """As in torch the saved options count. Guard: SELOptimizer.load_state_dict compares FIXED with what was built."""
    (p,) = make([(4, 3)])
    optimizer = SELAdam([p], structure="row", scale_init={"e": 2.0}, init="mismatched")
    other = SELAdam([p], structure="col", beta=3.0)
    with caplog.at_level(logging.WARNING, logger="seloptim"):
        other.load_state_dict(optimizer.state_dict())
    assert [record.message.split(";")[0].split("the ")[2] for record in caplog.records] == [
        "structure='row' that it was made under",
        "scale_init={'e': 2.0} that it was made under",
    ]
    p.grad = torch.ones_like(p)
    other.step()


def test_frozen_weights_are_not_shrunk() -> None:
    """init="mismatched" is for weights that start; a frozen one was trained. Guard: SELOptimizer._shrink."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters()]
    SELAdam(model.parameters(), init="mismatched")
    assert [torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)] == [True, True, False, True]


def test_replaced_parameters_that_were_trained_are_forgotten_with_a_warning() -> None:
    """Guard: SELOptimizer._forget_replaced; torch's own state_dict ends in a KeyError."""
    model = curved_model()
    optimizer = SELAdam(model.named_parameters())
    model_step(model, optimizer)
    moved = copy.deepcopy(model)
    optimizer.param_groups[0]["params"] = list(moved.parameters())
    with pytest.warns(UserWarning, match="parameters that had been trained were replaced"):
        model_step(moved, optimizer, 1)
    assert set(optimizer.state) == set(moved.parameters())
    assert set(optimizer._seen) <= set(optimizer.state)
    assert all(float(state["step"]) == 1 for state in optimizer.state.values())
    optimizer.state_dict()


def test_a_group_that_was_taken_out_comes_back_to_its_state() -> None:
    """It is not saved meanwhile. Guard: SELOptimizer.step drops states only as new ones begin; state_dict hides them."""
    params, other = make([(4, 3), (4, 3)]), make([(4, 3), (4, 3)])
    optimizer, steady = (SELAdam([{"params": [p]} for p in both_of]) for both_of in (params, other))
    train(optimizer, params, 2)
    group = optimizer.param_groups.pop()
    train(optimizer, params[:1], 2)
    assert list(optimizer.state_dict()["state"]) == [0]
    optimizer.param_groups.append(group)
    train(optimizer, params, 2)
    train(steady, other, 2)
    train(steady, other, 2)
    same(params[1], other[1])


# ---------------------------------------------------------------------------------------------------------- state and copies


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    "beta", [12, np.float64(12.5), torch.tensor(12.5), "auto", "width", lambda name, p: np.float32(9)]
)
def test_state_is_flat_tensors_and_plain_numbers(structure: str, beta: Any) -> None:
    """Contract 4. Guard: `_check_beta` makes a plain number of what it is given; create_state makes one flat dict."""
    params = make()
    optimizer = SELAdam(
        params, curved="all", structure=structure, beta=beta, amsgrad=True, residual_rank=1,
        scale_init={"e": np.float64(1.1)}, scale_lr={"e": np.float64(2.0), "l": (np.float64(2.0), 1)},
    )  # fmt: skip
    train(optimizer, params, 2)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        assert all(type(value) in (Tensor, float, int) for value in state.values())
    loaded = through_a_file(saved)
    SELAdam(make(), curved="all", structure=structure, amsgrad=True, residual_rank=1).load_state_dict(
        {**loaded, "state": {}}
    )
    for key, value in saved["param_groups"][0].items():
        assert value == loaded["param_groups"][0][key]


def through_a_file(saved: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def note(*_: Any) -> None:
    notes.append(1)


notes: list[int] = []


def takes_matrices(name: str, p: Tensor) -> bool:
    return p.dim() == 2


@both
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("steps", [0, 3])
def test_copies_go_on_as_the_original(how: str, steps: int, foreach: bool) -> None:
    """Contract 12. Guards: the hooks in __getstate__; `_curve` without an entry in `_seen`; `_seen` left out of copies."""
    model = curved_model()
    optimizer = SELAdam(model.named_parameters(), foreach=foreach, curved=takes_matrices, scale_lr={"e": 2.0})
    optimizer._log_once("said before")
    optimizer.register_step_post_hook(note)
    optimizer.register_state_dict_pre_hook(note)
    scheduler = LambdaLR(optimizer, lambda t: 0.9**t)
    for t in range(steps):
        model_step(model, optimizer, t)
        scheduler.step()
    pair = (model, optimizer)
    other, twin = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert all(a is not b for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert twin._warned == optimizer._warned and "step" not in vars(twin)
    assert twin.describe() == optimizer.describe()
    notes.clear()
    twin.state_dict()
    for t in range(steps, steps + 3):
        for m, o in ((model, optimizer), (other, twin)):
            model_step(m, o, t)
    assert len(notes) == 7
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        same(a, b)
        for key, value in optimizer.state[a].items():
            assert value == twin.state[b][key] if isinstance(value, float) else value.equal(twin.state[b][key])


@pytest.mark.parametrize(
    "options",
    [
        {"curved": lambda name, p: p.dim() == 2, "beta": lambda name, p: 9.0},
        {"init": "mismatched", "scale_lr": PAPER_SCALE_LR, "scale_init": {"l": "beta"}},
        {"betas": [0.8, 0.9], "beta": "width", "anneal_steps": 100},
    ],
)
def test_a_saved_state_loads_with_weights_only(options: dict[str, Any]) -> None:
    """Contract 12. Guard: add_param_group turns callables into lists, and mappings into plain dicts."""
    model = curved_model()
    optimizer = SELAdam(model.named_parameters(), **options)
    model_step(model, optimizer)
    saved = optimizer.state_dict()
    loaded = through_a_file(saved)
    assert loaded["param_groups"] == saved["param_groups"]
    assert loaded["state"].keys() == saved["state"].keys()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("setting", [{}, {**DEGENERATE, "beta": 12.5}], ids=["usual", "degenerate"])
def test_raw_does_not_alias_the_weight(setting: dict[str, Any], dtype: torch.dtype) -> None:
    """Contract 14. Guard: `_rule.inverse` returns a new tensor, also where raw = weight."""
    p = make(P, dtype)[0]
    optimizer = SELAdam([p], **setting)
    raw = optimizer.raw(p)
    assert raw.untyped_storage().data_ptr() != p.untyped_storage().data_ptr()
    before = raw.clone()
    p.data.fill_(0.5)
    same(raw, before)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_saved_state_resumes_bit_exact(dtype: torch.dtype, foreach: bool) -> None:
    """A plain torch.save, torch.load(weights_only=True), load_state_dict: raw and scales stay in float32."""
    model = curved_model(dtype)
    options: dict[str, Any] = {"foreach": foreach, "lr": 3e-3, "anneal_steps": 10}
    options["eps"] = 1e-4 if dtype == torch.float16 else 1e-8  # torch's Adam of the plain ones divides by it in float16
    optimizer = SELAdam(model.named_parameters(), **options)
    for t in range(5):
        model_step(model, optimizer, t)
    loaded = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = curved_model(dtype)
    other.load_state_dict(loaded["model"])
    resumed = SELAdam(other.named_parameters(), **options)
    resumed.load_state_dict(loaded["optimizer"])
    wide = _rule.state_dtype(dtype)
    for _, p in resumed.named_curved():
        assert all(v.dtype == wide for k, v in resumed.state[p].items() if isinstance(v, Tensor) and k != "step")
        assert resumed.state[p]["step"].dtype == torch.float32
    for t in range(5, 10):
        model_step(model, optimizer, t)
        model_step(other, resumed, t)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert p.isfinite().all()
        same(p, q)
    for p, q in zip((p for _, p in optimizer.named_curved()), (q for _, q in resumed.named_curved()), strict=True):
        same(optimizer.raw(p), resumed.raw(q))


# -------------------------------------------------------------------------------------------------- unusual parameters

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": lambda t: t.to(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "offset": lambda t: torch.cat([t[:1], t])[1:],
}


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grads", ["same", "contiguous"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layout_makes_no_difference(layout: str, grads: str, dtype: torch.dtype, foreach: bool) -> None:
    """Contract 24. Guard: `param.copy_` in _run_single for weights whose matrix is not a view of them."""
    shapes: list[tuple[int, ...]] = [(4, 6, 3, 3), (4, 6, 3, 3)]
    usual = make(shapes, dtype)
    other = [nn.Parameter(LAYOUTS[layout](p.detach())) for p in usual]
    assert layout == "offset" or not other[0].is_contiguous()
    strides = [p.stride() for p in other]
    first, second = (SELAdam(p, foreach=foreach, weight_decay=0.1, residual_rank=1) for p in (usual, other))
    for t in range(3):
        give_grads(usual, t)
        for p, q in zip(usual, other, strict=True):
            assert p.grad is not None
            q.grad = p.grad.clone() if grads == "contiguous" else torch.empty_like(q).copy_(p.grad)
        first.step()
        second.step()
    for p, q, stride in zip(usual, other, strides, strict=True):
        same(p, q)
        same(first.raw(p), second.raw(q))
        assert q.stride() == stride


@both
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3), (0, 0), (), (1,), (1, 1)])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_empty_and_tiny_parameters(structure: str, shape: tuple[int, ...], foreach: bool) -> None:
    """Contract 24. Guard: the mean slope of a parameter without elements is 1, not NaN."""
    params = make([shape, shape, (4, 4)])
    optimizer = SELAdam(
        params,
        curved="all",
        structure=structure,
        foreach=foreach,
        residual_rank=1,
        lr_space="weight",
        init="mismatched",
    )
    train(optimizer, params, 3)
    for p in params:
        assert p.isfinite().all() and math.isfinite(optimizer.state[p]["mean_slope"])
    loaded = through_a_file(optimizer.state_dict())
    optimizer.load_state_dict(loaded)
    train(optimizer, params, 1, start=3)
    assert optimizer.describe()


@both
def test_mixed_dtypes_in_one_group_are_as_each_alone(foreach: bool) -> None:
    """Contract 24. Guard: the dtypes in `_run_batched`'s key."""
    together = [p for dtype in DTYPES for p in make(SHAPES, dtype)]
    optimizer = SELAdam(together, curved="all", foreach=foreach, weight_decay=0.1)
    for t in range(3):
        for k in range(len(DTYPES)):
            give_grads(together[k * len(SHAPES) : (k + 1) * len(SHAPES)], t)
        optimizer.step()
    for k, dtype in enumerate(DTYPES):
        alone = make(SHAPES, dtype)
        reference = SELAdam(alone, curved="all", foreach=foreach, weight_decay=0.1)
        train(reference, alone, 3)
        for p, q in zip(together[k * len(SHAPES) :], alone, strict=False):
            same(p, q)
            assert optimizer.raw(p).dtype == _rule.state_dtype(dtype)
            same(optimizer.raw(p), reference.raw(q))
            for a, b in zip(optimizer.scales(p).values(), reference.scales(q).values(), strict=True):
                same(a[0], b[0])


@both
@pytest.mark.parametrize("check_edits", ["tracked", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_around_a_step_makes_no_difference(dtype: torch.dtype, check_edits: str, foreach: bool) -> None:
    """Products of matrices are what autocast rounds: factor sums and the residual."""
    outside, inside = make([(16, 16)] * 2, dtype), make([(16, 16)] * 2, dtype)
    options: dict[str, Any] = {"foreach": foreach, "residual_rank": 2, "check_edits": check_edits}
    first, second = SELAdam(outside, **options), SELAdam(inside, **options)
    for t in range(5):
        train(first, outside, 1, t)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            train(second, inside, 1, t)
            second.resync()
            second.load_state_dict(second.state_dict())
    for p, q in zip(outside, inside, strict=True):
        same(p, q)
        same(first.raw(p), second.raw(q))


@both
def test_tied_weights_are_one_parameter(foreach: bool) -> None:
    """Contract 24. Guard: one state a tensor, whose gradient sums over its uses."""
    torch.manual_seed(0)
    a, b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    b.weight = a.weight
    model = nn.Sequential(a, nn.Tanh(), b)
    optimizer = SELAdam(model.named_parameters(), foreach=foreach)
    for t in range(3):
        model_step(model, optimizer, t)
    assert len(optimizer.state) == 1 and a.weight is b.weight
    same(a.weight, mapped(optimizer, a.weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_counters_do_not_follow_the_default_dtype(dtype: torch.dtype) -> None:
    params = make(P)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        optimizer = SELAdam(params, residual_rank=1)
        give_grads(params, 0)
        for _ in range(260):
            optimizer.step()
    finally:
        torch.set_default_dtype(before)
    state = optimizer.state[params[0]]
    assert float(state["step"]) == 260
    assert {v.dtype for v in state.values() if isinstance(v, Tensor)} == {torch.float32}


def test_state_does_not_follow_the_default_device() -> None:
    params = make([(3, 3), (3, 3)])
    give_grads(params, 0)
    with torch.device("meta"):
        optimizer = SELAdam(params, residual_rank=1, foreach=True)
        optimizer.step()
        optimizer.describe()
    for state in optimizer.state.values():
        assert {v.device.type for v in state.values() if isinstance(v, Tensor)} == {"cpu"}


# ------------------------------------------------------------------------------------------------------------------- stacks


def test_stacks_stay_within_64_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: list[int] = []
    singles: list[int] = []
    monkeypatch.setattr(_execute, "_run_stack", lambda items, *_: stacks.append(len(items)))
    monkeypatch.setattr(_execute, "_run_single", lambda items, *_: singles.append(len(items)))

    def run(shape: tuple[int, ...], count: int, device: str) -> None:
        stacks.clear()
        singles.clear()
        items = []
        for _ in range(count):
            p = torch.empty(shape, device=device)
            state: dict[str, Any] = {key: torch.empty(shape, device=device) for key in ("raw", "exp_avg", "exp_avg_sq")}
            curve = _rule.Curve(12.5, "mismatched", (), False)
            items.append(_execute.Item(p, p, _rule.views(state, 0, False), curve, 1.0, 1.0, torch.empty(4)))
        hyper = _rule.Hyper(1e-3, 0.9, 0.999, 1e-8, 0.0, False, False, False)
        _execute.run(items, hyper, batched=True)

    # Elsewhere than on the CPU; the meta device stands in for an accelerator.
    run((1024, 1024), 40, "meta")
    assert stacks == [16, 16, 8] and not singles
    run((4096, 4097), 3, "meta")
    assert not stacks and sum(singles) == 3
    run((64, 64), 1000, "cpu")
    assert stacks and max(stacks) * 64 * 64 * 4 <= 64 << 20 and sum(stacks) + sum(singles) == 1000


@both
def test_batching_changes_nothing_but_rounding(foreach: bool) -> None:
    ours, theirs = make([(6, 4)] * 3, torch.float64), make([(6, 4)] * 3, torch.float64)
    optimizer = SELAdam(ours, foreach=foreach, beta=lambda name, p: 5.0 + int(name[-1]), lr_space="weight")
    reference = SELAdam(theirs, foreach=False, beta=lambda name, p: 5.0 + int(name[-1]), lr_space="weight")
    train(optimizer, ours, 10)
    train(reference, theirs, 10)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def _new_moment(optimizer: SELAdam, p: nn.Parameter) -> None:
    optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"] * 3


def _new_state(optimizer: SELAdam, p: nn.Parameter) -> None:
    optimizer.state[p] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in optimizer.state[p].items()}
    optimizer.state[p]["scale_row_exp_avg"].add_(0.01)


def _more_steps(dtype: torch.dtype) -> Callable[[SELAdam, nn.Parameter], None]:
    return lambda optimizer, p: optimizer.state[p].update(step=torch.tensor(1, dtype=dtype))


def _other_slope(optimizer: SELAdam, p: nn.Parameter) -> None:
    optimizer.state[p]["mean_slope"] *= 2


def _option(**options: Any) -> Callable[[SELAdam, nn.Parameter], None]:
    return lambda optimizer, p: optimizer.param_groups[0].update(options)


def _rates_in_place(optimizer: SELAdam, p: nn.Parameter) -> None:
    optimizer.param_groups[0]["scale_lr"]["e"] = 0.5


def _other_memory(optimizer: SELAdam, p: nn.Parameter) -> None:
    p.data = p.detach().T.contiguous().T


def _edit(optimizer: SELAdam, p: nn.Parameter) -> None:
    with torch.no_grad():
        p[0] *= 2


CHANGES: dict[str, Callable[[SELAdam, nn.Parameter], None]] = {
    "a moment": _new_moment,
    "the state": _new_state,
    "the count": _more_steps(torch.float32),
    "the count, of another dtype": _more_steps(torch.float64),
    "the slope": _other_slope,
    "amsgrad": _option(amsgrad=True),
    "lr_space": _option(lr_space="raw"),
    "scale_lr": _option(scale_lr={"e": 1.0, "n": 0.1}),
    "scale_lr in place": _rates_in_place,
    "weight_decay": _option(weight_decay=0.1, decoupled_weight_decay=True),
    "foreach": _option(foreach=True, fused=False),
    "memory": _other_memory,
    "an edit": _edit,
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_between_steps_is_not_taken_from_the_last_one(change: str, fused: bool) -> None:
    """A step goes on from what the one before found out about a parameter. Against an optimizer that finds it out anew each time."""
    ends = []
    for anew in (False, True):
        p = nn.Parameter(mixed(6, 5, seed=1, size=0.1))
        optimizer = SELAdam([p], lr=1e-2, fused=fused, foreach=False, scale_lr={"e": 2.0, "l": 1.0, "m": 0.1})
        for t in range(5):
            p.grad = mixed(6, 5, seed=10 + t)
            if t == 3:
                CHANGES[change](optimizer, p)
            if anew:
                for seen in optimizer._seen.values():
                    seen.ready = None
            optimizer.step()
            assert optimizer._seen[p].ready is not None
        ends.append({"weight": p.detach(), **optimizer.state[p]})
    plain = nn.Parameter(mixed(6, 5, seed=1, size=0.1))
    unchanged = SELAdam([plain], lr=1e-2, fused=fused, foreach=False, scale_lr={"e": 2.0, "l": 1.0, "m": 0.1})
    for t in range(5):
        plain.grad = mixed(6, 5, seed=10 + t)
        unchanged.step()
    assert ends[0].keys() == ends[1].keys()
    for key, value in ends[0].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(ends[1][key])), key
    if change not in ("memory", "foreach"):
        assert not torch.equal(plain, ends[0]["weight"])


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_keeps_no_gradient_alive(fused: bool) -> None:
    p = nn.Parameter(torch.full((4, 3), 0.1))
    optimizer = SELAdam([p], fused=fused)
    for _ in range(3):
        p.grad = torch.ones(4, 3)
        last = weakref.ref(p.grad)
        optimizer.step()
        p.grad = None
        assert last() is None
