"""The Triton kernels: held to _rule and to the oracle, their launches counted, captured, and refused with words.

Without a GPU Triton's interpreter runs them, on CPU tensors: that is what the label "interpreted" in the names of these tests means. On a
machine with one they are compiled and run on it, under its name, and the tests at the end are no longer skipped.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from seloptim import SELAdam, _execute, _rule, kernels
from seloptim._execute import native_is_ready
from tests.cases import CASES, Case, losses, make_model, mixed
from tests.oracle import Oracle
from tests.test_kernels import EAGER, LEARN_ALL, OPTIONS, scattered, twin, values
from tests.test_oracle import close, compare_state, rate

pytest.importorskip("triton", reason="triton, of the extra `test`, is for Linux")
from seloptim.kernels import triton

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LABEL = torch.cuda.get_device_name() if GPU else "interpreted"
ON_A_GPU = pytest.mark.skipif(not GPU, reason="no CUDA device: nothing in this module has run on a GPU here")
FUSED: dict[str, Any] = {"fused": True}
KERNELS = ("_pull_and_update", "_update_factors", "_push")


class Ran:
    """Counts launches; a parameter that took the eager path fails the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[str] = []
        self.record: Callable[[Callable[[], None]], None] = lambda launch: launch()
        for name in KERNELS:
            monkeypatch.setattr(triton, name, _Spied(self, name, getattr(triton, name)))

    def check(self) -> None:
        assert self.launches.count("_pull_and_update")


class _Spied:
    def __init__(self, ran: Ran, name: str, kernel: Any) -> None:
        self.ran, self.name, self.kernel = ran, name, kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.ran.launches.append(self.name)
            self.ran.record(lambda: self.kernel[grid](*args, **options))

        return launch


@pytest.fixture(autouse=True, params=[LABEL])
def ran(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ran]:
    """Everything in this module goes by the Triton kernels, on the CPU where there is no GPU."""
    if not GPU:
        from triton.runtime.interpreter import InterpretedFunction

        monkeypatch.setitem(_execute.NATIVE, "cpu", "triton")
        # The language is patched for our functions by then; doing it again at each call inside a kernel is a third of the time.
        call = InterpretedFunction.__call__

        def call_inside(self: Any, *args: Any, **options: Any) -> Any:
            ours = self.fn.__module__ == triton.__name__
            return self.rewrite()(*args, **options) if ours else call(self, *args, **options)

        monkeypatch.setattr(InterpretedFunction, "__call__", call_inside)
    spy = Ran(monkeypatch)
    with np.errstate(all="ignore"):  # the interpreter computes with numpy
        yield spy


