"""The native kernel: held to _rule on random states, exact where it must be, built once, and refused with words."""

from __future__ import annotations

import copy
import logging
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from seloptim import SELAdam, _execute, kernels
from seloptim.__main__ import main
from seloptim._execute import native_is_ready
from seloptim.kernels import cpu
from tests.cases import STRUCTURES, mixed

EAGER: dict[str, Any] = {"foreach": False, "fused": False}
LEARN_ALL = {"e": 2.0, "l": 1.5, "m": 0.5, "n": 1.0}
# Rows of less than a vector, of several with a rest, of whole ones; enough elements for two threads; long rows, with and without a rest.
SHAPES = [(3, 5), (7, 83), (4, 64), (1, 70), (70, 1), (2, 3, 4, 5), (290, 300), (5, 707), (5, 1117)]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def scattered(
    shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any], seed: int = 0, zeros: bool = True
) -> SELAdam:
    """An optimizer with one parameter whose whole state is random, as if it had trained; it is at its fifth step."""
    start = mixed(*shape, seed=seed, size=0.05)
    p = nn.Parameter((start if zeros else torch.where(start == 0, 0.01, start)).to(dtype))
    optimizer = SELAdam([p], curved="all", lr=1e-2, **options)
    optimizer.raw(p)
    state = optimizer.state[p]
    for k, (key, value) in enumerate(state.items()):
        if not isinstance(value, Tensor) or key in ("raw", "step"):
            continue
        noise = mixed(*value.shape, seed=seed + 100 + k)
        if "exp_avg_sq" in key:
            value.copy_((0.1 * noise).square() + 1e-4)
        elif "exp_avg" in key:
            value.copy_(0.1 * noise)
        else:
            value.add_(0.1 * noise if options.get("scale_lr") == LEARN_ALL else 0.1 * noise * (value != 0))
    state["step"].fill_(4.0)
    with torch.no_grad():
        optimizer._restore(optimizer.param_groups[0], p)
    p.grad = mixed(*shape, seed=seed + 50, size=0.1).to(dtype)
    return optimizer


def twin(optimizer: SELAdam, options: dict[str, Any], dtype: torch.dtype | None = None, device: str = "cpu") -> SELAdam:
    """The same values under other options; `dtype` casts them exactly."""
    (p,) = optimizer.param_groups[0]["params"]
    q = nn.Parameter(p.detach().to(device, dtype or p.dtype, copy=True))
    q.grad = None if p.grad is None else p.grad.to(device, q.dtype)
    other = SELAdam([q], curved="all", lr=optimizer.param_groups[0]["lr"], **options)
    other.raw(q)
    for key, value in optimizer.state[p].items():
        if isinstance(value, Tensor) and key != "step":
            other.state[q][key] = value.to(device, other.state[q]["raw"].dtype, copy=True)
        elif isinstance(value, Tensor):
            other.state[q][key] = value.to(other.state[q][key].device, copy=True)
        else:
            other.state[q][key] = copy.deepcopy(value)
    other._remember(q, other.param_groups[0], bool(optimizer._any_n(optimizer.state[p])))
    return other


def values(optimizer: SELAdam) -> dict[str, Tensor]:
    (p,) = optimizer.param_groups[0]["params"]
    found = {key: value for key, value in optimizer.state[p].items() if isinstance(value, Tensor)}
    return {"weight": p.detach(), **found}


