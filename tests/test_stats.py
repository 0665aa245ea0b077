"""stats(): each number against its definition in float64, what is left out, and that it only looks."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from seloptim import SELAdam
from seloptim._stats import SAMPLE, _spread

from .cases import CASES, Case, losses, make_model, mixed
from .oracle import sel_map


def materialised(optimizer: SELAdam, p: Tensor) -> dict[str, Tensor]:
    return {kind: (row * col).expand(p.shape) for kind, (row, col) in optimizer.scales(p).items()}


def expected(optimizer: SELAdam, p: Tensor, start: Tensor, before: Tensor, combine: str) -> dict[str, float]:
    """The docstring's list, one plain line each."""
    found: dict[str, float] = {}
    scales, beta, w = materialised(optimizer, p), optimizer.beta(p), p.detach()
    for kind, scale in scales.items():
        if kind != "n" or bool((scale != 0).any()):
            for what in ("mean", "min", "max"):
                found[f"scale_{kind}_{what}"] = getattr(scale, what)().item()
    found["size_beta_rms"] = beta * w.square().mean().sqrt().item()
    raw = optimizer.raw(p).clone().requires_grad_()
    with torch.enable_grad():
        mapped = sel_map(raw, *(scales[kind] for kind in ("e", "l", "m", "n")), beta=beta, combine=combine)
        (slope,) = torch.autograd.grad(mapped.sum(), raw)
    found["slope_negative"] = slope[w < 0].mean().item()
    found["slope_positive"] = slope[w > 0].mean().item()
    order = w.abs().flatten().argsort()
    tenth = max(1, w.numel() // 10)
    for what, some in (("smallest", order[:tenth]), ("largest", order[-tenth:])):
        change = (w - before).abs().flatten()[some].sum()
        found[f"step_{what}_decile"] = (change / w.abs().flatten()[some].sum()).item()
    found["step_ratio"] = found["step_smallest_decile"] / found["step_largest_decile"]
    z = (w - w.mean()) / w.std(correction=0)
    found["tail_beyond_4_sigma"] = (z.abs() > 4).double().mean().item()
    found["tail_kurtosis"] = z.pow(4).mean().item()
    if start.any():
        found["tail_max_over_initial_rms"] = (w.abs().max() / start.square().mean().sqrt()).item()
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_number_is_what_the_docstring_says(case: Case) -> None:
    model = make_model(case.model)
    optimizer = SELAdam(model.named_parameters(), lr=1e-2, **case.options)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    batches = losses(model)
    before: dict[str, Tensor] = {}
    for _ in range(4):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.zero_grad()
        next(batches).backward()
        optimizer.step()
    stats = optimizer.stats()
    wanted = {
        f"{name}/{what}": value
        for name, p in optimizer.named_curved()
        for what, value in expected(optimizer, p, start[name], before[name], case.options["combine"]).items()
        if not math.isnan(value)
    }
    assert wanted.keys() == stats.keys()
    for key, value in wanted.items():
        assert stats[key] == pytest.approx(value, rel=1e-9, abs=1e-14), key


def trained(
    *shape: int, steps: int = 2, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Parameter, SELAdam]:
    p = nn.Parameter(mixed(*shape, size=0.05, dtype=dtype))
    optimizer = SELAdam([("w", p)], **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        p.grad = torch.randn(shape, generator=generator).to(dtype)
        optimizer.step()
    return p, optimizer


def test_the_scales_extremes_hold_with_factors_of_both_signs() -> None:
    p, optimizer = trained(6, 5, scale_init={"n": 0.1}, scale_lr={"n": 1.0})
    state = optimizer.state[p]
    state["scale_row"].copy_(mixed(6, 4, seed=8))
    state["scale_col"].copy_(mixed(5, 4, seed=9))
    stats = optimizer.stats()
    for kind, scale in materialised(optimizer, p).items():
        assert stats[f"w/scale_{kind}_min"] == pytest.approx(scale.min().item(), rel=1e-6)
        assert stats[f"w/scale_{kind}_max"] == pytest.approx(scale.max().item(), rel=1e-6)
        assert stats[f"w/scale_{kind}_mean"] == pytest.approx(scale.mean().item(), rel=1e-5)


def test_a_sample_stands_for_a_large_parameter() -> None:
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(300, 256, generator=generator) * 0.05)
    assert p.numel() > SAMPLE
    optimizer = SELAdam([("w", p)], lr=1e-3)
    before = p.detach().double()
    for _ in range(3):
        before = p.detach().double()
        p.grad = torch.randn(300, 256, generator=generator)
        optimizer.step()
    w = p.detach().double()
    stats = optimizer.stats()
    order = w.abs().flatten().argsort()
    tenth = w.numel() // 10
    for what, some in (("smallest", order[:tenth]), ("largest", order[-tenth:])):
        exact = (w - before).abs().flatten()[some].sum() / w.abs().flatten()[some].sum()
        assert stats[f"w/step_{what}_decile"] == pytest.approx(exact.item(), rel=0.06)


@pytest.mark.parametrize("cols", [1, 7, 1000, 1024, 4096])
def test_the_sample_is_spread_over_rows_and_columns(cols: int) -> None:
    rows = 20 * SAMPLE // cols
    index = _spread(rows * cols, torch.device("cpu"))
    assert len(index.unique()) == SAMPLE
    assert int(index.min()) >= 0 and int(index.max()) < rows * cols
    for parts in ((index % cols).bincount(minlength=cols), (index * 10 // (rows * cols)).bincount(minlength=10)):
        even = SAMPLE / len(parts)
        assert (parts - even).abs().max() <= max(3.0, 0.02 * even)


def test_a_step_of_a_bfloat16_parameter_is_that_of_its_raw_weights() -> None:
    """The parameter itself does not move at such a rate."""
    _, optimizer = trained(20, 10, dtype=torch.bfloat16, lr=1e-7)
    stats = optimizer.stats()
    assert 1e-7 < stats["w/step_largest_decile"] < 1e-5


def test_the_moved_lr_moves_the_sizes_and_not_the_ratio() -> None:
    _, optimizer = trained(20, 10, lr=1e-4)
    stats = optimizer.stats()
    optimizer.param_groups[0]["lr"] = 0.5e-4
    later = optimizer.stats()
    assert later["w/step_largest_decile"] == pytest.approx(stats["w/step_largest_decile"] / 2, rel=1e-2)
    assert later["w/step_ratio"] == pytest.approx(stats["w/step_ratio"], rel=1e-2)
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-4)
    assert optimizer.stats() == pytest.approx(stats, rel=1e-5)
    optimizer.param_groups[0]["lr"] = 0.0
    assert optimizer.stats()["w/step_largest_decile"] == 0.0
    assert "w/step_ratio" not in optimizer.stats()


def test_a_zero_eps_does_not_spoil_the_step_of_frozen_scales() -> None:
    _, optimizer = trained(20, 10, eps=0.0, scale_lr={"e": 1.0})
    assert optimizer.stats()["w/step_largest_decile"] > 0


# ------------------------------------------------------------------------------------------------------ what is left out


def test_before_the_first_step_there_is_no_step() -> None:
    _, optimizer = trained(4, 3, steps=0)
    stats = optimizer.stats()
    assert stats["w/scale_e_mean"] == stats["w/scale_m_max"] == 1.0
    assert not [key for key in stats if "step_" in key]
    assert "w/scale_n_mean" not in stats


def test_what_cannot_be_measured_is_left_out_and_nan_means_weights_that_are_not_finite() -> None:
    zero, positive = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.full((2, 2), 0.1))
    empty, frozen = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(2, 2) * 0.1, requires_grad=False)
    named = [
        ("zero", zero),
        ("positive", positive),
        ("empty", empty),
        ("frozen", frozen),
        ("bias", nn.Parameter(torch.ones(2))),
    ]
    optimizer = SELAdam(named)
    stats = optimizer.stats()
    assert {key.split("/")[0] for key in stats} == {"zero", "positive"}
    assert not any(math.isnan(value) for value in stats.values())
    for gone in ("slope_negative", "slope_positive", "tail_kurtosis", "tail_max_over_initial_rms"):
        assert f"zero/{gone}" not in stats
    assert "positive/slope_positive" in stats and "positive/slope_negative" not in stats
    with torch.no_grad():
        positive[0, 0] = math.nan
    stats = optimizer.stats()
    assert math.isnan(stats["positive/size_beta_rms"]) and math.isnan(stats["positive/tail_kurtosis"])
    assert not math.isnan(stats["zero/size_beta_rms"])


