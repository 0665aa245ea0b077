"""Saving and loading: what is resumed is what would have gone on, bit for bit, and a bad checkpoint changes nothing."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from seloptim import SELAdam, SELAdamW
from seloptim._base import FORMAT
from seloptim.convert import to_adam_state
from tests.cases import make_model, mixed

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Steps whose batches depend on their number alone."""
    dtype = next(model.parameters()).dtype
    for k in steps:
        optimizer.zero_grad()
        x, y = mixed(8, 6, seed=2 * k + 1, dtype=dtype), mixed(8, 4, seed=2 * k + 2, dtype=dtype)
        (model(x) - y).square().mean().backward()
        optimizer.step()


def through_file(saved: Any) -> Any:
    """What a file hands back, read as from a stranger (contract 4, 12)."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def flat(state: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict):
        for key in sorted(state, key=str):
            yield from ((f"{key}.{inner}", value) for inner, value in flat(state[key]))
    elif isinstance(state, list):
        yield from flat(dict(enumerate(state)))
    else:
        yield "", state


def same(a: Any, b: Any) -> None:
    """Equal keys, and values equal bit for bit, in the same dtype."""
    first, second = dict(flat(a)), dict(flat(b))
    assert first.keys() == second.keys()
    for key, value in first.items():
        if isinstance(value, Tensor):
            assert value.dtype == second[key].dtype, key
            assert torch.equal(value, second[key]), key
        else:
            assert value == second[key], key


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def other_weights(dtype: torch.dtype) -> nn.Module:
    """The model of another process: the same shapes, another initialisation."""
    model = make_model("mlp", dtype)
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(mixed(*p.shape, seed=77 + k, size=0.2, dtype=dtype))
    return model


@contextmanager
def weights_were_set() -> Iterator[None]:
    with pytest.warns(UserWarning, match="raw weights are authoritative"):
        yield


# ------------------------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("init", ["preserve", "mismatched"])
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_resume_is_bit_exact(dtype: torch.dtype, order: str, init: str) -> None:
    """Contract 1, 3, 4. Guard: SELAdam._reinstall puts tensors back in the state's dtype, which torch casts to p's."""
    model = make_model("mlp", dtype)
    optimizer = SELAdamW(model.named_parameters(), init=init, anneal_steps=8, amsgrad=True)
    train(model, optimizer, range(5))
    weights, state = through_file(model.state_dict()), through_file(optimizer.state_dict())
    train(model, optimizer, range(5, 10))

    resumed = other_weights(dtype)
    again = SELAdamW(resumed.named_parameters(), init=init, anneal_steps=8, amsgrad=True)
    if order == "model first":
        resumed.load_state_dict(weights)
        again.load_state_dict(state)
    else:
        with weights_were_set():
            again.load_state_dict(state)
        resumed.load_state_dict(weights)
    same(again.state_dict()["state"], state["state"])
    train(resumed, again, range(5, 10))
    same(resumed.state_dict(), model.state_dict())
    same(again.state_dict(), optimizer.state_dict())


def test_weights_shrunk_after_their_load_are_set_back() -> None:
    """A model loaded before SELAdam(init="mismatched") is shrunk again at construction. Guard: SELAdam._restore."""
    model = make_model("mlp", torch.float32)
    optimizer = SELAdam(model.parameters(), init="mismatched")
    train(model, optimizer, range(3))
    weights, state = through_file(model.state_dict()), through_file(optimizer.state_dict())
    resumed = other_weights(torch.float32)
    resumed.load_state_dict(weights)
    again = SELAdam(resumed.parameters(), init="mismatched")
    with weights_were_set():
        again.load_state_dict(state)
    same(resumed.state_dict(), weights)


def test_what_is_saved_includes_edits_already_seen() -> None:
    """Weights clipped after each step, then saved. Guard: state_dict() takes edits before it saves (Shadow._settle)."""

    def clipped(model: nn.Module, optimizer: SELAdam, steps: Iterable[int]) -> None:
        for k in steps:
            train(model, optimizer, [k])
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.2, 0.2)

    model = make_model("mlp", torch.float32)
    optimizer = SELAdam(model.parameters(), lr=1e-2)
    clipped(model, optimizer, range(4))
    weights, state = through_file(model.state_dict()), through_file(optimizer.state_dict())
    clipped(model, optimizer, range(4, 7))
    resumed = other_weights(torch.float32)
    again = SELAdam(resumed.parameters(), lr=1e-2)
    resumed.load_state_dict(weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_state_dict(state)
    clipped(resumed, again, range(4, 7))
    same(resumed.state_dict(), model.state_dict())


def odd_parameters() -> list[nn.Parameter]:
    shared = mixed(6, 8, seed=5, size=0.1, dtype=torch.float32)
    tensors = [
        mixed(0, 3, dtype=torch.float32),
        mixed(1, seed=1, size=0.1, dtype=torch.float32).reshape(()),
        mixed(2, 3, 2, 2, seed=2, size=0.1, dtype=torch.float32).to(memory_format=torch.channels_last),
        mixed(5, 3, seed=3, size=0.1, dtype=torch.float32).t(),
        shared[:, ::2],
        mixed(4, 3, seed=6, size=0.1),
        mixed(4, 3, seed=7, size=0.1, dtype=torch.bfloat16),
        mixed(4, 3, seed=8, size=0.1, dtype=torch.float16),
        mixed(3, seed=9, size=0.1, dtype=torch.bfloat16),
        torch.complex(mixed(3, 2, seed=10), mixed(3, 2, seed=11)),
    ]
    return [nn.Parameter(t) for t in tensors]


@pytest.mark.parametrize("curved", ["matrices", "all"])
def test_odd_parameters_resume_bit_exact(curved: str) -> None:
    """Contract 24. Guard: _rule.create_state keeps raw contiguous, and _reinstall keeps every state in its own dtype."""

    def step(params: list[nn.Parameter], optimizer: SELAdam, steps: Iterable[int]) -> None:
        for k in steps:
            for i, p in enumerate(params):
                real = mixed(*p.shape, seed=100 * k + i) if p.dim() else mixed(1, seed=100 * k + i).reshape(())
                p.grad = real.to(p.dtype)
            optimizer.step()

    params = odd_parameters()
    optimizer = SELAdam(params, curved=curved, residual_rank=1 if curved == "matrices" else 0)
    step(params, optimizer, range(3))
    weights, state = through_file([p.detach() for p in params]), through_file(optimizer.state_dict())
    step(params, optimizer, range(3, 6))
    others = odd_parameters()
    with torch.no_grad():
        for p, w in zip(others, weights, strict=True):
            p.copy_(w)
    again = SELAdam(others, curved=curved)
    again.load_state_dict(state)
    step(others, again, range(3, 6))
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q) and p.stride() == q.stride()
    same(again.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_state_of_other_strides_loads() -> None:
    """Contract 24: a tool may have stored tensors transposed. Guards: _reinstall and to_adam_state make them contiguous."""
    p = nn.Parameter(mixed(2, 3, 4, size=0.1, dtype=torch.float32))
    p.grad = mixed(2, 3, 4, seed=1, dtype=torch.float32)
    optimizer = SELAdam([p])
    optimizer.step()
    state = through_file(optimizer.state_dict())
    values = state["state"][0]
    values.update({k: v.mT.contiguous().mT for k, v in values.items() if isinstance(v, Tensor) and v.dim() > 1})
    same(to_adam_state(state), to_adam_state(optimizer.state_dict()))
    again = SELAdam([p])
    again.load_state_dict(state)
    same(again.state_dict()["state"], optimizer.state_dict()["state"])
    again.step()


def test_numbers_that_were_saved_as_tensors_are_numbers_again() -> None:
    """Some formats hold tensors alone. Guard: NUMBERS in SELOptimizer._reinstall; cast to float32, the resume is not exact."""
    models = [make_model("mlp", torch.float32) for _ in range(2)]
    first, second = (SELAdam(model.named_parameters(), beta=3.1) for model in models)
    for model, optimizer in zip(models, (first, second), strict=True):
        train(model, optimizer, range(2))
    saved = copy.deepcopy(second.state_dict())
    for state in saved["state"].values():
        state.update({k: torch.tensor(v, dtype=torch.float64) for k, v in state.items() if isinstance(v, float)})
    second.load_state_dict(saved)
    for model, optimizer in zip(models, (first, second), strict=True):
        train(model, optimizer, range(2, 4))
    same(models[0].state_dict(), models[1].state_dict())
    assert all(isinstance(second.beta(p), float) for _, p in second.named_curved())


def test_counters_are_not_cast() -> None:
    """Contract 3: a bfloat16 counter sticks at 256. Guard: convert.as_step, and no counter but `step`."""
    model = make_model("mlp", torch.bfloat16)
    optimizer = SELAdam(model.parameters())
    train(model, optimizer, range(1))
    state = through_file(optimizer.state_dict())
    for values in state["state"].values():
        values["step"] = torch.tensor(257.0)
    optimizer.load_state_dict(state)
    train(model, optimizer, range(1))
    assert {float(values["step"]) for values in optimizer.state.values()} == {258.0}


def test_a_state_holds_tensors_and_plain_numbers() -> None:
    """Contract 4, 12. Guard: groups and states hold no classes; torch.load(weights_only=True) says so."""
    model = make_model("mlp", torch.float32)
    optimizer = SELAdam(
        model.named_parameters(),
        curved=lambda name, p: p.dim() > 1,
        beta=lambda name, p: 5.0,
        scale_lr={"e": (2.0, 1.0)},
        scale_init={"l": "beta"},
    )
    state = optimizer.state_dict()
    for values in state["state"].values():
        assert {type(value) for value in values.values()} <= {Tensor, int, float}
    same(through_file(state), state)


# ------------------------------------------------------------------------------------------- hooks, copies, who owns what


def test_hooks_run_around_the_load() -> None:
    """Contract 2. Guard: _keep_incoming is registered last, and __setstate__ puts tensors back before post-hooks."""
    model = make_model("mlp", torch.bfloat16)
    optimizer = SELAdam(model.parameters())
    train(model, optimizer, range(2))
    seen: dict[str, Any] = {}

    def before(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(state_dict)
        changed["state"][0]["exp_avg"].fill_(1 + 2**-20)
        return changed

    def after(optimizer: Any) -> None:
        seen.update(optimizer.state[next(iter(model.parameters()))])

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    optimizer.load_state_dict(through_file(optimizer.state_dict()))
    assert seen["raw"].dtype == torch.float32
    assert bool((seen["exp_avg"] == 1 + 2**-20).all())


CALLS: list[str] = []


def count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    CALLS.append("step")


def count_load(optimizer: Any, state_dict: Any) -> None:
    CALLS.append("load")


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_go_on_alike_and_keep_their_hooks(how: Callable[[Any], Any]) -> None:
    """Contract 12, 2. Guard: SELAdam.__getstate__ keeps hooks; __setstate__ lets a new hook take no id of theirs."""
    model = make_model("mlp", torch.bfloat16)
    optimizer = SELAdam(model.parameters())
    optimizer.register_step_pre_hook(count_step)
    optimizer.register_load_state_dict_pre_hook(count_load)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0)  # patches `step` in __dict__
    train(model, optimizer, range(3))
    twin, its = how((model, optimizer))
    torch.utils.hooks.RemovableHandle.next_id = 0
    twin, its = how((twin, its))  # as in a new process
    CALLS.clear()
    its.register_step_pre_hook(count_step)
    train(twin, its, range(3, 4))
    assert CALLS == ["step", "step"]
    its.load_state_dict(its.state_dict())
    its.load_state_dict(its.state_dict())
    assert CALLS[2:] == ["load", "load"]
    train(model, optimizer, range(3, 5))
    train(twin, its, range(4, 5))
    same(twin.state_dict(), model.state_dict())
    assert isinstance(its.describe(), str)
    assert "step" not in vars(its)


def test_accessors_work_on_a_copy_before_its_first_step() -> None:
    """Contract 12. Guard: Shadow._curve finds out by itself what _seen does not know."""
    model = make_model("mlp", torch.float32)
    optimizer = SELAdam(model.named_parameters())
    train(model, optimizer, range(2))
    its = copy.deepcopy(optimizer)
    assert its.describe() == optimizer.describe()
    assert [name for name, _ in its.named_curved()] == [name for name, _ in optimizer.named_curved()]


def test_two_optimizers_that_load_one_dict_share_nothing() -> None:
    """Contract 5. Guard: _reinstall copies, of parameters that are not curved too, where torch shares what it need not cast."""
    model = make_model("mlp", torch.float32)
    optimizer = SELAdam(model.parameters())
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    kept = copy.deepcopy(state)
    pairs = []
    for _ in range(2):
        twin = copy.deepcopy(model)
        its = SELAdam(twin.parameters())
        its.load_state_dict(state)
        pairs.append((twin, its))
    twin, its = pairs[0]
    train(twin, its, range(2, 5))
    same(state, kept)
    same(pairs[1][1].state_dict(), kept)


def test_raw_is_never_the_parameter() -> None:
    """Contract 14. Guard: _rule.inverse makes a new tensor, also where map and weight agree (float32, degenerate map)."""
    p = nn.Parameter(mixed(4, 3, size=0.1, dtype=torch.float32))
    optimizer = SELAdam([p], combine="congruent", beta=1e-6, scale_init={"e": 0.0, "l": "beta"}, structure="none")
    assert torch.equal(optimizer.raw(p), p)
    assert optimizer.raw(p).untyped_storage().data_ptr() != p.untyped_storage().data_ptr()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.raw(p).untyped_storage().data_ptr() != p.untyped_storage().data_ptr()


# -------------------------------------------------------------------------------------------------- groups, names, shapes


def test_a_saved_group_without_newer_keys_keeps_the_live_ones() -> None:
    """Contract 7, 15. Guard: _merged lays the saved group over the live one; betas may be a list."""
    model = make_model("mlp", torch.float32)
    optimizer = SELAdam(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    state = through_file(optimizer.state_dict())
    group = state["param_groups"][0]
    for key in ("check_edits", "scale_lr", "decoupled_weight_decay", "residual_rank"):
        del group[key]
    group["betas"] = [0.8, 0.9]
    live = SELAdam(model.parameters(), lr=1e-3, check_edits="full", scale_lr={"e": 2.0}, decoupled_weight_decay=True)
    live.load_state_dict(state)
    loaded = live.param_groups[0]
    assert (
        loaded["check_edits"] == "full" and loaded["scale_lr"] == {"e": [2.0, 2.0]} and loaded["decoupled_weight_decay"]
    )
    assert loaded["lr"] == 1e-2 and tuple(loaded["betas"]) == (0.8, 0.9) and loaded["residual_rank"] == 0
    train(model, live, range(2, 3))


def test_late_groups_and_unfrozen_parameters_are_saved() -> None:
    """Contract 11. Guard: state_dict() creates what is missing, of every parameter that requires grad."""
    model = make_model("mlp", torch.float32)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    frozen = matrices[1].requires_grad_(False)
    optimizer = SELAdam(matrices[:2])
    train(model, optimizer, range(2))
    assert 1 not in optimizer.state_dict()["state"]
    frozen.requires_grad_()
    optimizer.add_param_group({"params": matrices[2:], "beta": 5.0})
    weights, state = through_file(model.state_dict()), through_file(optimizer.state_dict())
    assert set(state["state"]) == {0, 1, 2, 3}
    assert all(state["state"][k]["beta"] == 5.0 for k in (2, 3))
    train(model, optimizer, range(2, 5))

    resumed = make_model("mlp", torch.float32)
    resumed.load_state_dict(weights)
    others = [p for p in resumed.parameters() if p.dim() == 2]
    again = SELAdam(others[:2])
    with pytest.raises(ValueError, match="different number of parameter groups"):
        again.load_state_dict(state)
    again.add_param_group({"params": others[2:]})
    again.load_state_dict(state)
    train(resumed, again, range(2, 5))
    same(resumed.state_dict(), model.state_dict())


def named(model: nn.Module, order: Iterable[int], prefix: str = "") -> list[tuple[str, nn.Parameter]]:
    pairs = [(prefix + name, p) for name, p in model.named_parameters() if p.shape == (6, 6)]
    return [pairs[k] for k in order]


@pytest.mark.parametrize("split", [False, True], ids=["one group", "over groups"])
def test_names_in_another_order_are_refused(split: bool) -> None:
    """Contract 13. Guard: _check_names."""
    model = make_model("mlp", torch.float32)
    saved = SELAdam(named(model, (0, 1, 2))).state_dict()
    swapped = named(model, (0, 2, 1))
    if split:
        pair = [{"params": [entry]} for entry in named(model, (0, 2))]
        saved = SELAdam([{"params": [entry]} for entry in named(model, (2, 0))]).state_dict()
        live = SELAdam(pair)
    else:
        live = SELAdam(swapped)
    before = snapshot(model, live)
    with pytest.raises(ValueError, match="another order: position"):
        live.load_state_dict(saved)
    same(snapshot(model, live), before)


def test_prefixes_of_wrappers_are_no_names() -> None:
    """Contract 13. Guard: _names leaves out the parts `module` and `_orig_mod`, and those alone ("submodule.")."""
    model = make_model("mlp", torch.float32)
    saved = SELAdam(named(model, (0, 1, 2), "module.")).state_dict()
    live = SELAdam(named(model, (0, 1, 2), "_orig_mod."))
    live.load_state_dict(saved)
    assert live.param_groups[0]["param_names"][0].startswith("_orig_mod.")
    with pytest.raises(ValueError, match="another order"):
        SELAdam(named(model, (0, 2, 1))).load_state_dict(saved)
    a, b = (nn.Parameter(mixed(3, 3, seed=s, size=0.1)) for s in (1, 2))
    saved = SELAdam([("sub.w", a), ("submodule.w", b)]).state_dict()
    with pytest.raises(ValueError, match="another order"):
        SELAdam([("submodule.w", a), ("sub.w", b)]).load_state_dict(saved)


def corrupt(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    def change(state: dict[str, Any]) -> Any:
        if value is None:
            del state["state"][2][key]
        else:
            state["state"][2][key] = value
        return state

    return change


def corrupt_group(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    def change(state: dict[str, Any]) -> Any:
        state["param_groups"][0][key] = value
        return state

    return change


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "nothing": (lambda state: None, "not an optimizer state"),
    "a list": (lambda state: [state], "not an optimizer state"),
    "no groups": (lambda state: {"state": state["state"]}, "not an optimizer state"),
    "a model": (lambda state: make_model("mlp").state_dict(), "not an optimizer state"),
    "state is a list": (lambda state: {**state, "state": [1]}, "must map parameters"),
    "groups are numbers": (lambda state: {**state, "param_groups": [1]}, "must be a list of mappings"),
    "fewer groups": (lambda state: {**state, "param_groups": []}, "different number of parameter groups"),
    "another size": (corrupt_group("params", [0, 1]), "doesn't match the size"),
    "a later format": (corrupt_group("sel_format", FORMAT + 1), "upgrade seloptim"),
    "an odd format": (corrupt_group("sel_format", "new"), "upgrade seloptim"),
    "another map": (corrupt_group("combine", "os.system"), "Invalid combine"),
    "curved for others": (corrupt_group("curved", [True]), "Invalid curved"),
    "lr is text": (corrupt_group("lr", "fast"), "Invalid learning rate"),
    "betas is a number": (corrupt_group("betas", 0.9), "did you mean beta="),
    "betas out of range": (corrupt_group("betas", (2.0, 0.9)), "Invalid beta parameter"),
    "eps is text": (corrupt_group("eps", "small"), "Invalid options"),
    "raw of another shape": (corrupt("raw", torch.zeros(4, 4)), "has shape .*raw has the shape"),
    "no moments": (corrupt("exp_avg", None), "exp_avg is None"),
    "moments of another shape": (corrupt("exp_avg_sq", torch.zeros(6)), "exp_avg_sq has the shape"),
    "factors of another shape": (corrupt("scale_row", torch.zeros(5, 4)), "scale_row has the shape"),
    "factors without moments": (corrupt("scale_col_exp_avg", None), "scale_col_exp_avg is None"),
    "half a residual": (corrupt("residual_a", torch.zeros(2, 6)), "residual_b is None"),
    "whole numbers": (corrupt("raw", torch.zeros(6, 6, dtype=torch.int64)), "raw is a tensor of torch.int64"),
    "sparse": (corrupt("raw", torch.zeros(6, 6).to_sparse()), "raw is a tensor of .*sparse"),
    "no step": (corrupt("step", None), "step is None"),
    "many steps": (corrupt("step", torch.zeros(2)), "step is tensor"),
    "no beta": (corrupt("beta", None), "beta is None"),
    "a negative beta": (corrupt("beta", -1.0), "beta is -1.0"),
    "no slope": (corrupt("mean_slope", None), "mean_slope is None"),
    "another optimizer's": (
        lambda state: {**state, "state": {**state["state"], 2: {"momentum_buffer": torch.zeros(6, 6)}}},
        "neither Adam's keys nor SELAdam's",
    ),
    "Adam of another shape": (
        lambda state: {
            **state,
            "state": {2: {"step": 1, "exp_avg": torch.zeros(5), "exp_avg_sq": torch.zeros(5)}},
        },
        "exp_avg",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_checkpoint_changes_nothing(name: str) -> None:
    """All or nothing. Guard: SELAdam._check_incoming looks at everything before torch changes anything."""
    change, message = BAD[name]
    model = make_model("mlp", torch.float32)
    optimizer = SELAdam(model.parameters(), lr=1e-2)
    train(model, optimizer, range(1))
    bad = change(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, range(1, 3))
    before = snapshot(model, optimizer)
    state, groups = optimizer.state, optimizer.param_groups
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(bad)
    same(snapshot(model, optimizer), before)
    assert optimizer.state is state and optimizer.param_groups is groups


def test_a_load_that_is_interrupted_changes_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """All or nothing. Guard: SELAdam.__setstate__ puts state and groups back when _reinstall does not come through."""
    model = make_model("mlp", torch.float32)
    optimizer = SELAdam(model.parameters())
    train(model, optimizer, range(1))
    state = through_file(optimizer.state_dict())
    train(model, optimizer, range(1, 3))
    before = snapshot(model, optimizer)

    def interrupted(*args: Any) -> float:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SELAdam, "_restore", interrupted)
        optimizer.load_state_dict(state)
    same(snapshot(model, optimizer), before)
    train(model, optimizer, range(3, 4))


# --------------------------------------------------------------------------------------- torch.distributed.checkpoint


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["lr", "tensor lr"])
@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("grads", [False, True], ids=["", "with gradients"])
def test_dcp_before_the_first_step_changes_nothing(grads: bool, flatten: bool, tensor_lr: bool) -> None:
    """Contract 10. Guards: SELAdam._only_creates does not count the dummy step; state_dict() makes what it skipped."""

    def make() -> tuple[nn.Module, SELAdam]:
        model = make_model("mlp", torch.float32)
        lr = torch.tensor(1e-2) if tensor_lr else 1e-2
        return model, SELAdam(model.parameters(), lr=lr, weight_decay=0.1, anneal_steps=5)

    model, optimizer = make()
    if grads:
        next(iter(model.parameters())).grad = torch.ones(6, 6)
    weights = copy.deepcopy(model.state_dict())
    saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flatten))
    same(model.state_dict(), weights)
    keys = saved if flatten else saved["state"]
    for name, p in model.named_parameters():
        assert (f"state.{name}.step" if flatten else name) in keys
        assert ("raw" in optimizer.state[p]) == (p.dim() == 2)
        assert float(optimizer.state[p]["step"]) == 0
    plain, its = make()
    train(plain, its, range(4))
    train(model, optimizer, range(4))
    same(model.state_dict(), plain.state_dict())
    same(optimizer.state_dict()["state"], its.state_dict()["state"])


def test_a_real_step_at_lr_zero_counts() -> None:
    """Contract 10. Guard: SELAdam._only_creates asks for zero gradients everywhere (a warmup may start at lr = 0)."""
    model = make_model("zero", torch.float32)
    optimizer = SELAdam(model.parameters(), lr=0.0)
    x = mixed(8, 6, dtype=torch.float32)
    model(x).sum().backward()  # the head is at zero: all gradients of the body are zero too
    optimizer.step()
    assert {float(values["step"]) for values in optimizer.state.values()} == {1.0}


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flat"])
def test_dcp_resumes_bit_exact(flatten: bool, order: str, tmp_path: Path) -> None:
    """Contract 10, 1. Guards: load_state_dict's argument is `state_dict`; _reinstall after dcp has loaded in place."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model = make_model("mlp", torch.bfloat16)
    optimizer = SELAdam(model.parameters(), init="mismatched")
    train(model, optimizer, range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on saving without process groups
        weights, state = get_state_dict(model, optimizer, options=options)
        state_dict_saver.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    train(model, optimizer, range(3, 6))

    resumed = other_weights(torch.bfloat16)
    again = SELAdam(resumed.parameters(), init="mismatched")
    weights, state = get_state_dict(resumed, again, options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_loader.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
        if order == "model first":
            set_state_dict(resumed, again, model_state_dict=weights, optim_state_dict=state, options=options)
        else:
            set_optimizer_state_dict(resumed, again, state, options=options)
            set_model_state_dict(resumed, weights)
    train(resumed, again, range(3, 6))
    same(resumed.state_dict(), model.state_dict())
    same(again.state_dict()["state"], optimizer.state_dict()["state"])


def test_dcp_into_a_fresh_optimizer_whose_parameters_stand_in_another_order() -> None:
    """Contract 10, 13. Guard: _names reads dcp's names from `params`, which it sorts, not from `param_names`."""
    model = make_model("mlp", torch.float32)
    optimizer = SELAdam(model.named_parameters())
    train(model, optimizer, range(3))
    weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    resumed = other_weights(torch.float32)
    again = SELAdam(list(resumed.named_parameters())[::-1])
    set_model_state_dict(resumed, weights)
    set_optimizer_state_dict(resumed, again, state)
    assert again.param_groups[0]["param_names"][0] == "layers.6.bias"
    train(model, optimizer, range(3, 6))
    train(resumed, again, range(3, 6))
    same(resumed.state_dict(), model.state_dict())
