"""The map, its derivatives and its inverse against 50 digits, autograd and bisection."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from seloptim.functional import _inverse, sel_derivatives, sel_forward, sel_inverse, sel_pullback
from tests.oracle import KINDS, sel_map, sel_unmap

COMBINES = ("mismatched", "congruent")
combines = st.sampled_from(COMBINES)
f64 = torch.float64


def truth(raw: float, e: float, l: float, m: float, n: float, beta: float, combine: str) -> tuple[Any, Any]:
    """The weight in 50 digits, and the size of the larger of its two paths."""
    with mpmath.workdps(50):
        e_, l_, m_, n_, beta_, a = (mpmath.mpf(v) for v in (e, l, m, n, beta, abs(raw)))
        exponential = (e_ / beta_) * mpmath.exp(-n_) * mpmath.expm1(beta_ * m_ * a)
        linear = (l_ / beta_) * a
        s = -1 if raw < 0 else 1
        return s * exponential + (s if combine == "congruent" else 1) * linear, max(abs(exponential), abs(linear))


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=f64)


def as_floats(values: Tensor) -> list[float]:
    return values.double().tolist()


def random_scales(shape: tuple[int, ...], seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(shape, dtype=f64, generator=generator) for k in KINDS}


# The map


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (f64, 1e-14)])
@pytest.mark.parametrize("scales_are", ["numbers", "tensors"])
def test_forward_is_accurate_from_tiny_to_large(
    combine: str, dtype: torch.dtype, tolerance: float, scales_are: str
) -> None:
    a = torch.logspace(-12, math.log10(1.7), 400, dtype=f64).to(dtype)
    raw = torch.cat([-a, a])
    for e, l, m, n in ((1.0, 1.0, 1.5, 0.0), (0.5, 2.0, 1.5, 0.25), (-2.0, 1.0, 1.5, -0.5)):
        scales: Any = (e, l, m, n) if scales_are == "numbers" else torch.tensor([e, l, m, n], dtype=dtype)
        weight = sel_forward(raw, *scales, beta=12.5, combine=combine)
        assert weight.dtype == dtype
        for r, w in zip(as_floats(raw), as_floats(weight), strict=True):
            exact, size = truth(r, e, l, m, n, 12.5, combine)
            assert abs(w - exact) <= tolerance * size


@settings(deadline=None, max_examples=150)
@given(
    raw=st.floats(-2, 2),
    e=st.floats(-50, 50),
    l=st.floats(-50, 50),
    m=st.floats(-3, 3),
    n=st.floats(-20, 20),
    beta=st.floats(0.5, 64),
    combine=combines,
)
def test_forward_for_any_scales(raw: float, e: float, l: float, m: float, n: float, beta: float, combine: str) -> None:
    weight = sel_forward(tensor(raw), e, l, m, n, beta=beta, combine=combine).item()
    exact, size = truth(raw, e, l, m, n, beta, combine)
    # The argument of an exponential is known to half a unit in its last place, which the exponential multiplies.
    conditioning = 1 + abs(beta * m * raw) + abs(n)
    assert abs(weight - exact) <= 4e-16 * conditioning * size + 1e-300


def test_forward_keeps_shape_and_dtype() -> None:
    for shape in ((), (0,), (0, 3), (2, 3, 1, 2)):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, f64):
            raw = torch.zeros(shape, dtype=dtype)
            for result in (sel_forward(raw, beta=2.0), sel_inverse(raw, beta=2.0), *sel_pullback(raw, raw, beta=2.0)):
                assert result.shape == raw.shape and result.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("combine", COMBINES)
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, combine: str) -> None:
    raw = torch.linspace(-0.5, 0.5, 101).to(dtype)
    e = torch.full((101,), 1.25, dtype=dtype)
    expected = sel_forward(raw.float(), e.float(), beta=5.0, combine=combine).to(dtype)
    assert torch.equal(sel_forward(raw, e, beta=5.0, combine=combine), expected)
    slope, by = sel_derivatives(raw, e, beta=5.0, combine=combine)
    assert slope.dtype == torch.float32 and by["m"].dtype == torch.float32


def test_non_contiguous_and_channels_last() -> None:
    raw = torch.randn(4, 3, 5, 5, dtype=f64)
    for view in (raw.to(memory_format=torch.channels_last), raw.transpose(0, 3), raw[:, :, ::2]):
        assert torch.equal(sel_forward(view, beta=3.0), sel_forward(view.contiguous(), beta=3.0))
        assert torch.equal(sel_inverse(view, beta=3.0), sel_inverse(view.contiguous(), beta=3.0))


@pytest.mark.parametrize("combine", COMBINES)
def test_inputs_are_not_written_and_recording_changes_no_bit(combine: str) -> None:
    raw = torch.randn(6, 5)
    scales: dict[str, Any] = {k: torch.rand(6, 5) for k in KINDS}
    before = [v.clone() for v in (raw, *scales.values())]
    weight = sel_forward(raw, **scales, beta=3.0, combine=combine)
    slope, by = sel_derivatives(raw, **scales, beta=3.0, combine=combine)
    sel_derivatives(raw, beta=1.0, combine=combine)
    assert all(torch.equal(v, b) for v, b in zip((raw, *scales.values()), before, strict=True))
    recorded = raw.clone().requires_grad_()
    assert torch.equal(sel_forward(recorded, **scales, beta=3.0, combine=combine), weight)
    recorded_slope, recorded_by = sel_derivatives(recorded, **scales, beta=3.0, combine=combine)
    assert torch.equal(recorded_slope, slope)
    assert all(torch.equal(recorded_by[k], by[k]) for k in KINDS)


@pytest.mark.parametrize("combine", COMBINES)
def test_scales_broadcast(combine: str) -> None:
    raw = torch.randn(4, 3, dtype=f64)
    row, col = torch.rand(4, 1, dtype=f64) + 0.5, torch.rand(3, dtype=f64) + 0.5
    full = sel_forward(raw, (row * col), row.expand(4, 3), beta=2.0, combine=combine)
    assert torch.equal(sel_forward(raw, row * col, row, beta=2.0, combine=combine), full)
    curvature = torch.tensor([[2.0], [3.0], [4.0], [5.0]], dtype=f64)
    rows = [sel_forward(r, beta=b, combine=combine) for r, b in zip(raw, (2.0, 3.0, 4.0, 5.0), strict=True)]
    torch.testing.assert_close(sel_forward(raw, beta=curvature, combine=combine), torch.stack(rows), rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize("beta", [2.0, 3.7, 12.3, 12.5, 61.1])
@pytest.mark.parametrize("as_tensors", [False, True])
def test_degenerate_setting_is_the_identity_bit_for_bit(dtype: torch.dtype, beta: float, as_tensors: bool) -> None:
    raw = torch.linspace(-79 / beta, 79 / beta, 2001, dtype=f64).to(dtype)
    raw[0], raw[1], raw[2] = 0.0, -0.0, 1e-30
    e, l, b = (torch.tensor(v, dtype=dtype) if as_tensors else v for v in (0.0, beta, beta))
    for curvature in (b, beta):
        weight = sel_forward(raw, e, l, beta=curvature, combine="congruent")
        assert torch.equal(weight, raw) and torch.equal(weight.signbit(), raw.signbit())
        assert torch.equal(sel_inverse(raw, e, l, beta=curvature, combine="congruent"), raw)
        slope, _ = sel_derivatives(raw, e, l, beta=curvature, combine="congruent")
        assert torch.equal(slope, torch.ones_like(raw))
        grad = torch.randn_like(raw)
        assert torch.equal(sel_pullback(grad, raw, e, l, beta=curvature, combine="congruent")[0], grad)


# Derivatives


def test_zero_is_alive() -> None:
    e, l, m, n = 1.5, 0.7, 2.0, 0.3
    raw = torch.zeros(3, dtype=f64, requires_grad=True)
    for combine, expected in (
        ("mismatched", e * m * math.exp(-n)),
        ("congruent", e * m * math.exp(-n) + l / 4),
    ):
        (by_autograd,) = torch.autograd.grad(sel_forward(raw, e, l, m, n, beta=4.0, combine=combine).sum(), raw)
        slope, _ = sel_derivatives(raw.detach(), e, l, m, n, beta=4.0, combine=combine)
        for value in (
            by_autograd,
            slope,
            torch.func.vmap(
                torch.func.grad(lambda r, combine=combine: sel_forward(r, e, l, m, n, beta=4.0, combine=combine))
            )(raw.detach()),
        ):
            torch.testing.assert_close(value, torch.full((3,), expected, dtype=f64), rtol=1e-15, atol=0)


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("seed", range(4))
def test_derivatives_are_those_of_autograd(combine: str, seed: int) -> None:
    raw = torch.randn(7, 5, dtype=f64, generator=torch.Generator().manual_seed(seed))
    raw[::3] = 0.0
    scales = random_scales((7, 5), seed)
    leaves: list[Tensor] = [v.requires_grad_() for v in (raw, *scales.values())]
    naive = torch.autograd.grad(sel_map(raw, **scales, beta=2.5, combine=combine).sum(), leaves)
    ours = torch.autograd.grad(sel_forward(raw, **scales, beta=2.5, combine=combine).sum(), leaves)
    plain: dict[str, Any] = {k: v.detach() for k, v in scales.items()}
    slope, by = sel_derivatives(raw.detach(), **plain, beta=2.5, combine=combine)
    grad = torch.randn(7, 5, dtype=f64)
    pulled = sel_pullback(grad, raw.detach(), **plain, beta=2.5, combine=combine)
    for expected, a, d, g in zip(naive, ours, (slope, *(by[k] for k in KINDS)), pulled, strict=True):
        torch.testing.assert_close(a, expected, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(d, expected, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(g, grad * expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("combine", COMBINES)
def test_only_the_kinds_asked_for(combine: str) -> None:
    raw, scales = torch.randn(3, 4), random_scales((3, 4))
    slope, by = sel_derivatives(raw, **scales, beta=2.0, combine=combine)
    for kinds in ((), ("e",), ("n",), ("l", "m"), ("m", "n")):
        some_slope, some = sel_derivatives(raw, **scales, beta=2.0, combine=combine, kinds=kinds)
        assert set(some) == set(kinds)
        assert torch.equal(some_slope, slope) and all(torch.equal(some[k], by[k]) for k in kinds)


@pytest.mark.parametrize("combine", COMBINES)
def test_the_map_with_beta_folded_into_the_scales(combine: str) -> None:
    raw, scales = torch.randn(6, 4, dtype=f64), random_scales((6, 4))
    folded = (scales["e"] / 4, scales["l"] / 4, scales["m"] * 4, scales["n"])
    expected = sel_forward(raw, **scales, beta=4.0, combine=combine)
    torch.testing.assert_close(sel_forward(raw, *folded, beta=1.0, combine=combine), expected, rtol=1e-15, atol=1e-15)
    slope, _ = sel_derivatives(raw, **scales, beta=4.0, combine=combine)
    folded_slope, _ = sel_derivatives(raw, *folded, beta=1.0, combine=combine)
    torch.testing.assert_close(folded_slope, slope, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("function", ["forward", "pullback", "inverse"])
def test_gradcheck_twice(combine: str, function: str) -> None:
    generator = torch.Generator().manual_seed(3)

    def leaf(*shape: int, low: float = 0.5, high: float = 1.5) -> Tensor:
        return (low + (high - low) * torch.rand(shape, dtype=f64, generator=generator)).requires_grad_()

    sign = torch.tensor([[1.0, -1.0, 1.0], [-1.0, -1.0, 1.0]], dtype=f64)
    raw = (leaf(2, 3, low=0.2) * sign).detach().requires_grad_()
    inputs = (raw, leaf(2, 1), leaf(3, low=0.1, high=0.9), leaf(), leaf(2, 3, low=-0.2, high=0.2))

    def call(raw: Tensor, *scales: Tensor) -> Any:
        if function == "pullback":
            return sel_pullback(raw * raw, raw, *scales, beta=4.5, combine=combine)
        map_or_inverse = sel_forward if function == "forward" else sel_inverse
        return map_or_inverse(raw, *scales, beta=4.5, combine=combine)

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("combine", COMBINES)
def test_function_transforms(combine: str) -> None:
    raw, l = torch.randn(5, 3, 4, dtype=f64), torch.rand(5, 4, dtype=f64)
    for function in (sel_forward, sel_inverse, lambda r, *s, **o: sel_pullback(r, r, *s, **o)[0]):

        def one(r: Tensor, linear: Tensor, function: Any = function) -> Tensor:
            return function(r, 1.0, linear, beta=3.0, combine=combine)

        batched = torch.func.vmap(one)(raw, l)
        torch.testing.assert_close(batched, torch.stack([one(r, s) for r, s in zip(raw, l, strict=True)]))
        only_scale = torch.func.vmap(one, in_dims=(None, 0))(raw[0], l)
        torch.testing.assert_close(only_scale, torch.stack([one(raw[0], s) for s in l]))

        def total(r: Tensor, one: Any = one) -> Tensor:
            return one(r, l[0]).sum()

        by_autograd = torch.autograd.functional.hessian(total, raw[0])
        torch.testing.assert_close(torch.func.jacrev(torch.func.grad(total))(raw[0]), by_autograd)


@pytest.mark.parametrize("combine", COMBINES)
def test_compiles_without_graph_breaks(combine: str) -> None:
    raw = torch.randn(4, 3)

    def both(r: Tensor) -> Tensor:
        return sel_forward(r, beta=3.0, combine=combine) * sel_derivatives(r, beta=3.0, combine=combine)[0]

    torch.testing.assert_close(torch.compile(both, fullgraph=True, backend="eager")(raw), both(raw))


# The inverse


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("beta", [2.5, 12.5, 40.0])
def test_inverse_round_trip(combine: str, beta: float) -> None:
    size = torch.logspace(-13, math.log10(150), 3000, dtype=f64)
    weight = torch.cat([-size, tensor(0.0), size])
    back = sel_forward(sel_inverse(weight, beta=beta, combine=combine), beta=beta, combine=combine)
    torch.testing.assert_close(back, weight, rtol=1e-11, atol=0)
    single = weight.float()
    back = sel_forward(sel_inverse(single, beta=beta, combine=combine), beta=beta, combine=combine)
    # raw is known to half a unit in its last place, which the exponential multiplies by up to its argument.
    torch.testing.assert_close(back, single, rtol=16 * 2.0**-23, atol=0)


@settings(deadline=None, max_examples=200)
@example(weight=-1.0, e=0.0, l=-2.6758762715506193e-29, m=0.0, n=0.0, beta=1.0, previous=None, combine="mismatched")
@given(
    weight=st.one_of(st.floats(-200, 200), st.floats(-1e-6, 1e-6)).filter(lambda w: w == 0 or abs(w) > 1e-250),
    e=st.one_of(st.floats(-50, 50), st.just(0.0), st.floats(-1e-9, 1e-9)).filter(lambda v: v == 0 or abs(v) > 1e-30),
    l=st.one_of(st.floats(-50, 50), st.just(0.0)).filter(lambda v: v == 0 or abs(v) > 1e-30),
    m=st.one_of(st.floats(-3, 3), st.just(0.0)).filter(lambda v: v == 0 or abs(v) > 1e-3),
    n=st.floats(-20, 20),
    beta=st.floats(0.5, 64),
    previous=st.sampled_from([None, -1.0, 0.0, 1.0]),
    combine=combines,
)
def test_inverse_for_any_scales(
    weight: float, e: float, l: float, m: float, n: float, beta: float, previous: float | None, combine: str
) -> None:
    w, p = tensor(weight), None if previous is None else tensor(previous)
    raw, has_inverse = _inverse(w, e, l, m, n, beta=beta, combine=combine, previous=p)
    expected = sel_unmap(w, e, l, m, n, beta, combine, p)
    assert has_inverse.item() == (not expected.isnan().item()), (raw, expected)
    if not has_inverse:
        assert raw.isnan().item()
        return
    assert raw.sign().equal(expected.sign())
    if weight == 0:
        assert raw.item() == 0
        return
    back, size = truth(raw.item(), e if e else 0.0, l, m, n, beta, combine)
    # What one rounding of raw, of the arguments and of the two paths amounts to in the weight.
    slope, _ = sel_derivatives(raw, e, l, m, n if e else 0.0, beta=beta, combine=combine)
    slope = slope.nan_to_num(l / beta).abs().item()
    rounding = 1e-14 * (slope * abs(raw.item()) + (1 + abs(n)) * float(size))
    assert abs(back - weight) <= 1e-13 * abs(weight) + 2 * rounding


def test_branches_of_scales_with_other_signs() -> None:
    both: dict[str, Any] = {"e": -1.0, "l": -30.0, "beta": 2.0}
    # congruent with every sign turned: raw has the other sign
    assert sel_inverse(tensor(0.5, -0.5), **both, combine="congruent").sign().tolist() == [-1.0, 1.0]
    # mismatched with a dominating l: both signs of raw give positive weights, none a negative one
    scales: dict[str, Any] = {"e": 0.0, "l": 3.0, "beta": 1.0}
    weight = tensor(0.5, 0.5, 0.5)
    raw, has_inverse = _inverse(weight, **scales, previous=tensor(-2.0, 0.0, 2.0))
    assert has_inverse.all() and raw.sign().tolist() == [-1.0, 1.0, 1.0]
    assert _inverse(weight, **scales)[0].sign().tolist() == [1.0, 1.0, 1.0]
    assert not _inverse(-weight, **scales)[1].any()


def test_inverse_at_the_least_beta() -> None:
    weight = -torch.logspace(-13, 2, 200, dtype=f64)
    back = sel_forward(sel_inverse(weight, beta=1.001), beta=1.001)
    torch.testing.assert_close(back, weight, rtol=4e-13, atol=0)
    # The slope at zero is 0 on the negative side and the curve still rises.
    assert _inverse(weight, beta=1.0)[1].all()
    # What the message proposes is enough.
    for e, l, m, n in ((3.0, 1.0, 1.0, 0.0), (0.3, 0.7, 1.1, 0.4), (-2.0, 1.0, 0.7, -1.0)):
        with pytest.raises(ValueError, match="least beta that would do is") as caught:
            sel_inverse(torch.cat([weight, -weight]), e, l, m, n, beta=1e-3)
        least = float(str(caught.value).rsplit(" ", 1)[1])
        assert least == pytest.approx(abs(l) * math.exp(n) / abs(e * m), rel=1e-5)
        assert _inverse(torch.cat([weight, -weight]), e, l, m, n, beta=least)[1].all()


def test_inverse_of_many_rows_is_that_of_each() -> None:
    weight = torch.randn(700, 500) * 0.1
    e = torch.rand(700, 1) + 0.9
    raw = sel_inverse(weight, e, beta=12.5)
    parts = [sel_inverse(w, s, beta=12.5) for w, s in zip(weight.split(7), e.split(7), strict=True)]
    # Parts stop at their own last iteration, so that the float64 results differ in the last places.
    torch.testing.assert_close(raw, torch.cat(parts), rtol=2.0**-23, atol=0)


# Errors


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sel_forward(torch.zeros(2), beta=0.0), ValueError, "beta must be a positive number, got 0.0"),
        (lambda: sel_forward(torch.zeros(2), beta=math.nan), ValueError, "beta must be a positive number, got nan"),
        (lambda: sel_inverse(torch.zeros(2), beta=-1.0), ValueError, r"beta must be a positive number, got -1\.0"),
        (lambda: sel_derivatives(torch.zeros(2), beta=math.inf), ValueError, "beta must be a positive number, got inf"),
        (lambda: sel_forward(torch.zeros(2), beta=1.0, combine="both"), ValueError, "combine must be .*, got 'both'"),
        (lambda: sel_inverse(torch.zeros(2), beta=1.0, combine="both"), ValueError, "combine must be .*, got 'both'"),
        (
            lambda: sel_forward(torch.zeros(2, dtype=torch.int64), beta=1.0),
            TypeError,
            "real and floating, got torch.int64",
        ),
        (lambda: sel_inverse(torch.zeros(2, dtype=torch.cfloat), beta=1.0), TypeError, "got torch.complex64"),
        (
            lambda: sel_inverse(torch.tensor([0.5, math.inf]), beta=2.0),
            ValueError,
            r"weight inf at index \[1\] is not finite",
        ),
        (lambda: sel_inverse(torch.tensor(math.nan), beta=2.0), ValueError, "weight nan is not finite"),
        (
            lambda: sel_inverse(torch.tensor([[0.5, -0.25]]), l=3.0, beta=2.0),
            ValueError,
            r"weight -0\.25 at index \[0, 1\] has no inverse under the mismatched map with beta=2, e=1, l=3, m=1, n=0; "
            r"the least beta that would do is 3$",
        ),
        (
            lambda: sel_inverse(torch.tensor([0.5]), 1.0, 0.0, -1.0, beta=2.0),
            ValueError,
            r"weight 0\.5 at index \[0\] has no inverse .* m=-1, n=0$",
        ),
        (
            lambda: sel_inverse(torch.tensor([0.5]), 0.0, 0.0, beta=2.0),
            ValueError,
            "has no inverse .* e=0, l=0, m=1, n=0$",
        ),
    ],
)
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