def step(optimizer: SELAdam, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of which the kernel must have done everything."""
    ran: list[int] = []
    run_native = _execute._run_native
    with monkeypatch.context() as patch:
        patch.setattr(_execute, "_run_native", lambda items, *args: (ran.append(len(items)), run_native(items, *args)))
        patch.setattr(_execute, "_run_single", lambda items, *_: ran.extend([-1] * len(items)))
        optimizer.step()
    assert ran and min(ran) > 0


OPTIONS: dict[str, dict[str, Any]] = {
    **{f"structure_{s}": {"structure": s} for s in STRUCTURES},
    "amsgrad": {"amsgrad": True},
    "coupled": {"weight_decay": 0.3, "maximize": True},
    "decoupled": {"weight_decay": 0.3, "decoupled_weight_decay": True, "lr_space": "weight"},
    "all_kinds": {"scale_lr": LEARN_ALL},
    "two_kinds": {"scale_lr": {"e": 1.0, "n": 1.0}, "scale_init": {"n": 0.3}},
    "frozen_with_n": {"scale_lr": {}, "scale_init": {"n": 0.3}},
    "negative_m": {"scale_init": {"e": -0.5, "m": -0.7}, "combine": "congruent"},
    "small_betas": {"betas": (0.1, 0.2)},
}


@pytest.mark.parametrize("combine", ["mismatched", "congruent"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_step_from_a_random_state_is_the_rule(
    shape: tuple[int, ...], name: str, combine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor of the state, and the weight; float64, where a wrong term cannot hide behind rounding."""
    options = {"combine": combine, **OPTIONS[name]}
    eager = scattered(shape, torch.float64, {**options, **EAGER})
    native = twin(eager, {**options, "fused": True})
    before = values(eager)["raw"].clone()
    for _ in range(2):
        eager.step()
        step(native, monkeypatch)
    ours, theirs = values(native), values(eager)
    assert ours.keys() == theirs.keys()
    assert not torch.equal(before, theirs["raw"])
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-11, atol=1e-13 * float(value.abs().max()), msg=key)


