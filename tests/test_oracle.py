"""SELAdam on the untouched model against the float64 truth: weights, raw weights and scales, one by one and batched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seloptim import SELAdam, _execute, _rule
from tests.cases import CASES, Case, losses, make_model, mixed
from tests.oracle import Oracle

STEPS = 25
PATHS: dict[str, dict[str, Any]] = {
    "single": {"foreach": False},
    "batched": {"foreach": True},
    "native": {"fused": True},
}
BLOCKS = 7  # elements, so that every parameter is cut
RUNS = [
    pytest.param(case, path, id=f"{case.name}-{path}")
    for case in CASES
    for path in (*PATHS, "blocks")
    if path != "native" or not case.options.get("residual_rank")  # refused
]


def rate(t: int) -> float:
    return 2e-3 * (1.0 + 0.5 * math.sin(t))


class Ran:
    """Counts what the executor ran, so that a silent fallback fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.single = self.stacked = self.native = self.blocks = 0
        run_single, run_stack, run_native = _execute._run_single, _execute._run_stack, _execute._run_native

        def spy_single(items: Sequence[Any], *args: Any) -> None:
            self.single += len(items)
            run_single(items, *args)

        def spy_stack(items: Sequence[Any], *args: Any) -> None:
            self.stacked += len(items) > 1
            run_stack(items, *args)

        def spy_native(items: Sequence[Any], *args: Any) -> None:
            self.native += len(items)
            run_native(items, *args)

        pull = _rule.pull_part

        def spy_pull(*args: Any) -> Any:
            self.blocks += 1
            return pull(*args)

        monkeypatch.setattr(_rule, "pull_part", spy_pull)
        monkeypatch.setattr(_execute, "_run_native", spy_native)
        monkeypatch.setattr(_execute, "_run_single", spy_single)
        monkeypatch.setattr(_execute, "_run_stack", spy_stack)

    def check(self, path: str) -> None:
        ran = {"single": self.single, "batched": self.stacked, "native": self.native}
        assert {name for name, count in ran.items() if count} == {path if path != "blocks" else "single"}
        assert path not in ("single", "blocks") or (self.blocks > self.single) == (path == "blocks")


def pair(case: Case, path: str) -> tuple[nn.Module, SELAdam, Oracle]:
    """A model under SELAdam, and the oracle started from the same weights."""
    model = make_model(case.model)
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = SELAdam(model.parameters(), lr=rate(0), **PATHS.get(path, PATHS["single"]), **case.options)
    options = dict(case.options)
    if options.get("residual_rank"):
        curved = {p for _, p in optimizer.named_curved()}
        for p in curved:
            optimizer.raw(p)
        options["residuals"] = [
            (optimizer.state[p]["residual_a"], optimizer.state[p]["residual_b"]) if p in curved else None
            for p in model.parameters()
        ]
    return model, optimizer, Oracle(start, lr=rate(0), **options)


def close(actual: Tensor, expected: Tensor, start: Tensor | float = 0.0) -> None:
    """Displacements from the start agree to 1e-9 of themselves; what cancels, to 1e-12 of the largest."""
    moved = expected - start
    largest = moved.abs().max().item() if moved.numel() else 0.0
    torch.testing.assert_close(actual - start, moved, rtol=1e-9, atol=1e-12 * largest)


def compare_state(model: nn.Module, optimizer: SELAdam, oracle: Oracle) -> None:
    curved = {p for _, p in optimizer.named_curved()}
    for index, p in enumerate(model.parameters()):
        assert (p in curved) == (oracle.curves[index] is not None)
        if p not in curved:
            continue
        assert optimizer.beta(p) == pytest.approx(oracle.beta(index), rel=1e-14)
        close(optimizer.raw(p), oracle.raw(index))
        scales = optimizer.scales(p)
        for kind, (row, col) in oracle.factors(index).items():
            for ours, theirs in zip(scales[kind], (row, col), strict=True):
                torch.testing.assert_close(ours.expand_as(theirs), theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("case", "path"), RUNS)
def test_trains_as_the_oracle(case: Case, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = Ran(monkeypatch)
    if path == "blocks":
        monkeypatch.setattr(_execute, "BLOCK_ELEMENTS", BLOCKS)
    model, optimizer, oracle = pair(case, path)
    twin = make_model(case.model)
    start = oracle.weights()
    for p, w in zip(model.parameters(), start, strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=1e-13, atol=0)
    ours, theirs = losses(model), losses(twin)
    for t in range(STEPS):
        with torch.no_grad():
            for p, w in zip(twin.parameters(), oracle.weights(), strict=True):
                p.copy_(w)
        optimizer.zero_grad()
        twin.zero_grad()
        next(ours).backward()
        next(theirs).backward()
        optimizer.param_groups[0]["lr"] = rate(t)
        optimizer.step()
        oracle.step([p.grad for p in twin.parameters()], lr=rate(t))
    for p, w, s in zip(model.parameters(), oracle.weights(), start, strict=True):
        close(p.detach(), w, s)
    compare_state(model, optimizer, oracle)
    ran.check(path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("combine", ["mismatched", "congruent"])
def test_a_layer_at_zero_moves_whole(combine: str, path: str) -> None:
    model = make_model("zero")
    optimizer = SELAdam(model.parameters(), **PATHS[path], curved="all", combine=combine)
    next(losses(model)).backward()
    optimizer.step()
    head = model.get_submodule("head")
    assert all((p != 0).all() for p in head.parameters())


@pytest.mark.parametrize("path", PATHS)
def test_each_parameter_counts_its_own_steps(path: str) -> None:
    start = [mixed(4, 5, seed=s, size=0.1) for s in range(3)]
    params = [nn.Parameter(w.clone()) for w in start]
    options: dict[str, Any] = {"anneal_steps": 10, "lr": 1e-3}
    optimizer, oracle = SELAdam(params, **PATHS[path], **options), Oracle(start, **options)
    for t in range(STEPS):
        grads = [mixed(4, 5, seed=100 + 3 * t + i) if (t + i) % 3 else None for i in range(3)]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()
        oracle.step(grads)
    for p, w, s in zip(params, oracle.weights(), start, strict=True):
        close(p.detach(), w, s)


@pytest.mark.parametrize(("path", "residual_rank"), [*((path, 0) for path in PATHS), ("single", 2), ("batched", 2)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_gradient_element_reaches_only_its_own_weight(bad: float, path: str, residual_rank: int) -> None:
    start = [mixed(4, 5, seed=s, size=0.1) for s in range(2)]
    params = [nn.Parameter(w.clone()) for w in start]
    optimizer = SELAdam(params, **PATHS[path], residual_rank=residual_rank)
    residuals = None
    if residual_rank:
        for p in params:
            optimizer.raw(p)
        residuals = [(optimizer.state[p]["residual_a"], optimizer.state[p]["residual_b"]) for p in params]
    oracle = Oracle(start, residual_rank=residual_rank, residuals=residuals)
    for t in range(5):
        grads = [mixed(4, 5, seed=100 + 2 * t + i) for i in range(2)]
        if t == 4:
            grads[0][1, 3] = bad
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()
        oracle.step(grads)
    spoilt = torch.zeros(4, 5, dtype=torch.bool)
    spoilt[1, 3] = True  # [1, 2] is 0 from the start
    for p, w, s, hit in zip(params, oracle.weights(), start, (spoilt, torch.zeros_like(spoilt)), strict=True):
        assert torch.equal(p.isfinite(), ~hit) and torch.equal(w.isfinite(), ~hit)
        close(p.detach()[~hit], w[~hit], s[~hit])
