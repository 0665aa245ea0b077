"""The multiplier of a scale's learning rate: its ends, its middle, its constants, and tensors as well as numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seloptim.schedule import scale_lr_multiplier
from tests.oracle import multiplier

rates = st.floats(1e-4, 1e3)


@settings(deadline=None, max_examples=200)
@given(start=rates, end=rates, steps=st.integers(1, 10**6), t=st.integers(0, 2 * 10**6))
def test_equals_the_formula(start: float, end: float, steps: int, t: int) -> None:
    value = scale_lr_multiplier(start, end, steps, t)
    assert isinstance(value, float)
    assert value == pytest.approx(multiplier(start, end, steps, t), rel=1e-13)
    assert min(start, end) * (1 - 1e-12) <= value <= max(start, end) * (1 + 1e-12)
    as_double = scale_lr_multiplier(start, end, steps, torch.tensor(t, dtype=torch.float64))
    assert as_double.dtype == torch.float64 and as_double.shape == ()
    assert as_double.item() == pytest.approx(value, rel=1e-13)
    as_single = scale_lr_multiplier(start, end, steps, torch.tensor(t, dtype=torch.float32))
    assert as_single.dtype == torch.float32
    assert as_single.item() == pytest.approx(value, rel=1e-5)


def test_paper_values() -> None:
    assert scale_lr_multiplier(50.0, 8.0, 150_000, 0) == pytest.approx(50.0, rel=1e-15)
    assert scale_lr_multiplier(50.0, 8.0, 150_000, 75_000) == pytest.approx(math.sqrt(50 * 8), rel=1e-15)
    for t in (150_000, 150_001, 10**9):
        assert scale_lr_multiplier(50.0, 8.0, 150_000, t) == pytest.approx(8.0, rel=1e-15)


@pytest.mark.parametrize(("start", "end", "value"), [(50.0, 8.0, 20.0), (0.3, 0.3, 0.3), (0.0, 0.0, 0.0)])
def test_constant_without_anneal_steps(start: float, end: float, value: float) -> None:
    for t in (0, 7, 10**6):
        assert scale_lr_multiplier(start, end, None, t) == pytest.approx(value, rel=1e-15)
    assert scale_lr_multiplier(start, end, None, torch.tensor(3.0)).item() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("value", [0.3, 1.0, 0.0])
def test_equal_ends_are_constant_to_the_bit(value: float) -> None:
    assert all(scale_lr_multiplier(value, value, 10, t) == value for t in range(20))


def test_tensors_of_steps() -> None:
    t = torch.tensor([0, 5, 10, 20])
    value = scale_lr_multiplier(8.0, 2.0, 10, t)
    assert value.dtype == torch.float32 and value.shape == t.shape
    torch.testing.assert_close(value, torch.tensor([8.0, 4.0, 2.0, 2.0]))


@pytest.mark.parametrize(
    ("start", "end", "anneal_steps", "message"),
    [
        (-1.0, 1.0, 10, "start must be a positive multiple of the learning rate, got -1.0"),
        (0.0, 1.0, 10, "start must be a positive multiple of the learning rate, got 0.0"),
        (1.0, 0.0, None, "end must be a positive multiple of the learning rate, got 0.0"),
        (1.0, math.inf, 10, "end must be .*, got inf"),
        (math.nan, math.nan, 10, "start must be .*, got nan"),
        (-1.0, -1.0, 10, "start must be .*, got -1.0"),
        (1.0, 2.0, 0, "anneal_steps must be positive or None, got 0"),
        (1.0, 2.0, -5, "anneal_steps must be positive or None, got -5"),
    ],
)
def test_errors(start: float, end: float, anneal_steps: float | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scale_lr_multiplier(start, end, anneal_steps, 0)