@pytest.mark.parametrize("combine", ["mismatched", "congruent"])
@pytest.mark.parametrize("columns", [40, 1117])
def test_factors_of_a_row_that_nothing_can_be_divided_by(
    columns: int, combine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes a row's factor out of a sum: not where that is 0, nor where the sum is gone with it."""
    rows = [
        {},
        {"e": 0.0},
        {"l": 0.0},
        {"m": 0.0},
        {"e": 1e-300},
        {"l": 1e-300},
        {"m": 1e-300},
        {"e": 1e9},
        {"l": 1e9},
        {},
    ]
    eager = scattered((len(rows), columns), torch.float64, {"combine": combine, **EAGER}, zeros=False)
    (p,) = eager.param_groups[0]["params"]
    for i, factors in enumerate(rows):
        for kind, value in factors.items():
            eager.state[p]["scale_row"][i, "elmn".index(kind)] = value
    eager._restore(eager.param_groups[0], p)
    native = twin(eager, {"combine": combine, "fused": True})
    for _ in range(2):
        eager.step()
        step(native, monkeypatch)
    ours = values(native)
    for key, value in values(eager).items():
        scale = value.abs().max() if key.startswith("scale_col") else value.abs()
        assert ((ours[key] - value).abs() <= 1e-11 * scale + 1e-300).all(), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("combine", ["mismatched", "congruent"])
@pytest.mark.parametrize("name", ["structure_row_col", "structure_none", "all_kinds", "coupled"])
@pytest.mark.parametrize(("shape", "zeros"), [((290, 300), True), ((290, 300), False), ((80, 1104), False)])
def test_rounds_no_worse_than_the_eager_path(
    shape: tuple[int, int], zeros: bool, name: str, combine: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest error of each tensor against the same step in float64 is at most the eager path's, and 8 eps of the largest."""
    options = {"combine": combine, **OPTIONS[name]}
    eager = scattered(shape, dtype, {**options, **EAGER}, zeros=zeros)
    native = twin(eager, {**options, "fused": True})
    truth = twin(eager, {**options, **EAGER}, torch.float64)
    for optimizer in (eager, truth):
        optimizer.step()
    step(native, monkeypatch)
    for key, true in values(truth).items():
        unit = torch.finfo(dtype if key == "weight" else torch.float32).eps
        error, allowed = ((values(other)[key].double() - true.double()).abs().max().item() for other in (native, eager))
        assert error <= allowed + 8 * unit * true.abs().max().item(), key


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_the_exponential_is_accurate_from_zero_on(
    dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """weight = expm1(raw) here, held to float64 (mpmath's own, by a wider type, for float64) from 1e-30 to 10."""
    p = nn.Parameter(torch.zeros(1, 4000, dtype=dtype))
    options: dict[str, Any] = {"beta": 1.0, "scale_init": {"l": 0.0}, "scale_lr": {}, "combine": "congruent"}
    optimizer = SELAdam([p], lr=1e-38, fused=True, **options)
    raw = optimizer.raw(p)
    size = torch.logspace(-30, 1, 2000, dtype=torch.float64).to(dtype)
    raw.copy_(torch.cat([size, -size]))
    p.data.copy_(torch.expm1(raw.abs()).copysign(raw))
    p.grad = torch.zeros_like(p)
    step(optimizer, monkeypatch)
    import mpmath

    with mpmath.workdps(40):
        true = [mpmath.expm1(abs(float(r))) for r in raw.flatten()]
        errors = [abs(abs(mpmath.mpf(float(w))) / t - 1) for w, t in zip(p.detach().flatten(), true, strict=True)]
    assert max(errors) <= bound


def test_what_is_too_large_becomes_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    p = nn.Parameter(torch.zeros(1, 64))
    options: dict[str, Any] = {"beta": 1.0, "combine": "congruent", "structure": "none"}
    optimizer = SELAdam([p], lr=0.5, fused=True, **options)
    raw = optimizer.raw(p)
    raw.copy_(torch.linspace(87.5, 88.6, 64))
    p.data.copy_(torch.expm1(raw) + raw)
    p.grad = torch.full_like(p, -1e-30)
    step(optimizer, monkeypatch)
    assert 0 < int(p.isinf().sum()) < 64
    assert torch.equal(p.isinf(), raw > 88.7228) and bool((p > 0).all())


@pytest.mark.parametrize("number", [1, 2])
def test_runs_repeat_bit_for_bit(number: int, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    threads(number)
    first = scattered((400, 333), torch.float32, {"fused": True})
    again = twin(first, {"fused": True})
    for _ in range(5):
        step(first, monkeypatch)
        step(again, monkeypatch)
    for key, value in values(first).items():
        assert torch.equal(values(again)[key], value), key


def test_the_number_of_threads_changes_only_rounding(
    threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = scattered((400, 333), torch.float64, {"fused": True})
    three = twin(one, {"fused": True})
    threads(1)
    step(one, monkeypatch)
    threads(3)
    step(three, monkeypatch)
    for key, value in values(one).items():
        torch.testing.assert_close(values(three)[key], value, rtol=1e-11, atol=1e-13 * float(value.abs().max()))


@pytest.mark.parametrize("structure", ["row_col", "scalar", "none"])
@pytest.mark.parametrize("number", [2, 3, 5])
def test_matrices_that_threads_cut(
    number: int, structure: str, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cuts between threads fall within matrices (one has four of them), beside their ends, and into what is never cut."""
    shapes = [(30, 40), (700, 300), (1, 70000), (70000, 1), (50, 60), (3, 260, 300), (9, 9)]

    def stepped() -> list[dict[str, Tensor]]:
        params = [nn.Parameter(mixed(*shape, seed=k, size=0.1)) for k, shape in enumerate(shapes)]
        groups = [{"params": [p], "batch_dims": int(p.dim() == 3)} for p in params]
        optimizer = SELAdam(groups, curved="all", structure=structure, fused=True, lr=1e-2)
        optimizer.param_groups[:] = [  # one call for all that agree
            {**group, "params": [p for p in params if (p.dim() == 3) == bool(group["batch_dims"])]}
            for group in (optimizer.param_groups[0], optimizer.param_groups[5])
        ]
        for k, p in enumerate(params):
            p.grad = mixed(*p.shape, seed=100 + k)
        step(optimizer, monkeypatch)
        step(optimizer, monkeypatch)
        tensors = [{k: v for k, v in optimizer.state[p].items() if isinstance(v, Tensor)} for p in params]
        return [{"weight": p.detach(), **state} for p, state in zip(params, tensors, strict=True)]

    threads(1)
    alone = stepped()
    threads(number)
    cut, again = stepped(), stepped()
    for one, several, repeated in zip(alone, cut, again, strict=True):
        for key, value in one.items():
            assert torch.equal(several[key], repeated[key]), key
            bound = 1e-13 * float(value.abs().max())
            torch.testing.assert_close(several[key], value, rtol=1e-11, atol=bound, msg=key)


@pytest.mark.parametrize("combine", ["mismatched", "congruent"])
@pytest.mark.parametrize("columns", [128, 1024])
def test_one_number_in_a_pack_that_is_not_ordinary(columns: int, combine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most vectors are taken without a look at their lanes; one zero, or one gradient that is not finite, is looked at."""
    eager = scattered((5, columns), torch.float64, {"combine": combine, **EAGER}, zeros=False)
    (p,) = eager.param_groups[0]["params"]
    eager.state[p]["raw"][1, 40] = eager.state[p]["raw"][4, 127] = 0.0
    with torch.no_grad():
        eager._restore(eager.param_groups[0], p)
    assert p.grad is not None
    p.grad[2, 3], p.grad[2, 90], p.grad[3, 64] = math.nan, math.inf, -math.inf
    native = twin(eager, {"combine": combine, "fused": True})
    eager.step()
    step(native, monkeypatch)
    for key, value in values(eager).items():
        bound = 1e-12 * float(value[value.isfinite()].abs().max())
        torch.testing.assert_close(values(native)[key], value, rtol=1e-12, atol=bound, equal_nan=True, msg=key)


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("combine", ["mismatched", "congruent"])
@pytest.mark.parametrize(("over_beta", "gradient"), [(10.0, 1e38), (1e3, 1e36), (9e5, 1e33)])
def test_a_share_that_only_its_rows_factor_makes_too_large(
    over_beta: float, gradient: float, combine: str, zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finite gradient times l/beta is infinite: that weight alone is lost, as in the eager path, not its row and column."""
    eager = scattered((3, 40), torch.float32, {"combine": combine, **EAGER}, zeros=zeros)
    (p,) = eager.param_groups[0]["params"]
    eager.state[p]["scale_row"][1, 1] = over_beta * float(eager.state[p]["beta"])
    eager._restore(eager.param_groups[0], p)
    assert p.grad is not None
    p.grad[1, 5] = gradient
    native = twin(eager, {"combine": combine, "fused": True})
    eager.step()
    step(native, monkeypatch)
    ours, theirs = values(native), values(eager)
    for key in ("weight", "raw"):
        assert torch.equal(ours[key].isfinite(), theirs[key].isfinite())
        assert int((~ours[key].isfinite()).sum()) == 1
    assert ours["scale_row"].isfinite().all() and ours["scale_col"].isfinite().all()


def test_a_gradient_whose_square_is_too_large_stops_its_weight_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch.optim.Adam: its second moment is infinite from then on, and no NaN comes of that."""
    eager = scattered((8, 40), torch.float32, EAGER, zeros=False)
    native = twin(eager, {"fused": True})
    for t in range(3):
        for optimizer in (eager, native):
            (p,) = optimizer.param_groups[0]["params"]
            p.grad = mixed(8, 40, seed=t, size=0.1).float()
            if t == 0:
                p.grad[3, 5] = 1e21
        eager.step()
        step(native, monkeypatch)
    ours, theirs = values(native), values(eager)
    assert ours["exp_avg_sq"][3, 5] == theirs["exp_avg_sq"][3, 5] == math.inf
    assert all(bool(ours[key].isfinite().all()) for key in ("weight", "raw", "exp_avg"))
    torch.testing.assert_close(ours["raw"], theirs["raw"])


def test_many_parameters_of_all_kinds_in_one_group(
    threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones, which threads share out, large ones, which threads share, empty, 0-d, strided and of other dtypes."""
    threads(2)

    def make() -> list[nn.Parameter]:
        starts = [mixed(*s, seed=k, size=0.1) for k, s in enumerate([(5, 7)] * 9 + [(300, 301), (0, 4), (), (6,)])]
        starts += [starts[0].float(), starts[1].bfloat16(), starts[2].half()]
        image = mixed(4, 3, 2, 5, seed=40, size=0.1).to(memory_format=torch.channels_last)
        starts += [image, mixed(9, 8, seed=41, size=0.1).T]
        return [nn.Parameter(start.clone(memory_format=torch.preserve_format)) for start in starts]

    ours, theirs = make(), make()
    native, eager = SELAdam(ours, curved="all", fused=True), SELAdam(theirs, curved="all", **EAGER)
    for t in range(3):
        for k, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = mixed(*p.shape, seed=1000 * t + k).to(p.dtype)
            q.grad = p.grad.clone()
            kept = p.grad.clone()
        step(native, monkeypatch)
        eager.step()
        assert torch.equal(ours[-1].grad, kept)  # type: ignore[arg-type]
    for p, q in zip(ours, theirs, strict=True):
        assert p.stride() == q.stride()
        size = float(q.detach().abs().max()) if q.numel() else 0.0
        bound = 1e-12 if p.dtype == torch.float64 else 4 * torch.finfo(p.dtype).eps
        torch.testing.assert_close(p, q, rtol=bound, atol=bound * size)


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("structure", ["row_col", "scalar", "none"])
def test_a_step_at_lr_zero_moves_only_moments(lr: Any, structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = scattered((9, 37), torch.float32, {"structure": structure, "weight_decay": 0.1, "fused": True})
    optimizer.param_groups[0]["lr"] = lr
    before = {key: value.clone() for key, value in values(optimizer).items()}
    step(optimizer, monkeypatch)
    for key, value in values(optimizer).items():
        fixed = key in ("weight", "raw", "scale_row", "scale_col")
        moments = "exp_avg" in key and (structure != "none" or not key.startswith("scale"))
        assert not fixed or torch.equal(value, before[key]), key
        assert not moments or not torch.equal(value, before[key]), key


def test_an_edit_is_seen_and_autograd_sees_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    p = nn.Parameter(mixed(4, 40, size=0.1, dtype=torch.float32))
    optimizer = SELAdam([p], fused=True)
    p.grad = torch.ones_like(p)
    version = p._version
    step(optimizer, monkeypatch)
    assert p._version > version
    raw = optimizer.raw(p).clone()
    optimizer.resync()
    assert torch.equal(optimizer.raw(p), raw)


MEMORY = """
    import resource, torch
    from seloptim import SELAdam
    from seloptim import kernels
    torch.set_num_threads(2)
    kernels.load()
    params = [torch.nn.Parameter(torch.randn(2048, 2048) * 0.02) for _ in range(2)]
    for p in params:
        p.grad = torch.randn(2048, 2048)
    optimizer = SELAdam(params, fused=True)
    optimizer.step()
    def status(key):
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    optimizer.step()
    print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's peak of resident memory")
def test_a_step_needs_no_memory_of_the_parameters_size() -> None:
    kernels.build()
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(MEMORY)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2048  # KiB; one parameter has 16384, threads * cols * 16 numbers are 256


# ------------------------------------------------------------------------------------------------------------- GradScaler


@pytest.mark.parametrize("fused", [True, False])
def test_an_overflow_step_changes_nothing(fused: bool) -> None:
    curved = nn.Parameter(mixed(4, 20, size=0.1, dtype=torch.float32))
    plain = nn.Parameter(mixed(4, seed=1, dtype=torch.float32))
    optimizer = SELAdam([curved, plain], fused=fused, foreach=None if fused else False)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # pyright: ignore[reportPrivateImportUsage]
    for bad in (True, False, True):
        before = copy.deepcopy((optimizer.state_dict()["state"] if optimizer.state else {}, curved, plain))
        optimizer.zero_grad()
        loss = (curved.square().sum() + plain.sum()) * (torch.inf if bad else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = not torch.equal(curved, before[1])
        assert moved == (not bad) and moved == (not torch.equal(plain, before[2]))
        if bad:
            after = optimizer.state_dict()["state"] if optimizer.state else {}
            assert after.keys() == before[0].keys()
            for k, state in after.items():
                for key, value in state.items():
                    assert torch.equal(torch.as_tensor(value), torch.as_tensor(before[0][k][key])), key


def test_scaled_gradients_are_unscaled_in_the_kernel() -> None:
    start = mixed(4, 20, size=0.1, dtype=torch.float32)
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours, theirs = SELAdam([p], fused=True), SELAdam([q], fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)  # pyright: ignore[reportPrivateImportUsage]
    for _ in range(3):
        for optimizer, w, scale in ((ours, p, scaler.scale), (theirs, q, lambda loss: loss)):
            optimizer.zero_grad()
            scale(w.square().sum()).backward()
        scaler.step(ours)
        scaler.update()
        theirs.step()
    assert torch.equal(p, q)
    assert p.grad is not None and q.grad is not None and torch.equal(p.grad, 8 * q.grad)


# ------------------------------------------------------------------------------------------------- finding and building it


def test_used_by_itself_only_where_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_execute, "native_is_ready", native_is_ready)
    kernels.load()
    ran: list[str] = []
    for name in ("_run_native", "_run_single"):
        monkeypatch.setattr(_execute, name, lambda items, *args, name=name: ran.extend([name] * len(items)))

    def take_a_step(**options: Any) -> str:
        p = nn.Parameter(torch.full((2, 2), 0.1))
        p.grad = torch.ones(2, 2)
        ran.clear()
        SELAdam([p], **options).step()
        return " ".join(ran)

    assert take_a_step() == take_a_step(fused=True) == "_run_native"
    assert take_a_step(fused=False) == take_a_step(foreach=False) == "_run_single"
    assert take_a_step(residual_rank=1) == "_run_single"
    monkeypatch.setenv("SELOPTIM_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu, "_loaded", False)
    _execute._say_once.cache_clear()
    with caplog.at_level(logging.INFO, "seloptim"):
        assert take_a_step() == take_a_step() == "_run_single"
    assert [r.getMessage().count("python -m seloptim build") for r in caplog.records] == [1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("compiler", "says"),
    [
        ("no-such-compiler", "'no-such-compiler', was not found; .*apt install g"),
        ("false", "the kernel did not compile"),
    ],
)
def test_says_what_to_install(compiler: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELOPTIM_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(cpu, "_loaded", False)
    with pytest.raises(RuntimeError, match=says):
        SELAdam([nn.Parameter(torch.zeros(2, 2))], fused=True)
    assert not list(tmp_path.glob("*.so"))


@pytest.mark.parametrize("arrival", ["added group", "load", "changed group"])
def test_a_kernel_that_cannot_be_built_is_said_where_it_is_asked_for(
    arrival: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything changes, and not behind groups that have moved. Guard: Shadow._refuse in each of the three."""
    params = [nn.Parameter(torch.full((2, 2), 0.1)) for _ in range(2)]
    optimizer = SELAdam([{"params": [p]} for p in params])
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    saved["param_groups"][1]["fused"] = True
    monkeypatch.setenv("SELOPTIM_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(cpu, "_loaded", False)
    with pytest.raises(RuntimeError, match=r"'no-such-compiler', was not found; .*or use fused=None"):
        if arrival == "added group":
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))], "fused": True})
        elif arrival == "load":
            optimizer.load_state_dict(saved)
        else:
            optimizer.param_groups[1]["fused"] = True
            optimizer.step()
    optimizer.param_groups[-1]["fused"] = None
    assert str(optimizer.state_dict()) == str(before)
    optimizer.step()


def test_a_load_builds_the_kernel_that_its_groups_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step then does not wait for a compiler. Guard: SELOptimizer._check_incoming."""
    p = nn.Parameter(torch.full((2, 2), 0.1))
    optimizer = SELAdam([p])
    saved = optimizer.state_dict()
    saved["param_groups"][0]["fused"] = True
    asked: list[bool] = []
    monkeypatch.setattr(_execute, "native_is_ready", lambda device, *, compile: asked.append(compile))
    optimizer.load_state_dict(saved)
    assert asked == [True]


def test_several_processes_build_once(tmp_path: Path) -> None:
    """A stand-in for the compiler counts its calls; one that was killed leaves no lock behind."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        'echo "$@" | grep -q version && exit 0\n'
        f'echo "$@" >> {tmp_path}/calls\n'
        "sleep 0.3\n"
        'while [ "$1" != -o ]; do shift; done\n'
        'touch "$2"\n'
    )
    compiler.chmod(0o755)
    (tmp_path / "cache").mkdir()
    environment = {**os.environ, "CXX": str(compiler), "SELOPTIM_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", "from seloptim import kernels; print(kernels.build())"]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = {process.communicate()[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(found) == 1 and Path(found.pop().strip()).exists()
    assert len((tmp_path / "calls").read_text().splitlines()) == 2  # one to compile, one to link


def test_the_file_name_has_all_that_the_library_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    here = cpu.library()
    for target, name, value in (
        (torch, "__version__", "0.0"),
        (cpu, "_processor", lambda: "another"),
        (cpu, "FLAGS", ("-O0",)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            cpu._key.cache_clear()
            assert cpu.library() != here
    cpu._key.cache_clear()
    assert cpu.library() == here


def test_the_command_line_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build"]) == 0
    assert capsys.readouterr().out == f"wrote {cpu.library()}\n"
    monkeypatch.setenv("SELOPTIM_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["build"]) == 2
    assert "was not found" in capsys.readouterr().err


@pytest.mark.parametrize("lr", [1e-3, torch.tensor(1e-3)], ids=["number", "tensor"])
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": False}], ids=["native", "eager"])
def test_a_compiled_step_is_the_step_and_does_not_recompile(options: dict[str, Any], lr: Any) -> None:
    frames: list[int] = []

    def steps(compiled: bool) -> list[Tensor]:
        params = [nn.Parameter(mixed(8, 40, seed=k, size=0.05)) for k in range(3)]
        optimizer = SELAdam(params, lr=copy.deepcopy(lr), **options)
        count = CompileCounter()
        torch._dynamo.reset()
        step = torch.compile(optimizer.step, backend=count) if compiled else optimizer.step
        for t in range(7):
            for k, p in enumerate(params):
                p.grad = mixed(8, 40, seed=100 * t + k)
            rate = optimizer.param_groups[0]["lr"]
            if isinstance(rate, Tensor):
                rate.fill_(1e-3 * (t + 1))
            else:
                optimizer.param_groups[0]["lr"] = 1e-3 * (t + 1)
            step()
            frames.append(count.frame_count)
        return [p.detach() for p in params]

    for a, b in zip(steps(True), steps(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert frames[3] == frames[6]


@pytest.mark.parametrize("kind", ["number", "tensor"])
@pytest.mark.parametrize("order", ["scheduler first", "compiled first"])
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": False}], ids=["native", "eager"])
def test_schedulers_before_and_after_compiling(options: dict[str, Any], order: str, kind: str) -> None:
    """A scheduler patches step and counts its calls; a tensor lr stays the user's own. Guard: _not_traced around step."""

    def run(compiled: bool) -> tuple[list[float], Tensor, int]:
        p = nn.Parameter(mixed(8, 40, size=0.05))
        lr: Any = torch.tensor(1e-3, dtype=torch.float64) if kind == "tensor" else 1e-3
        optimizer = SELAdam([p], lr=lr, **options)
        count = CompileCounter()
        torch._dynamo.reset()
        step: Callable[[], Any] = lambda: optimizer.step()  # noqa: E731
        if order == "scheduler first":
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
            step = torch.compile(step, backend=count) if compiled else step
        else:
            step = torch.compile(step, backend=count) if compiled else step
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        rates, frames = [], []
        for t in range(6):
            p.grad = mixed(8, 40, seed=t)
            step()
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
            frames.append(count.frame_count)
        assert kind == "number" or optimizer.param_groups[0]["lr"] is lr
        return rates, p.detach(), frames[-1] - frames[1]

    (rates, weight, again), (same, expected, _) = run(True), run(False)
    assert rates == same and rates[-1] == pytest.approx(1e-3 * 0.7**6)
    assert torch.equal(weight, expected) and again == 0


def test_fused_refuses_what_it_has_no_kernel_for() -> None:
    p = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"no kernel for parameter w: it has a residual .*; leave fused=None"):
        SELAdam([("w", p)], fused=True, residual_rank=1)
    meta = nn.Parameter(torch.zeros(2, 2, device="meta"))
    SELAdam([meta], fused=True)