def test_the_initial_rms_survives_saving_and_an_older_state_does_without() -> None:
    p, optimizer = trained(6, 5, steps=30, lr=1e-2)
    stats, saved = optimizer.stats(), optimizer.state_dict()
    assert saved["state"][0]["initial_rms"] == pytest.approx(mixed(6, 5, size=0.05).square().mean().sqrt().item())
    again = SELAdam([("w", nn.Parameter(p.detach().clone()))])
    again.load_state_dict(saved)
    assert again.stats() == stats
    saved = copy.deepcopy(saved)
    del saved["state"][0]["initial_rms"]
    older = SELAdam([("w", nn.Parameter(p.detach().clone()))])
    older.load_state_dict(saved)
    del stats["w/tail_max_over_initial_rms"]
    assert older.stats() == stats


def test_an_edit_before_the_first_step_is_the_new_start() -> None:
    p, optimizer = trained(6, 5, steps=0)
    optimizer.stats()
    with torch.no_grad():
        p.mul_(2)
    optimizer.resync()
    assert optimizer.state[p]["initial_rms"] == pytest.approx(2 * mixed(6, 5, size=0.05).square().mean().sqrt().item())


# ---------------------------------------------------------------------------------------------------------- it only looks


def test_it_changes_nothing() -> None:
    p, optimizer = trained(6, 5, residual_rank=2, weight_decay=0.1, decoupled_weight_decay=True)
    saved, weight, version = copy.deepcopy(optimizer.state_dict()), p.detach().clone(), p._version
    generator = torch.get_rng_state()
    optimizer.stats()
    assert torch.equal(p, weight) and p._version == version
    assert torch.equal(torch.get_rng_state(), generator)
    for key, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(saved["state"][0][key])), key


class _Reads(TorchDispatchMode):
    """Counts where the host waits for a number, other than for the count of steps, which stays on the host."""

    def __init__(self, optimizer: SELAdam) -> None:
        super().__init__()
        self.steps = {id(state["step"]) for state in optimizer.state.values()}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        self.count += reads and id(args[0]) not in self.steps
        return func(*args, **(kwargs or {}))


def test_one_read_of_the_device_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("mlp")
    optimizer = SELAdam(model.named_parameters(), lr=torch.tensor(1e-2), residual_rank=1)
    next(losses(model)).backward()
    optimizer.step()
    fetched: list[int] = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: fetched.append(1) or tolist(self))
    with _Reads(optimizer) as reads:
        optimizer.stats()
    assert len(fetched) == 1
    assert reads.count == 0
    with _Reads(optimizer) as reads:
        bool(model.layers[0].weight.any())  # type: ignore[index]
    assert reads.count == 1


def test_a_copied_optimizer_can_be_asked_before_its_first_step() -> None:
    _, optimizer = trained(6, 5)
    clone = copy.deepcopy(optimizer)
    assert clone.describe() == optimizer.describe()
    assert clone.stats() == optimizer.stats()