@pytest.fixture
def no_eager(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    def fail(items: Any, *args: Any) -> None:
        assert not items

    monkeypatch.setattr(_execute, "_run_single", fail)
    monkeypatch.setattr(_execute, "_run_batched", fail)
    return monkeypatch


def step(optimizer: SELAdam, ran: Ran) -> None:
    """A step of which the kernels must have done everything."""
    before = len(ran.launches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_execute, "_run_single", lambda items, *_: pytest.fail("eager") if items else None)
        optimizer.step()
    assert len(ran.launches) > before


# A tile is 32 x 128, or 256 x 16 for short rows: less than one, several with a rest, vectors, stacks.
SHAPES = [(3, 5), (40, 140), (70, 1), (2, 3, 4, 5), (300, 7)]


@pytest.mark.parametrize("combine", ["mismatched", "congruent"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_step_from_a_random_state_is_the_rule(shape: tuple[int, ...], name: str, combine: str, ran: Ran) -> None:
    """Every tensor of the state, and the weight; float64, where a wrong term cannot hide behind rounding."""
    options = {"combine": combine, **OPTIONS[name]}
    eager = scattered(shape, torch.float64, {**options, **EAGER})
    native = twin(eager, {**options, **FUSED}, device=DEVICE)
    before = values(eager)["raw"].clone()
    for _ in range(2):
        eager.step()
        step(native, ran)
    ours, theirs = values(native), values(eager)
    assert ours.keys() == theirs.keys()
    assert not torch.equal(before, theirs["raw"])
    for key, value in theirs.items():
        bound = 1e-13 * float(value.abs().max())
        torch.testing.assert_close(ours[key].cpu(), value, rtol=1e-11, atol=bound, msg=key)


@pytest.mark.parametrize("structure", ["row_col", "row", "col", "scalar"])
@pytest.mark.parametrize("shape", [(3, 40, 5), (3, 5, 1)], ids=str)
def test_stacks_have_factors_of_their_own(shape: tuple[int, ...], structure: str, ran: Ran) -> None:
    options = {"batch_dims": 1, "structure": structure, "scale_lr": LEARN_ALL}
    eager = scattered(shape, torch.float64, {**options, **EAGER})
    native = twin(eager, {**options, **FUSED}, device=DEVICE)
    eager.step()
    step(native, ran)
    for key, value in values(eager).items():
        bound = 1e-13 * float(value.abs().max())
        torch.testing.assert_close(values(native)[key].cpu(), value, rtol=1e-11, atol=bound, msg=key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("combine", ["mismatched", "congruent"])
@pytest.mark.parametrize("name", ["structure_row_col", "structure_none", "all_kinds", "coupled"])
def test_rounds_no_worse_than_the_eager_path(name: str, combine: str, dtype: torch.dtype, ran: Ran) -> None:
    """The largest error of each tensor against the same step in float64 is at most the eager path's, and 8 eps of the largest."""
    options = {"combine": combine, **OPTIONS[name]}
    eager = scattered((40, 144), dtype, {**options, **EAGER})
    native = twin(eager, {**options, **FUSED}, device=DEVICE)
    truth = twin(eager, {**options, **EAGER}, torch.float64)
    for optimizer in (eager, truth):
        optimizer.step()
    step(native, ran)
    for key, true in values(truth).items():
        unit = torch.finfo(dtype if key == "weight" else torch.float32).eps
        error, allowed = (
            (values(other)[key].cpu().double() - true.double()).abs().max().item() for other in (native, eager)
        )
        assert error <= allowed + 8 * unit * true.abs().max().item(), key


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_the_exponential_is_accurate_from_zero_on(dtype: torch.dtype, bound: float, ran: Ran) -> None:
    """weight = expm1(raw) here, held to mpmath's from 1e-30 to 10."""
    p = nn.Parameter(torch.zeros(1, 4000, dtype=dtype, device=DEVICE))
    options: dict[str, Any] = {"beta": 1.0, "scale_init": {"l": 0.0}, "scale_lr": {}, "combine": "congruent"}
    optimizer = SELAdam([p], lr=1e-38, fused=True, **options)
    raw = optimizer.raw(p)
    size = torch.logspace(-30, 1, 2000, dtype=torch.float64).to(dtype)
    raw.copy_(torch.cat([size, -size]))
    p.data.copy_(torch.expm1(raw.abs()).copysign(raw))
    p.grad = torch.zeros_like(p)
    step(optimizer, ran)
    import mpmath

    with mpmath.workdps(40):
        true = [mpmath.expm1(abs(float(r))) for r in raw.flatten()]
        errors = [abs(abs(mpmath.mpf(float(w))) / t - 1) for w, t in zip(p.detach().flatten(), true, strict=True)]
    assert max(errors) <= bound


def test_what_is_too_large_becomes_infinite(ran: Ran) -> None:
    p = nn.Parameter(torch.zeros(1, 64, device=DEVICE))
    optimizer = SELAdam([p], lr=0.5, fused=True, beta=1.0, combine="congruent", structure="none")
    raw = optimizer.raw(p)
    raw.copy_(torch.linspace(87.5, 88.6, 64))
    p.data.copy_(torch.expm1(raw) + raw)
    p.grad = torch.full_like(p, -1e-30)
    step(optimizer, ran)
    assert 0 < int(p.isinf().sum()) < 64
    assert torch.equal(p.isinf(), raw > 88.7228) and bool((p > 0).all())


def test_runs_repeat_bit_for_bit(ran: Ran) -> None:
    first = scattered((70, 140), torch.float32, EAGER)
    runs = [twin(first, FUSED, device=DEVICE) for _ in range(2)]
    for _ in range(3):
        for optimizer in runs:
            step(optimizer, ran)
    for key, value in values(runs[0]).items():
        assert torch.equal(values(runs[1])[key], value), key


def test_many_parameters_of_all_kinds_in_one_group(ran: Ran) -> None:
    """Empty, 0-d, strided and of other dtypes."""

    def make(device: str) -> list[nn.Parameter]:
        starts = [mixed(*s, seed=k, size=0.1) for k, s in enumerate([(5, 7)] * 3 + [(33, 16), (0, 4), (), (6,)])]
        starts += [starts[0].float(), starts[1].bfloat16(), starts[2].half()]
        image = mixed(4, 3, 2, 5, seed=40, size=0.1).to(memory_format=torch.channels_last)
        starts += [image, mixed(9, 8, seed=41, size=0.1).T]
        return [nn.Parameter(start.to(device, copy=True, memory_format=torch.preserve_format)) for start in starts]

    ours, theirs = make(DEVICE), make("cpu")
    native, eager = SELAdam(ours, curved="all", fused=True), SELAdam(theirs, curved="all", **EAGER)
    for t in range(3):
        for k, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            q.grad = mixed(*p.shape, seed=1000 * t + k).to(p.dtype)
            p.grad = q.grad.to(DEVICE, copy=True)
        step(native, ran)
        eager.step()
        for p, q in zip(ours, theirs, strict=True):
            assert p.grad is not None and q.grad is not None and torch.equal(p.grad.cpu(), q.grad)
    for p, q in zip(ours, theirs, strict=True):
        assert p.stride() == q.stride()
        size = float(q.detach().abs().max()) if q.numel() else 0.0
        bound = 1e-12 if p.dtype == torch.float64 else 4 * torch.finfo(p.dtype).eps
        torch.testing.assert_close(p.cpu(), q, rtol=bound, atol=bound * size)


def test_parameters_of_one_structure_share_three_launches(ran: Ran) -> None:
    """Whatever their number, shapes and counts of steps; and one where no scale trains."""
    params = [nn.Parameter(mixed(3 + k, 20 + k, seed=k, size=0.1, dtype=torch.float32).to(DEVICE)) for k in range(9)]
    both: list[tuple[dict[str, Any], list[str]]] = [({}, list(KERNELS)), ({"structure": "none"}, ["_pull_and_update"])]
    for options, expected in both:
        optimizer = SELAdam(params, fused=True, **options)
        for t in range(3):
            for k, p in enumerate(params):
                p.grad = torch.ones_like(p) if (t + k) % 3 else None
            ran.launches.clear()
            step(optimizer, ran)
            aligned = {p.shape[1] % 16 == 0 for p in params if p.grad is not None}
            assert sorted(ran.launches) == sorted(expected * len(aligned))


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0, device=DEVICE)], ids=["number", "tensor"])
@pytest.mark.parametrize("structure", ["row_col", "scalar", "none"])
def test_a_step_at_lr_zero_moves_only_moments(lr: Any, structure: str, ran: Ran) -> None:
    options = {"structure": structure, "weight_decay": 0.1}
    optimizer = twin(scattered((9, 37), torch.float32, {**options, **EAGER}), {**options, **FUSED}, device=DEVICE)
    optimizer.param_groups[0]["lr"] = lr
    before = {key: value.clone() for key, value in values(optimizer).items()}
    step(optimizer, ran)
    for key, value in values(optimizer).items():
        fixed = key in ("weight", "raw", "scale_row", "scale_col")
        moments = "exp_avg" in key and (structure != "none" or not key.startswith("scale"))
        assert not fixed or torch.equal(value, before[key]), key
        assert not moments or not torch.equal(value, before[key]), key


def test_an_edit_is_seen_and_autograd_sees_the_step(ran: Ran) -> None:
    """Guard: increment_version behind the launch."""
    p = nn.Parameter(mixed(4, 40, size=0.1, dtype=torch.float32).to(DEVICE))
    optimizer = SELAdam([p], fused=True)
    p.grad = torch.ones_like(p)
    version = p._version
    step(optimizer, ran)
    assert p._version > version
    raw = optimizer.raw(p).clone()
    optimizer.resync()
    assert torch.equal(optimizer.raw(p), raw)


# ------------------------------------------------------------------------------------------------------------- the oracle

STEPS = 3


@pytest.mark.parametrize("case", [c for c in CASES if not c.options.get("residual_rank")], ids=lambda case: case.name)
def test_trains_as_the_oracle(case: Case, ran: Ran, no_eager: pytest.MonkeyPatch) -> None:
    model, mirror = make_model(case.model).to(DEVICE), make_model(case.model)
    start = [p.detach().clone() for p in mirror.parameters()]
    optimizer = SELAdam(model.parameters(), lr=rate(0), fused=True, **case.options)
    oracle = Oracle(start, lr=rate(0), **case.options)
    start = oracle.weights()
    ours, theirs = losses(model), losses(mirror)
    for t in range(STEPS):
        with torch.no_grad():
            for p, w in zip(mirror.parameters(), oracle.weights(), strict=True):
                p.copy_(w)
        optimizer.zero_grad()
        mirror.zero_grad()
        next(ours).backward()
        next(theirs).backward()
        optimizer.param_groups[0]["lr"] = rate(t)
        optimizer.step()
        oracle.step([p.grad for p in mirror.parameters()], lr=rate(t))
    for p, w, s in zip(model.parameters(), oracle.weights(), start, strict=True):
        close(p.detach().cpu(), w, s)
    if not GPU:
        compare_state(model, optimizer, oracle)
    ran.check()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_gradient_element_reaches_only_its_own_weight(bad: float, ran: Ran) -> None:
    start = [mixed(4, 5, seed=s, size=0.1) for s in range(2)]
    params = [nn.Parameter(w.to(DEVICE, copy=True)) for w in start]
    optimizer, oracle = SELAdam(params, fused=True), Oracle(start)
    for t in range(3):
        grads = [mixed(4, 5, seed=100 + 2 * t + i) for i in range(2)]
        if t == 2:
            grads[0][1, 3] = bad
        for p, g in zip(params, grads, strict=True):
            p.grad = g.to(DEVICE)
        step(optimizer, ran)
        oracle.step(grads)
    spoilt = torch.zeros(4, 5, dtype=torch.bool)
    spoilt[1, 3] = True  # [1, 2] is 0 from the start
    for p, w, s, hit in zip(params, oracle.weights(), start, (spoilt, torch.zeros_like(spoilt)), strict=True):
        weight = p.detach().cpu()
        assert torch.equal(weight.isfinite(), ~hit) and torch.equal(w.isfinite(), ~hit)
        close(weight[~hit], w[~hit], s[~hit])


# ------------------------------------------------------------------------------------------- captured, and scaled gradients


class Tape(TorchDispatchMode):
    """What a CUDA graph does to a step, on any device: every operation is kept with its arguments and run again from there.

    Reading a value on the host fails, as it does during a capture.
    """

    def __init__(self, ran: Ran, host_may_read: bool = False) -> None:
        super().__init__()
        self.replays: list[Callable[[], None]] = []
        self.work: list[str] = []  # what is more than a view
        self.ran, self.host_may_read, self.inside = ran, host_may_read, False

    def __enter__(self) -> Tape:
        self.ran.record = self.launch
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.ran.record = lambda launch: launch()

    def launch(self, kernel: Callable[[], None]) -> None:
        self.replays.append(kernel)
        self.work.append("kernel")
        self.inside = True
        kernel()
        self.inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        assert self.host_may_read or func is not torch.ops.aten._local_scalar_dense.default, "the host reads a value"
        found = func(*args, **kwargs)

        def again() -> None:
            for old, new in zip(tree_iter(found), tree_iter(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.replays.append(again)
        self.work += [] if func.is_view else [str(func)]
        return found

    @torch.no_grad()
    def replay(self) -> None:
        for run in self.replays:
            run()


def on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU plays the device: counts of steps and rates are not to be read."""
    monkeypatch.setattr(SELAdam, "_counts_there", lambda self, group, p: group["capturable"])
    monkeypatch.setattr(SELAdam, "_refuse_step", lambda self, group, p, name: None)
    monkeypatch.setattr(_rule, "on_host", lambda rate: not isinstance(rate, Tensor))


CAPTURED: dict[str, dict[str, Any]] = {
    "usual": {},
    "annealed": {"anneal_steps": 6, "scale_lr": LEARN_ALL | {"m": (0.1, 2.0)}},
    "decoupled": {"weight_decay": 0.3, "decoupled_weight_decay": True, "lr_space": "weight", "amsgrad": True},
    "frozen": {"structure": "none"},
}


@pytest.mark.parametrize("path", ["native", "single", "stacked"])
@pytest.mark.parametrize("name", CAPTURED)
def test_a_replayed_step_is_the_eager_one(name: str, path: str, ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    """lr, the counts of steps and the rates of the scales are device values: nothing of the step that was taped is frozen.

    Guards: Item.step and rates as tensors, lr in _numbers. The taped values stand for a CUDA graph's.
    """
    options: dict[str, Any] = {"native": FUSED, "single": EAGER, "stacked": {"foreach": True, "fused": False}}[path]
    starts = [mixed(4, 20, seed=k, size=0.1) for k in range(3)]
    ours, theirs = ([nn.Parameter(s.to(d, copy=True)) for s in starts] for d in (DEVICE, "cpu"))
    lr = torch.tensor(1e-3, dtype=torch.float64, device=DEVICE)
    captured = SELAdam(ours, lr=lr, capturable=True, **options, **CAPTURED[name])
    eager = SELAdam(theirs, **EAGER, **CAPTURED[name])
    if not GPU:
        on_one_device(monkeypatch)
    tape = Tape(ran, host_may_read=path != "native" and not GPU)  # on a CPU the eager path looks at its sums
    for t in range(7):
        for k, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            q.grad = mixed(4, 20, seed=100 * t + k) if t or k else None  # the first one starts later
            if t < 2:
                p.grad = None if q.grad is None else q.grad.to(DEVICE, copy=True)
            elif p.grad is not None and q.grad is not None:
                p.grad.copy_(q.grad)
        lr.fill_(1e-3 * (t + 1))
        eager.param_groups[0]["lr"] = 1e-3 * (t + 1)
        if t < 2:
            captured.step()
        elif t == 2:
            with tape:
                captured.step()
        else:
            tape.replay()
        eager.step()
    assert bool(ran.launches) == (path == "native")
    for p, q in zip(ours, theirs, strict=True):
        assert float(captured.state[p]["step"]) == float(eager.state[q]["step"])
        for key, value in eager.state[q].items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(captured.state[p][key].cpu(), value, rtol=1e-10, atol=1e-13, msg=key)
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-11, atol=1e-13)


def test_an_overflow_that_only_the_device_knows_of_changes_nothing(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: MOVES and WRITES in the kernels, found_inf taken off the counts of steps; 1 / grad_scale in FACTOR."""
    start = mixed(4, 20, size=0.1)
    p, q = nn.Parameter(start.to(DEVICE, copy=True)), nn.Parameter(start.clone())
    ours, theirs = SELAdam([p], fused=True, capturable=True), SELAdam([q], **EAGER)
    if not GPU:
        on_one_device(monkeypatch)
    ours.found_inf, ours.grad_scale = torch.zeros(1, device=DEVICE), torch.full((1,), 8.0, device=DEVICE)  # type: ignore[attr-defined]
    tape = Tape(ran)
    for t in range(6):
        q.grad = mixed(4, 20, seed=t)
        bad = t in (2, 4)
        p.grad = (8 * q.grad).to(DEVICE) if p.grad is None else p.grad.copy_(8 * q.grad)
        if bad:
            p.grad[1, 1] = math.inf
        ours.found_inf.fill_(float(bad))  # type: ignore[attr-defined]
        before = copy.deepcopy((ours.state[p], p.detach())) if t else None
        if t == 0:
            ours.step()
        elif t == 1:
            with tape:
                ours.step()
        else:
            tape.replay()
        if bad and before:
            for key, value in ours.state[p].items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(before[0][key])), key
            assert torch.equal(p, before[1])
        else:
            theirs.step()
    torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-12, atol=1e-14)
    assert float(ours.state[p]["step"]) == 4


def test_the_work_of_a_step_does_not_grow_with_the_number_of_parameters(
    ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the counts on the device: as many operations for nine parameters as for two, views aside."""
    if not GPU:
        on_one_device(monkeypatch)
    counts = []
    for number in (2, 9):
        params = [nn.Parameter(mixed(4, 20, seed=k, size=0.1).to(DEVICE)) for k in range(number)]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = SELAdam(params, fused=True, capturable=True, anneal_steps=9, lr=torch.tensor(1e-3, device=DEVICE))
        optimizer.step()
        tape = Tape(ran)
        with tape:
            optimizer.step()
        counts.append(len(tape.work))
    assert counts[0] == counts[1] < 80


def test_what_a_graph_uploads_lives_as_long_as_the_parameter(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay copies the table from the host's memory again. Guard: Part.param is the parameter, not a view of this step."""
    owners: list[Tensor] = []
    upload = triton._upload

    def spy(owner: Tensor, host: Tensor, device: torch.device) -> Tensor:
        owners.append(owner)
        return upload(owner, host, device)

    monkeypatch.setattr(triton, "_upload", spy)
    p, q = (nn.Parameter(mixed(*shape, size=0.1).to(DEVICE)) for shape in ((4, 20), (4, 32)))
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    step(SELAdam([p, q], fused=True), ran)
    assert owners[0] is p and owners[1] is q


def test_a_scaler_leaves_the_unscaling_to_the_kernel(ran: Ran) -> None:
    start = mixed(4, 20, size=0.1, dtype=torch.float32)
    p, q = nn.Parameter(start.to(DEVICE, copy=True)), nn.Parameter(start.to(DEVICE, copy=True))
    ours, theirs = SELAdam([p], fused=True), SELAdam([q], fused=True)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0)  # pyright: ignore[reportPrivateImportUsage]
    for bad in (False, True, False):
        for optimizer, w, scale in ((ours, p, scaler.scale), (theirs, q, lambda loss: loss)):
            optimizer.zero_grad()
            scale(w.square().sum() * (math.inf if bad else 1.0)).backward()
        before = p.detach().clone()
        scaler.step(ours)
        scaler.update()
        if bad:
            assert torch.equal(p, before)
        else:
            step(theirs, ran)
    assert torch.equal(p, q)
    assert p.grad is not None and q.grad is not None and torch.equal(p.grad, scaler.get_scale() * q.grad)


def test_capturable_where_there_is_no_graph_is_torch_s_error() -> None:
    """torch.optim.Adam(capturable=True) says the same on a CPU; nothing has moved then. Guard: _refuse_step before the steps."""
    start = mixed(2, 3, size=0.1)
    said: list[str] = []
    for make in (
        lambda p: SELAdam([p], capturable=True, foreach=False),
        lambda p: SELAdam([p], capturable=True, foreach=True),
        lambda p: SELAdam([p], capturable=True, curved="none", foreach=False),
        lambda p: torch.optim.Adam([p], capturable=True, foreach=False),
    ):
        p = nn.Parameter(start.clone())
        p.grad = torch.ones_like(p)
        optimizer = make(p)
        with pytest.raises(
            AssertionError, match="If capturable=True, params and state_steps must be on supported devices"
        ) as e:
            optimizer.step()
        said.append(str(e.value))
        assert torch.equal(p, start)
        optimizer.state_dict()
    assert len(set(said)) == 1


def test_capturable_set_later_is_honoured_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: _refuse_step, and _place_counter in _settle and _settle_plain. The meta device plays the accelerator."""
    p, b = nn.Parameter(mixed(2, 3, size=0.1)), nn.Parameter(torch.zeros(3))
    p.grad, b.grad = torch.ones_like(p), torch.ones_like(b)
    optimizer = SELAdam([p, b], check_edits="full", **EAGER)
    optimizer.step()
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(ValueError, match=r"capturable=True cannot have check_edits='full' \(parameter 0\.0\)"):
        optimizer.step()
    optimizer.param_groups[0].update(check_edits="tracked", betas=(torch.empty((), device="meta"), 0.9))
    with pytest.raises(
        ValueError, match=r"capturable=True cannot have betas on a device \(parameter 0\.0\): .*; use numbers"
    ):
        optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    with pytest.raises(AssertionError, match="supported devices"):
        optimizer.step()
    place = lambda self, group, p: torch.device("meta" if group["capturable"] else "cpu")  # noqa: E731
    monkeypatch.setattr(SELAdam, "_counter_device", place)
    saved = optimizer.state_dict()
    assert [optimizer.state[q]["step"].device.type for q in (p, b)] == ["meta", "meta"]
    for state in saved["state"].values():
        state["step"] = torch.tensor(1.0)
    optimizer.load_state_dict(saved)
    assert [optimizer.state[q]["step"].device.type for q in (p, b)] == ["meta", "meta"]


# ------------------------------------------------------------------------------------------------- which path, and what is said


def test_taken_by_itself_where_triton_is_installed(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_execute, "native_is_ready", native_is_ready)

    def take_a_step(**options: Any) -> bool:
        p = nn.Parameter(torch.full((2, 2), 0.1, device=DEVICE))
        p.grad = torch.ones_like(p)
        ran.launches.clear()
        SELAdam([p], **options).step()
        return bool(ran.launches)

    assert take_a_step() and take_a_step(fused=True)
    assert not take_a_step(fused=False) and not take_a_step(foreach=False) and not take_a_step(residual_rank=1)


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(_execute, "native_is_ready", native_is_ready)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "seloptim.kernels.triton")
    monkeypatch.delattr(kernels, "triton")
    _execute._say_once.cache_clear()
    p = nn.Parameter(torch.full((2, 2), 0.1, device=DEVICE))
    with pytest.raises(ImportError, match=r"needs triton.*pip install triton, or use fused=None"):
        SELAdam([p], fused=True)
    p.grad = torch.ones_like(p)
    optimizer = SELAdam([p])
    with caplog.at_level(logging.INFO, "seloptim"):
        optimizer.step()
        optimizer.step()
    assert [r.getMessage().count("pip install triton") for r in caplog.records] == [1]
    assert float(optimizer.state[p]["step"]) == 2


COMPILE = """
    import triton, triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from seloptim.kernels import triton as ours

    def build(kernel, **fixed):
        kind = "*fp64" if fixed["dtype"] is tl.float64 else "*fp32"
        types = {"ints": "*i64", "numbers": "*fp64", "owners": "*i64", "sums": kind}
        names = kernel.arg_names
        signature = {name: types.get(name, "constexpr") for name in names}
        constants = {(k,): fixed[name] for k, name in enumerate(names) if name in fixed}
        source = ASTSource(kernel, signature, constants)
        made = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": ours.WARPS})
        print(len(made.asm["cubin"]) > 0, "ld.global.v4" in made.asm["ptx"])

    for dtype, weight, learned, one, aligned in ((tl.float32, tl.bfloat16, 7, False, True), (tl.float64, tl.float64, 15, True, False)):
        fixed = dict(
            learned=learned, has_row=True, one_row=one, has_col=not one, has_n=one, congruent=one, coupled=one, amsgrad=one,
            as_lerp=not one, aligned=aligned, dtype=dtype, weight_dtype=weight, grad_dtype=weight, height=32, width=128, chunk=128,
        )
        for kernel in (ours._pull_and_update, ours._update_factors, ours._push):
            build(kernel, **fixed)
"""


def test_the_kernels_compile_for_a_gpu() -> None:
    """For compute capability 8.0, down to machine code, on a machine that need not have one; aligned rows by vector loads."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", textwrap.dedent(COMPILE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
    made = [line.split() for line in done.stdout.splitlines()]
    assert [built for built, _ in made] == ["True"] * 6
    assert made[0][1] == made[2][1] == "True"


@ON_A_GPU
@pytest.mark.parametrize("options", [FUSED, {"foreach": False, "fused": False}, {"foreach": True}], ids=str)
def test_a_captured_graph_is_the_eager_step(options: dict[str, Any]) -> None:
    starts = [mixed(40, 140, seed=k, size=0.1, dtype=torch.float32) for k in range(3)]
    ours, theirs = ([nn.Parameter(s.to(DEVICE, copy=True)) for s in starts] for _ in range(2))
    lr = torch.tensor(1e-3, device=DEVICE)
    captured = SELAdam(ours, lr=lr, capturable=True, anneal_steps=5, **options)
    eager = SELAdam(theirs, lr=1e-3, anneal_steps=5, **{**options, "fused": None if options is FUSED else False})
    graph = torch.cuda.CUDAGraph()
    for t in range(8):
        for k, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            q.grad = mixed(40, 140, seed=100 * t + k, dtype=torch.float32).to(DEVICE)
            p.grad = q.grad.clone() if p.grad is None else p.grad.copy_(q.grad)
        lr.fill_(1e-3 * (t + 1))
        eager.param_groups[0]["lr"] = 1e-3 * (t + 1)
        eager.step()
        if t < 3:
            captured.step()
            continue
        if t == 3:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                captured.step()
        graph.replay()
    for p, q in zip(ours, theirs, strict=True):
        assert float(captured.state[p]["step"]) == 8
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
