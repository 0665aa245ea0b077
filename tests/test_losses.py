"""The fused cross-entropy against its plain formulas in float64, and against what has gone wrong in others."""

import copy
import gc
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import seloptim.losses as losses
from seloptim.losses import FusedLinearCrossEntropy, LossStats, cross_entropy, linear_cross_entropy

TIGHT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-11}


def plain(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
) -> LossStats:
    """The formulas of the specification, one line each, from logits."""
    lead, classes = logits.shape[:-1], logits.shape[-1]
    logits = logits.reshape(-1, classes)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logsumexp = logits.logsumexp(-1)
    log_p = logits - logsumexp.unsqueeze(-1)
    cw = torch.ones(classes, dtype=logits.dtype) if class_weight is None else class_weight.to(logits.dtype)
    if target.is_floating_point():
        kept = torch.ones(logits.shape[0], dtype=torch.bool)
        q = target.reshape(-1, classes).to(logits.dtype)
        count = torch.tensor(float(logits.shape[0]), dtype=logits.dtype)
    else:
        kept = target.reshape(-1) != ignore_index
        labels = target.reshape(-1).long().masked_fill(~kept, 0)
        q = F.one_hot(labels, classes).to(logits.dtype)
        count = cw[labels][kept].sum()
    t = ((1 - label_smoothing) * q + label_smoothing / classes) * cw
    z = z_loss * logsumexp**2
    loss = -(t * log_p).sum(-1) + z
    w = torch.ones_like(loss) if token_weight is None else token_weight.reshape(-1).to(logits.dtype)
    loss, z = ((x * w).masked_fill(~kept, 0) for x in (loss, z))
    hits = (logits.argmax(-1) == q.argmax(-1)) & kept
    logsumexp = logsumexp.masked_fill(~kept, torch.nan)
    if reduction == "none":
        loss, z = loss.reshape(lead), z.reshape(lead)
    else:
        loss, z = loss.sum(), z.sum()
        if reduction == "mean":
            by = count if denominator is None else torch.as_tensor(denominator, dtype=logits.dtype)
            loss, z = loss / by, z / by
    return LossStats(loss, logsumexp.reshape(lead).detach(), hits.reshape(lead), z.detach())


def made(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 1.0, grad: bool = True
) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return x.to(dtype).requires_grad_(grad)


def labels(*shape: int, classes: int, ignored: float = 0.0, seed: int = 1, ignore_index: int = -100) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, shape, generator=generator)
    return y.masked_fill(torch.rand(shape, generator=generator) < ignored, ignore_index)


def grads(loss: Tensor, inputs: Any, upstream: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, [x for x in inputs if x is not None], upstream, **options)


def each(*options: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return options


@pytest.fixture(params=["cpu", "as on a gpu"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The second route never looks at a value: nothing is compacted or checked. It is the one that CUDA takes."""
    if request.param != "cpu":
        monkeypatch.setattr(losses, "_reads_values", lambda device: False)
    return request.param


# Agreement with the plain formulas -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_rows", [None, 1, 2, 7, 64, 1000])
@pytest.mark.parametrize("shape", [(1, 4, 3), (13, 5, 33), (64, 8, 257)])
def test_agrees_with_plain_torch_in_float64(route, reduction, with_bias, chunk_rows, shape):
    n, d, v = shape
    x, w = made(n, d), made(v, d, seed=2)
    b = made(v, seed=3) if with_bias else None
    y = labels(n, classes=v, ignored=0.3 if n > 1 else 0.0)
    got = linear_cross_entropy(x, w, y, b, reduction=reduction, chunk_rows=chunk_rows)
    want = F.cross_entropy(F.linear(x, w, b), y, reduction=reduction)
    torch.testing.assert_close(got, want, **TIGHT)
    upstream = made(*want.shape, seed=4, grad=False)
    for a, e in zip(grads(got, (x, w, b), upstream), grads(want, (x, w, b), upstream), strict=True):
        torch.testing.assert_close(a, e, **TIGHT)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_class_weights_smoothing_and_probabilities_are_torchs(route, reduction, smoothing, weighted, soft):
    n, d, v = 12, 6, 10
    x, w, b = made(n, d), made(v, d, seed=2), made(v, seed=3)
    cw = torch.rand(v, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) if weighted else None
    y = made(n, v, seed=6, grad=False).softmax(-1) if soft else labels(n, classes=v, ignored=0.4)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    want = F.cross_entropy(F.linear(x, w, b), y, weight=cw, **options)
    upstream = made(*want.shape, seed=4, grad=False)
    expected = grads(want, (x, w, b), upstream)
    got = linear_cross_entropy(x, w, y, b, class_weight=cw, chunk_rows=5, **options)
    torch.testing.assert_close(got, want, **TIGHT)
    for a, e in zip(grads(got, (x, w, b), upstream), expected, strict=True):
        torch.testing.assert_close(a, e, **TIGHT)
    z = F.linear(x, w, b).detach().requires_grad_()
    got = cross_entropy(z, y, class_weight=cw, chunk_rows=5, **options)
    torch.testing.assert_close(got, want, **TIGHT)
    (e,) = grads(F.cross_entropy(z, y, weight=cw, **options), [z], upstream)
    torch.testing.assert_close(grads(got, [z], upstream)[0], e, **TIGHT)


def check_against_plain(n, d, v, seed, ignored, with_bias, soft, chunk_rows, options):
    x, w = made(n, d, seed=seed), made(v, d, seed=seed + 1)
    b = made(v, seed=seed + 2) if with_bias else None
    y = made(n, v, seed=seed + 3, grad=False).softmax(-1) if soft else labels(n, classes=v, ignored=ignored, seed=seed)
    if options.pop("class_weight"):
        options["class_weight"] = made(v, seed=seed + 4, grad=False).abs()
    if options.pop("token_weight"):
        options["token_weight"] = made(n, seed=seed + 5, grad=False)
    if options["reduction"] != "mean":
        options["denominator"] = None
    want = plain(F.linear(x, w, b), y, **options)
    upstream = made(*want.loss.shape, seed=seed + 6, grad=False)
    z = F.linear(x, w, b).detach().requires_grad_()
    expected = grads(want.loss, (x, w, b), upstream)
    expected_z = grads(plain(z, y, **options).loss, [z], upstream)
    got = linear_cross_entropy(x, w, y, b, chunk_rows=chunk_rows, return_stats=True, **options)
    over = z.detach().clone().requires_grad_()
    runs = [
        (got, (x, w, b), expected),
        (cross_entropy(z, y, chunk_rows=chunk_rows, return_stats=True, **options), [z], expected_z),
        (cross_entropy(over, y, chunk_rows=chunk_rows, return_stats=True, inplace=True, **options), [over], expected_z),
    ]
    for result, inputs, gradients in runs:
        for a, e in zip(result, want, strict=True):
            torch.testing.assert_close(a.detach(), e.detach(), equal_nan=True, **TIGHT)
        for a, e in zip(grads(result.loss, inputs, upstream), gradients, strict=True):
            torch.testing.assert_close(a, e, equal_nan=True, **TIGHT)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 20),
    d=st.integers(1, 6),
    v=st.integers(1, 40),
    seed=st.integers(0, 1000),
    ignored=st.sampled_from([0.0, 0.0, 0.5, 0.9]),
    with_bias=st.booleans(),
    soft=st.booleans(),
    chunk_rows=st.sampled_from([None, 1, 3, 50]),
    gpu=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "reduction": st.sampled_from(["mean", "sum", "none"]),
            "label_smoothing": st.sampled_from([0.0, 0.0, 0.1, 1.0]),
            "softcap": st.sampled_from([None, None, 0.7, 30.0]),
            "z_loss": st.sampled_from([0.0, 0.0, 0.01, 1.0]),
            "class_weight": st.booleans(),
            "token_weight": st.booleans(),
            "denominator": st.sampled_from([None, None, 7.5]),
        }
    ),
)
def test_any_combination_of_options_is_its_plain_formula(
    n, d, v, seed, ignored, with_bias, soft, chunk_rows, gpu, options
):
    with pytest.MonkeyPatch.context() as patch:
        if gpu:
            patch.setattr(losses, "_reads_values", lambda device: False)
        check_against_plain(n, d, v, seed, ignored, with_bias, soft, chunk_rows, options)


def test_plain_here_is_torchs():
    """The reference of the test above against torch's own function, so that not both can be wrong."""
    z, cw = made(9, 7), made(7, seed=2, grad=False).abs()
    for y in (labels(9, classes=7, ignored=0.3), made(9, 7, seed=3, grad=False).softmax(-1)):
        for reduction in ("mean", "sum", "none"):
            want = F.cross_entropy(z, y, weight=cw, label_smoothing=0.1, reduction=reduction)
            got = plain(z, y, class_weight=cw, label_smoothing=0.1, reduction=reduction).loss
            torch.testing.assert_close(got, want, **TIGHT)


def test_gradcheck():
    x, w, b, y = made(5, 3), made(6, 3, seed=2), made(6, seed=3), labels(5, classes=6, ignored=0.2)
    tw = made(5, seed=4, grad=False).abs()
    for reduction in ("mean", "none"):

        def loss(x, w, b, reduction=reduction):
            return linear_cross_entropy(
                x, w, y, b, reduction=reduction, softcap=2.0, z_loss=0.1, label_smoothing=0.1, token_weight=tw
            )

        assert torch.autograd.gradcheck(loss, (x, w, b))


def test_the_textbook_softmax():
    z = torch.tensor([[123.0, 456.0, 789.0]], dtype=torch.float64, requires_grad=True)
    cross_entropy(z, torch.tensor([2]), reduction="sum").backward()
    assert z.grad is not None
    want = torch.tensor([[5.75274406e-290, 2.39848787e-145, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(z.grad, want, rtol=1e-8, atol=0)


def test_uneven_accumulation_with_a_denominator_is_the_whole_batch():
    x, w, y = made(30, 4), made(11, 4, seed=2), labels(30, classes=11, ignored=0.4)
    want = F.cross_entropy(F.linear(x, w), y)
    count = (y != -100).sum()
    parts = [linear_cross_entropy(a, w, b, denominator=count) for a, b in zip(x.split(7), y.split(7), strict=True)]
    total = torch.stack(parts).sum()
    torch.testing.assert_close(total, want, **TIGHT)
    for a, e in zip(grads(total, (x, w)), grads(want, (x, w)), strict=True):
        torch.testing.assert_close(a, e, **TIGHT)


def test_statistics_are_detached_and_per_token():
    x, w, y = made(2, 5, 4), made(7, 4, seed=2), labels(2, 5, classes=7, ignored=0.3)
    result = linear_cross_entropy(x, w, y, z_loss=0.1, return_stats=True)
    assert isinstance(result, LossStats)
    z = F.linear(x, w).detach()
    kept = y != -100
    torch.testing.assert_close(result.logsumexp[kept], z.logsumexp(-1)[kept], **TIGHT)
    assert result.logsumexp[~kept].isnan().all()
    assert torch.equal(result.hits, (z.argmax(-1) == y) & kept)
    torch.testing.assert_close(result.z_loss, 0.1 * z.logsumexp(-1)[kept].square().mean(), **TIGHT)
    assert result.loss.requires_grad
    assert not any(s.requires_grad for s in result[1:])


# Memory and work ------------------------------------------------------------------------------------------------------


def peak_bytes(run) -> int:
    """The most that torch's allocator held above the start; the profiler sees buffers inside kernels too."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events: list[Any] = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(held, default=0)


@pytest.mark.parametrize("options", [{}, {"z_loss": 1e-4, "label_smoothing": 0.1}], ids=str)
def test_peak_memory_is_bounded(options):
    n, d, v = 2048, 256, 65536
    x, w = torch.randn(n, d, requires_grad=True), (torch.randn(v, d) * 0.05).requires_grad_()
    y = torch.randint(0, v, (n,))
    peak = peak_bytes(lambda: (3 * linear_cross_entropy(x, w, y, **options)).backward())
    assert x.grad is not None and w.grad is not None  # counted: 66 MiB of the peak
    assert peak <= 110 << 20


class Ops(TorchDispatchMode):
    """Every operator below autograd, with the shapes of what it returns."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor):
                self.calls.append((func.overloadpacket.__name__, tuple(x.shape)))
        return out

    def products(self) -> int:
        return sum(name in ("mm", "addmm", "addmm_") for name, _ in self.calls)

    def shapes(self) -> set[tuple[int, ...]]:
        return {shape for _, shape in self.calls}


def counted(x, w, y, backward=True, **options) -> Ops:
    with Ops() as ops:
        loss = linear_cross_entropy(x, w, y, **options)
        if backward:
            assert isinstance(loss, Tensor)
            loss.sum().backward()
    return ops


def test_three_products_a_chunk_and_four_for_none():
    x, w, y = made(40, 4), made(9, 4, seed=2), labels(40, classes=9)
    assert counted(x, w, y, chunk_rows=10).products() == 3 * 4
    assert counted(x, w, y, chunk_rows=10, token_weight=torch.rand(40)).products() == 3 * 4
    assert counted(x, w, y, chunk_rows=10, reduction="none").products() == 4 * 4


def test_the_logits_never_exist():
    n, d, v = 300, 4, 70
    for options in each({}, {"reduction": "none"}, {"softcap": 5.0, "label_smoothing": 0.1}):
        ops = counted(made(n, d), made(v, d, seed=2), labels(n, classes=v), chunk_rows=50, **options)
        assert all(v not in shape or n not in shape for shape in ops.shapes())


def test_ignored_rows_are_dropped_before_the_first_product():
    y = labels(40, classes=9)
    y[5:] = -100
    ops = counted(made(40, 4), made(9, 4, seed=2), y)
    assert (5, 9) in ops.shapes()
    assert (40, 9) not in ops.shapes()


def test_no_gradient_work_without_grad():
    x, w, y = made(40, 4), made(9, 4, seed=2), labels(40, classes=9)
    with torch.no_grad():
        ops = counted(x, w, y, backward=False, chunk_rows=10)
    assert ops.products() == 4
    assert not {name for name, shape in ops.calls if shape in ((9, 4), (40, 4))} - {
        "slice",
        "view",
    }  # views of operands
    with torch.inference_mode():
        assert counted(x.detach(), w.detach(), y, backward=False, chunk_rows=10).products() == 4
    assert counted(x.detach(), w.detach(), y, backward=False, chunk_rows=10).products() == 4
    logits = made(4, 9, grad=False)
    before = logits.clone()
    cross_entropy(logits, y[:4], inplace=True)
    with torch.no_grad():
        cross_entropy(logits.requires_grad_(), y[:4], inplace=True)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)), ids=str)
def test_every_subset_of_requires_grad(route, needs, reduction):
    operands = [made(12, 4), made(9, 4, seed=2), made(9, seed=3)]
    for tensor, need in zip(operands, needs, strict=True):
        tensor.requires_grad_(need)
    x, w, b = operands
    y = labels(12, classes=9, ignored=0.3)
    with Ops() as ops:
        loss = linear_cross_entropy(x, w, y, b, reduction=reduction)
        assert loss.requires_grad == any(needs)
        if any(needs):
            loss.sum().backward()
    made_shapes = {shape for name, shape in ops.calls if name in ("empty", "zeros", "mm", "new_empty")}
    assert ((9, 4) in made_shapes) == needs[1]
    if any(needs):
        wanted = [t for t, need in zip(operands, needs, strict=True) if need]
        want = grads(F.cross_entropy(F.linear(x, w, b), y, reduction=reduction).sum(), wanted)
        for tensor, e in zip(wanted, want, strict=True):
            assert tensor.grad is not None
            torch.testing.assert_close(tensor.grad, e, **TIGHT)
    assert all(t.grad is None for t, need in zip(operands, needs, strict=True) if not need)


# Precision ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_rows", [None, 1, 8, 64, 2048])
def test_bfloat16_is_right_at_any_chunk_size(chunk_rows):
    n, d, v = 2048, 32, 4096
    x = made(n, d, dtype=torch.bfloat16)
    w = made(v, d, seed=2, dtype=torch.bfloat16, scale=0.2)
    y = labels(n, classes=v)
    truth_x, truth_w = (t.detach().double().requires_grad_() for t in (x, w))
    want = F.cross_entropy(F.linear(truth_x, truth_w), y)
    got = linear_cross_entropy(x, w, y, chunk_rows=chunk_rows)
    assert got.dtype == torch.float32
    assert abs(got.item() - want.item()) < 1e-3
    for a, e in zip(grads(got, (x, w)), grads(want, (truth_x, truth_w)), strict=True):
        assert a.dtype == torch.bfloat16
        # one rounding to bfloat16, 2^-9, of values accumulated in float32: whatever the number of chunks
        assert ((a.double() - e).norm() / e.norm()).item() < 2**-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shift", [0.0, 1e5])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=str)
def test_no_less_exact_than_plain_torch(dtype, shift, options):
    """The truth is float64 arithmetic on the same rounded numbers; plain torch's own error is the measure."""
    n, d, v = 64, 32, 1000
    x, w, y = made(n, d, dtype=dtype), made(v, d, seed=2, dtype=dtype, scale=0.3), labels(n, classes=v)
    b = (torch.randn(v, generator=torch.Generator().manual_seed(3)) + (shift if dtype == torch.float32 else 0)).to(
        dtype
    )
    b.requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    truth = F.cross_entropy(F.linear(*exact), y, **options)
    theirs = F.cross_entropy(F.linear(x, w, b), y, **options)
    ours = linear_cross_entropy(x, w, y, b, chunk_rows=16, **options)
    unit = torch.finfo(torch.float32).eps
    assert abs(ours.item() - truth.item()) <= abs(theirs.item() - truth.item()) + 8 * unit * (truth.item() + shift)
    for a, p, e in zip(grads(ours, (x, w, b)), grads(theirs, (x, w, b)), grads(truth, exact), strict=True):
        error, plain_error = ((g.double() - e).norm() / e.norm() for g in (a, p))
        assert error <= 1.05 * plain_error + 8 * unit


def test_shift_by_1e5_changes_nothing_that_float32_can_hold():
    z = made(6, 50, dtype=torch.float32, scale=3.0).detach()
    z = (z * 128).round() / 128  # so that z + 1e5 is exact in float32
    y = labels(6, classes=50)
    for options in each({}, {"label_smoothing": 0.3}):
        a, b = z.clone().requires_grad_(), (z + 1e5).requires_grad_()
        low, high = cross_entropy(a, y, **options), cross_entropy(b, y, **options)
        torch.testing.assert_close(low, high, rtol=1e-6, atol=0)
        torch.testing.assert_close(grads(low, [a])[0], grads(high, [b])[0], rtol=1e-6, atol=1e-9)


def test_a_probability_that_underflows_still_has_its_loss():
    z = torch.tensor([[0.0, 300.0, -1000.0], [0.0, 88.0, 104.0]], requires_grad=True)
    loss = cross_entropy(z, torch.tensor([0, 0]), reduction="none")
    torch.testing.assert_close(loss, torch.tensor([300.0, 104.0]))
    (g,) = grads(loss.sum(), [z])
    torch.testing.assert_close(g[0], torch.tensor([-1.0, 1.0, 0.0]))
    x, w = torch.ones(1, 1, requires_grad=True), z.detach()[:1].t().contiguous()
    assert linear_cross_entropy(x, w, torch.tensor([2])).item() == 1300.0


def test_float16_gradients_do_not_underflow_before_the_loss_scale():
    n, v = 512, 300
    x, w = made(n, 8, dtype=torch.float16, scale=1e-3), made(v, 8, seed=2, dtype=torch.float16, scale=1e-3)
    y = labels(n, classes=v)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    want = grads(F.cross_entropy(F.linear(*exact), y) * 2.0**14, exact)
    got = grads(linear_cross_entropy(x, w, y) * 2.0**14, (x, w))
    z = made(n, v, dtype=torch.float16)
    for a, e in zip(got, want, strict=True):
        assert ((a.double() - e).norm() / e.norm()).item() < 1e-3
    exact_z = z.detach().double().requires_grad_()
    (e,) = grads(F.cross_entropy(exact_z, y) * 2.0**14, [exact_z])
    (a,) = grads(cross_entropy(z, y) * 2.0**14, [z])
    assert ((a.double() - e).norm() / e.norm()).item() < 1e-3


# What must not leak, and what must be refused ----


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("n", [0, 5])
def test_nothing_to_average_over_is_as_in_torch(route, reduction, n):
    x, w, b = made(n, 4), made(7, 4, seed=2), made(7, seed=3)
    y = torch.full((n,), -100)
    got = linear_cross_entropy(x, w, y, b, reduction=reduction)
    want = F.cross_entropy(F.linear(x, w, b), y, reduction=reduction)
    torch.testing.assert_close(got, want, equal_nan=True)
    for a, e in zip(grads(got.sum(), (x, w, b)), grads(want.sum(), (x, w, b)), strict=True):
        assert torch.equal(a, e)
        assert not a.any()
    z = made(n, 7)
    for inplace in (False, True):
        got = cross_entropy(z, y, reduction=reduction, inplace=inplace)
        torch.testing.assert_close(got, want, equal_nan=True)
        assert torch.equal(grads(got.sum(), [z])[0], torch.zeros(n, 7, dtype=torch.float64))


def test_no_tokens_with_probabilities():
    x, w, q = made(0, 4), made(7, 4, seed=2), torch.empty(0, 7)
    assert linear_cross_entropy(x, w, q).isnan()
    assert not grads(linear_cross_entropy(x, w, q), (x, w))[1].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows_may_hold_anything(route, bad, reduction):
    x, w, b, y = made(9, 4), made(7, 4, seed=2), made(7, seed=3), labels(9, classes=7, ignored=0.4)
    tw, spoilt_tw = torch.rand(9), None
    with torch.no_grad():
        spoilt = x.clone()
        spoilt[y == -100] = bad
        spoilt_tw = tw.masked_fill(y == -100, bad)
    spoilt.requires_grad_()
    options: dict[str, Any] = {"reduction": reduction, "z_loss": 0.1, "chunk_rows": 4}
    want = linear_cross_entropy(x, w, y, b, token_weight=tw, **options)
    got = linear_cross_entropy(spoilt, w, y, b, token_weight=spoilt_tw, **options)
    torch.testing.assert_close(got, want, **TIGHT)
    upstream = made(*want.shape, seed=4, grad=False)
    expected = grads(want, (x, w, b), upstream)
    if reduction == "none":
        upstream = upstream.masked_fill(y == -100, bad)
    for a, e in zip(grads(got, (spoilt, w, b), upstream), expected, strict=True):
        torch.testing.assert_close(a, e, **TIGHT)
    z = F.linear(x, w, b).detach()
    spoilt_z = z.masked_fill((y == -100).unsqueeze(1), bad)
    for inplace in (False, True):
        a, e = spoilt_z.clone().requires_grad_(), z.clone().requires_grad_()
        got, want = cross_entropy(a, y, inplace=inplace, **options), cross_entropy(e, y, **options)
        torch.testing.assert_close(got, want, **TIGHT)
        torch.testing.assert_close(grads(got.sum(), [a])[0], grads(want.sum(), [e])[0], **TIGHT)


def test_a_kept_row_that_is_not_finite_is_not_hidden(route):
    w = made(7, 4, seed=2)
    for bad in (torch.nan, torch.inf):
        x, y = made(9, 4), labels(9, classes=7)
        with torch.no_grad():
            x[3, 1] = bad
        for options in each({}, {"label_smoothing": 0.1}, {"class_weight": torch.zeros(7)}, {"z_loss": 0.1}):
            loss = linear_cross_entropy(x, w, y, reduction="sum", **options)
            assert not loss.isfinite()
            assert not grads(loss, (x, w))[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_minus_infinity_in_a_bias_closes_a_class_and_nothing_else(route, dtype):
    x, w, b, y = (
        made(9, 4, dtype=dtype),
        made(7, 4, seed=2, dtype=dtype),
        made(7, seed=3, dtype=dtype),
        labels(9, classes=5),
    )
    with torch.no_grad():
        b[5:] = -torch.inf
    q = F.pad(made(9, 5, seed=6, grad=False).softmax(-1), (0, 2))
    cw = torch.ones(7).index_fill_(0, torch.tensor([5, 6]), 0)
    runs: list[tuple[Tensor, dict[str, Any], dict[str, Any]]] = [
        (y, {}, {}),
        (y, {"z_loss": 0.1}, {"z_loss": 0.1}),
        (q, {}, {}),
        # A closed class that has no weight gets no share of the smoothing; V stays 7 in smoothing / V.
        (y, {"class_weight": cw, "label_smoothing": 0.7}, {"label_smoothing": None}),
    ]
    for target, options, plain_options in runs:
        got = linear_cross_entropy(x, w, target, b, reduction="sum", **options)
        exact = [t.detach().double().requires_grad_() for t in (x, w[:5], b[:5])]
        z = F.linear(*exact)
        if plain_options == {"label_smoothing": None}:
            log_p = z.log_softmax(-1)
            want = -(0.3 * log_p.gather(1, y[:, None]).sum() + 0.7 / 7 * log_p.sum())
        else:
            want = plain(z, target[:, :5] if target.dim() == 2 else target, reduction="sum", **plain_options).loss
        tolerance: dict[str, Any] = TIGHT if dtype == torch.float64 else {"rtol": 1e-5, "atol": 0.0}
        torch.testing.assert_close(got.double(), want, **tolerance)
        near = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
        for a, e in zip(grads(got, (x, w, b)), grads(want, exact), strict=True):
            rows = a[:5] if a.shape[0] == 7 else a
            torch.testing.assert_close(rows.double(), e, rtol=near, atol=near)
            assert a.shape[0] != 7 or not a[5:].any()


def test_softcap_with_a_padded_vocabulary(route):
    """A cap lifts -inf to -cap: closed classes take part again, in the plain formula as here."""
    x, w, b, y = made(9, 4), made(7, 4, seed=2), made(7, seed=3), labels(9, classes=5)
    with torch.no_grad():
        b[5:] = -torch.inf
    for options in each({}, {"z_loss": 0.5}, {"label_smoothing": 0.2}):
        got = linear_cross_entropy(x, w, y, b, softcap=3.0, **options)
        torch.testing.assert_close(got, plain(F.linear(x, w, b), y, softcap=3.0, **options).loss, **TIGHT)
        gx, gw, gb = grads(got, (x, w, b))
        assert gx.isfinite().all()
        assert not gw[5:].any()
        assert not gb[5:].any()


@pytest.mark.parametrize("value", [7, 100, -1, -99, 2**40])
def test_a_target_out_of_range_is_an_index_error_with_the_value(value):
    x, w, y = made(9, 4), made(7, 4, seed=2), labels(9, classes=7, ignored=0.3)
    y[2] = value
    for call in (lambda: linear_cross_entropy(x, w, y), lambda: cross_entropy(made(9, 7), y, inplace=True)):
        with pytest.raises(IndexError, match=rf"target {value} is out of range for 7 classes .*ignore_index=-100"):
            call()
    with pytest.raises(IndexError, match="target -100 is out of range"):
        linear_cross_entropy(x, w, torch.full((9,), -100), ignore_index=0)


@pytest.mark.parametrize("value", [7, 100, -1, -99, 2**40])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_target_out_of_range_is_never_finite_where_nobody_looks(monkeypatch, value, reduction):
    monkeypatch.setattr(losses, "_reads_values", lambda device: False)
    x, w, b, y = made(9, 4), made(7, 4, seed=2), made(7, seed=3), labels(9, classes=7, ignored=0.3)
    y[2] = value
    cw = torch.rand(7)
    for options in each({}, {"class_weight": cw}, {"label_smoothing": 0.1, "softcap": 4.0}):
        loss = linear_cross_entropy(x, w, y, b, reduction=reduction, **options)
        assert (loss[2] if reduction == "none" else loss).isnan()
        gx, gw, gb = grads(loss.sum(), (x, w, b))
        assert gx[2].isnan().all()
        assert gw.isnan().all()
        assert gb.isnan().all()
        assert gx[y == -100].eq(0).all()


def test_ignore_index_may_be_a_class(route):
    x, w, y = made(9, 4), made(7, 4, seed=2), labels(9, classes=7)
    got = linear_cross_entropy(x, w, y, ignore_index=3)
    torch.testing.assert_close(got, F.cross_entropy(F.linear(x, w), y, ignore_index=3), **TIGHT)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_any_integer_target(dtype):
    x, w, y = made(9, 4), made(7, 4, seed=2), labels(9, classes=7)
    torch.testing.assert_close(linear_cross_entropy(x, w, y.to(dtype)), linear_cross_entropy(x, w, y))


def test_a_wide_vocabulary_needs_more_than_a_small_integer():
    """An int8 target that wraps is negative, hence refused, unless it is ignore_index."""
    with pytest.raises(IndexError, match="target -56"):
        linear_cross_entropy(made(1, 4), made(300, 4, seed=2), torch.tensor([200]).to(torch.int8))


# Autograd ----


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_second_backward_raises_unless_retained_and_then_is_right(route, reduction):
    x, w, b, y = made(9, 4), made(7, 4, seed=2), made(7, seed=3), labels(9, classes=7, ignored=0.2)
    want = F.cross_entropy(F.linear(x, w, b), y, reduction=reduction)
    first, second, third = (made(*want.shape, seed=s, grad=False) for s in (4, 5, 6))
    loss = linear_cross_entropy(x, w, y, b, reduction=reduction)
    for upstream in (first, second, third):
        expected = grads(want, (x, w, b), upstream, retain_graph=True)
        got = grads(loss, (x, w, b), upstream, retain_graph=upstream is not third)
        for a, e in zip(got, expected, strict=True):
            torch.testing.assert_close(a, e, **TIGHT)
    with pytest.raises(RuntimeError, match="second time"):
        grads(loss, (x, w, b), third)


def test_retained_backwards_accumulate_in_grad_without_touching_each_other():
    x, w, y = made(9, 4), made(7, 4, seed=2), labels(9, classes=7)
    loss = linear_cross_entropy(x, w, y)
    (e,) = grads(F.cross_entropy(F.linear(x, w), y), [w])
    loss.backward(retain_graph=True)
    assert w.grad is not None
    w.grad.mul_(100)
    loss.backward()
    torch.testing.assert_close(w.grad, 101 * e, **TIGHT)


def test_gradients_one_operand_at_a_time():
    x, w, b, y = made(9, 4), made(7, 4, seed=2), made(7, seed=3), labels(9, classes=7)
    expected = grads(F.cross_entropy(F.linear(x, w, b), y), (x, w, b))
    loss = linear_cross_entropy(x, w, y, b)
    for tensor, e in zip((x, w, b), expected, strict=True):
        torch.testing.assert_close(grads(loss, [tensor], retain_graph=True)[0], e, **TIGHT)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("inplace", [False, True])
def test_cross_entropy_of_logits_twice(reduction, inplace):
    z, y = made(9, 7), labels(9, classes=7, ignored=0.2)
    want = F.cross_entropy(z.detach().clone(), y, reduction=reduction)
    upstream = made(*want.shape, seed=4, grad=False)
    e = grads(F.cross_entropy(z, y, reduction=reduction), [z], upstream)[0]
    loss = cross_entropy(z, y, reduction=reduction, inplace=inplace)
    a = grads(loss, [z], upstream, retain_graph=True)[0].clone()
    torch.testing.assert_close(a, e, **TIGHT)
    if inplace:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            grads(loss, [z], upstream)
    else:
        torch.testing.assert_close(grads(loss, [z], upstream)[0], e, **TIGHT)


def test_create_graph_raises_rather_than_lose_a_term():
    x, w, y = made(9, 4), made(7, 4, seed=2), labels(9, classes=7)
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(x, w, y, reduction=reduction).sum()
        with pytest.raises(RuntimeError, match=r"create_graph.*gradient penalties"):
            grads(loss, [x], create_graph=True)
        with pytest.raises(RuntimeError, match="create_graph"):
            linear_cross_entropy(x, w, y, reduction=reduction).sum().backward(create_graph=True)
    z = made(9, 7)
    with pytest.raises(RuntimeError, match="create_graph"):
        grads(cross_entropy(z, y), [z], create_graph=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch.autograd.forward_ad's own
def test_forward_mode_and_functional_transforms_raise():
    x, w, y = made(9, 4, grad=False), made(7, 4, seed=2, grad=False), labels(9, classes=7)
    with pytest.raises((RuntimeError, NotImplementedError)), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        linear_cross_entropy(dual, w, y)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: linear_cross_entropy(x, w, y))(x)
    with pytest.raises(RuntimeError):
        torch.func.vmap(lambda x, y: linear_cross_entropy(x, w, y))(x.unsqueeze(1), y.unsqueeze(1))


def test_batched_upstream_gradients_raise():
    x, w, y = made(9, 4), made(7, 4, seed=2), labels(9, classes=7)
    for loss in (linear_cross_entropy(x, w, y), linear_cross_entropy(x, w, y, reduction="none")):
        with pytest.raises(RuntimeError):
            grads(loss, [w], torch.ones(3, *loss.shape, dtype=loss.dtype), is_grads_batched=True)
    z = made(9, 7)
    with pytest.raises(RuntimeError):
        grads(cross_entropy(z, y, inplace=True), [z], torch.ones(3, dtype=z.dtype), is_grads_batched=True)


def test_an_edit_between_forward_and_backward_is_harmless_or_an_error():
    x, w, y = made(9, 4), made(7, 4, seed=2), labels(9, classes=7)
    expected = grads(F.cross_entropy(F.linear(x, w), y), (x, w))
    loss = linear_cross_entropy(x, w, y)
    y_was = y.clone()
    with torch.no_grad():
        w.mul_(2)
    y.zero_()
    for a, e in zip(grads(loss, (x, w), retain_graph=True), expected, strict=True):
        torch.testing.assert_close(a, e, **TIGHT)  # made before the edit
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grads(loss, (x, w))
    y.copy_(y_was)
    for edited in ("target", "token_weight", "class_weight"):
        tensors: dict[str, Any] = {"target": y.clone(), "token_weight": torch.rand(9), "class_weight": torch.rand(7)}
        loss = linear_cross_entropy(x, w, reduction="none", **tensors)
        tensors[edited].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            grads(loss.sum(), (x, w))


def test_inplace_is_seen_by_whoever_saved_the_logits():
    x, y = made(9, 7), labels(9, classes=7)
    z = x.exp()  # its backward needs its output
    loss = cross_entropy(z, y, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    z = x * 2
    loss = cross_entropy(z, y, inplace=True)
    with torch.no_grad():
        z.zero_()  # the gradient was here
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inplace_writes_over_the_logits_and_allocates_no_other():
    x, w, y = made(64, 4), made(50, 4, seed=2), labels(64, classes=50, ignored=0.2)
    want = grads(F.cross_entropy(F.linear(x, w), y), (x, w))
    z = F.linear(x, w)
    data = z.data_ptr()
    with Ops() as ops:
        loss = cross_entropy(z, y, inplace=True)
    assert (64, 50) not in {shape for name, shape in ops.calls if name in ("empty", "zeros", "clone")}
    assert z.data_ptr() == data
    torch.testing.assert_close(
        z.detach(),
        (F.linear(x, w).softmax(-1) - F.one_hot(y.clamp(min=0), 50)).detach()
        * (y != -100).unsqueeze(1)
        / (y != -100).sum(),
        **TIGHT,
    )
    for a, e in zip(grads(loss, (x, w)), want, strict=True):
        torch.testing.assert_close(a, e, **TIGHT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inplace_in_low_precision(dtype):
    z, y = made(40, 50, dtype=dtype), labels(40, classes=50, ignored=0.2)
    exact = z.detach().double().requires_grad_()
    (e,) = grads(3 * F.cross_entropy(exact, y), [exact])
    (a,) = grads(3 * cross_entropy(z, y, inplace=True), [z])
    assert a.dtype == dtype
    torch.testing.assert_close(a.double(), e, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_checkpointing_and_two_losses_on_one_hidden_state():
    x, w, y = made(9, 4), made(7, 4, seed=2), labels(9, classes=7)
    z = F.linear(x.tanh(), w)
    want = grads(F.cross_entropy(z, y) + 2 * F.cross_entropy(z, y.flip(0)), (x, w))

    def head(h):
        return linear_cross_entropy(h, w, y) + 2 * linear_cross_entropy(h, w, y.flip(0))

    for reentrant in (False, True):
        loss = checkpoint(lambda x: head(x.tanh()), x, use_reentrant=reentrant)
        if reentrant:
            x.grad = w.grad = None
            loss.backward()
            got = (x.grad, w.grad)
        else:
            got = grads(loss, (x, w))
        for a, e in zip(got, want, strict=True):
            torch.testing.assert_close(a, e, **TIGHT)


# Layouts, dtypes, devices ----


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_layouts(route, reduction):
    """Expanded, transposed, sliced, with steps, 0-d tokens, many leading dimensions."""
    base = made(6, 5, 4)
    w, b = made(4, 9, seed=2), made(18, seed=3)
    cases = [
        (base.transpose(0, 1), w.t(), None, (5, 6)),
        (base[:, :-1], w.t(), b[::2], (6, 4)),
        (base[::2, 1::2], w.t(), b[::2], (3, 2)),
        (base[:1].expand(3, 5, 4), w.t(), b[:1].expand(9), (3, 5)),
        (base[0, 0], w.t(), None, ()),
        (base[0, :1], w[:, :1].expand(4, 9).t(), None, (1,)),
        (base.reshape(2, 3, 5, 4).permute(2, 0, 1, 3), w.t(), None, (5, 2, 3)),
        (base.permute(2, 1, 0)[..., :4], w.t(), None, (4, 5)),
    ]
    for x, weight, bias, lead in cases:
        y = labels(*lead, classes=9)
        target = y.expand_as(y) if y.dim() < 2 else y.t().contiguous().t() if y.dim() == 2 else y
        got = linear_cross_entropy(x, weight, target, bias, reduction=reduction)
        z = F.linear(x, weight, bias)
        want = F.cross_entropy(z.reshape(-1, 9), y.reshape(-1), reduction=reduction)
        want = want.reshape(lead) if reduction == "none" else want
        torch.testing.assert_close(got, want, **TIGHT)
        upstream = made(*want.shape, seed=4, grad=False)
        inputs = [base, w] + ([b] if bias is not None else [])
        expected = grads(want, inputs, upstream)
        for a, e in zip(grads(got, inputs, upstream), expected, strict=True):
            torch.testing.assert_close(a, e, **TIGHT)
        wide = F.linear(base, w.t())[:, :-1]  # the shifted logits of a language model: not one matrix in memory
        got = cross_entropy(wide, labels(6, 4, classes=9), reduction=reduction)
        want = F.cross_entropy(wide.reshape(-1, 9), labels(6, 4, classes=9).reshape(-1), reduction=reduction)
        torch.testing.assert_close(got.reshape(-1), want.reshape(-1), **TIGHT)


def test_strided_target_and_probabilities():
    x, w = made(8, 4), made(7, 4, seed=2)
    y = labels(16, classes=7)[::2]
    torch.testing.assert_close(linear_cross_entropy(x, w, y), F.cross_entropy(F.linear(x, w), y), **TIGHT)
    q = made(7, 8, seed=3, grad=False).softmax(0).t()
    torch.testing.assert_close(linear_cross_entropy(x, w, q), F.cross_entropy(F.linear(x, w), q), **TIGHT)
    one = q[:1].expand(8, 7)
    torch.testing.assert_close(linear_cross_entropy(x, w, one), F.cross_entropy(F.linear(x, w), one), **TIGHT)


def test_inplace_of_a_column_slice():
    wide = made(9, 12)
    y = labels(9, classes=7)
    (e,) = grads(F.cross_entropy(wide[:, :7], y), [wide])
    copy_ = wide.detach().clone().requires_grad_()
    z = copy_ * 1
    (a,) = grads(cross_entropy(z[:, :7], y, inplace=True), [copy_])
    torch.testing.assert_close(a, e, **TIGHT)
    assert torch.equal(z[:, 7:], copy_[:, 7:])


def test_tied_embedding_and_head():
    emb = torch.nn.Embedding(11, 4, dtype=torch.float64)
    ids, y = labels(3, 6, classes=11, seed=3), labels(3, 6, classes=11, ignored=0.2)
    results = []
    for loss in (
        lambda h: linear_cross_entropy(h.tanh(), emb.weight, y),
        lambda h: F.cross_entropy(F.linear(h.tanh(), emb.weight).flatten(0, 1), y.flatten()),
    ):
        emb.zero_grad()
        loss(emb(ids)).backward()
        assert emb.weight.grad is not None
        results.append(emb.weight.grad)
    torch.testing.assert_close(*results, **TIGHT)
    w = made(6, 6)
    y = labels(6, classes=6)
    (a,) = grads(linear_cross_entropy(w, w, y), [w])  # one tensor as both
    torch.testing.assert_close(a, grads(F.cross_entropy(F.linear(w, w), y), [w])[0], **TIGHT)


KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize(
    "kinds", list(itertools.product(KINDS, repeat=3)), ids=lambda k: "-".join(str(d)[6:] for d in k)
)
@pytest.mark.parametrize("autocast", [False, True])
def test_every_mix_of_dtypes_with_and_without_autocast(kinds, autocast):
    x, w, b = (made(*s, seed=i, dtype=k) for i, (s, k) in enumerate(zip(((16, 8), (20, 8), (20,)), kinds, strict=True)))
    y = labels(16, classes=20, ignored=0.2)
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    want = F.cross_entropy(F.linear(*exact), y, label_smoothing=0.1)
    results = []
    for reduction in ("mean", "none"):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got = linear_cross_entropy(x, w, y, b, reduction=reduction, label_smoothing=0.1)
        results.append(got if reduction == "mean" else got.sum() / (y != -100).sum())
    for got in results:
        assert got.dtype == (torch.float64 if torch.float64 in kinds else torch.float32)
        # Not the precision of autocast but that of the operands: the tiles are float32 either way.
        torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=0)
        for tensor, a, e in zip((x, w, b), grads(got, (x, w, b)), grads(want, exact, retain_graph=True), strict=True):
            assert a.dtype == tensor.dtype
            torch.testing.assert_close(a.double(), e, rtol=2 * torch.finfo(a.dtype).eps + 1e-5, atol=1e-6)


@pytest.mark.parametrize("v", [1, 2, 3, 15, 17, 127, 1001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_vocabulary_size(v, dtype):
    """The softmax is written over its own input: its vector width must not show."""
    x, w, y = made(33, 5, dtype=dtype), made(v, 5, seed=2, dtype=dtype), labels(33, classes=v)
    want = F.cross_entropy(F.linear(x, w).double(), y)
    got = linear_cross_entropy(x, w, y)
    near: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else TIGHT
    torch.testing.assert_close(got.double(), want, **near)
    for a, e in zip(grads(got, (x, w)), grads(want, (x, w)), strict=True):
        torch.testing.assert_close(a, e, **near)


@pytest.mark.parametrize("block", [1, 7, 64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_classifier_converted_in_pieces(monkeypatch, block, with_bias):
    x, w, y = made(12, 4, dtype=torch.bfloat16), made(9, 4, seed=2, dtype=torch.bfloat16), labels(12, classes=9)
    b = made(9, seed=3, dtype=torch.bfloat16) if with_bias else None
    whole = linear_cross_entropy(x, w, y, b)
    monkeypatch.setattr(losses, "_BLOCK_NUMEL", block)
    pieces = linear_cross_entropy(x, w, y, b)
    torch.testing.assert_close(pieces, whole)
    for a, e in zip(grads(pieces, (x, w, b)), grads(whole, (x, w, b)), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda(dtype):
    x, w, b = (
        made(*s, seed=i, dtype=dtype).detach().cuda().requires_grad_()
        for i, s in enumerate(((64, 32), (99, 32), (99,)))
    )
    y = labels(64, classes=99, ignored=0.2).cuda()
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    want, got = F.cross_entropy(F.linear(*exact), y), linear_cross_entropy(x, w, y, b, chunk_rows=16)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=0)
    for a, e in zip(grads(got, (x, w, b)), grads(want, exact), strict=True):
        assert ((a.double() - e).norm() / e.norm()).item() < 4 * torch.finfo(dtype).eps + 1e-3


# torch.compile ----


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"softcap": 4.0, "z_loss": 0.1, "label_smoothing": 0.1}], ids=str)
def test_compile_equals_eager_without_a_graph_break(reduction, options):
    torch._dynamo.reset()
    x, w, b, y = made(2, 9, 4), made(7, 4, seed=2), made(7, seed=3), labels(2, 9, classes=7, ignored=0.2)
    tw = torch.rand(2, 9, dtype=torch.float64)

    def loss(x, w, b, y):
        h = x.tanh()
        out = linear_cross_entropy(h, w, y, b, reduction=reduction, token_weight=tw, return_stats=True, **options)
        return out.loss, out.logsumexp, out.hits, out.z_loss, cross_entropy(F.linear(h, w), y, reduction=reduction)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    got, want = compiled(x, w, b, y), loss(x, w, b, y)
    for a, e in zip(got, want, strict=True):
        torch.testing.assert_close(a, e, equal_nan=True, **TIGHT)
    assert not any(s.requires_grad for s in got[1:4])
    for i in (0, 4):
        upstream = made(*want[i].shape, seed=4, grad=False)
        inputs = (x, w, b) if i == 0 else (x, w)
        for a, e in zip(
            grads(got[i], inputs, upstream, retain_graph=True),
            grads(want[i], inputs, upstream, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(a, e, **TIGHT)
    w.requires_grad_(False)
    got, want = compiled(x, w, b, y)[0], loss(x, w, b, y)[0]
    for a, e in zip(grads(got.sum(), (x, b)), grads(want.sum(), (x, b)), strict=True):
        torch.testing.assert_close(a, e, **TIGHT)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, w, b, y)[0], loss(x, w, b, y)[0], **TIGHT)
    x2, y2 = made(3, 11, 4, seed=8), labels(3, 11, classes=7, seed=9)
    tw = torch.rand(3, 11, dtype=torch.float64)
    torch.testing.assert_close(compiled(x2, w, b, y2)[0], loss(x2, w, b, y2)[0], **TIGHT)


def test_compiled_modules_with_parameters_and_autocast():
    torch._dynamo.reset()
    embedding, head = torch.nn.Embedding(11, 4), torch.nn.Linear(4, 11)
    module = FusedLinearCrossEntropy(z_loss=1e-3)
    y = labels(3, 6, classes=11, ignored=0.3)

    def loss(ids):
        return module(embedding(ids).tanh(), head.weight, y, head.bias)

    ids, parameters = y.clamp(min=0), [embedding.weight, *head.parameters()]
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got, want = torch.compile(loss, backend="aot_eager", fullgraph=True)(ids), loss(ids)
        torch.testing.assert_close(got, want)
        for a, e in zip(grads(got, parameters), grads(want, parameters), strict=True):
            torch.testing.assert_close(a, e)


def test_compile_in_low_precision_and_errors():
    torch._dynamo.reset()
    x, w, y = made(9, 4, dtype=torch.bfloat16), made(7, 4, seed=2, dtype=torch.bfloat16), labels(9, classes=7)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    got, want = compiled(x, w, y), linear_cross_entropy(x, w, y)
    torch.testing.assert_close(got, want)
    for a, e in zip(grads(got, (x, w)), grads(want, (x, w)), strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a, e)
    with pytest.raises(IndexError, match="target 7"):
        compiled(x, w, torch.full((9,), 7))
    with pytest.raises(Exception, match=r"inplace=True cannot be used under torch\.compile"):
        torch.compile(lambda z: cross_entropy(z, y, inplace=True), backend="aot_eager", fullgraph=True)(made(9, 7))
    loss = compiled(x, w, y)
    with pytest.raises(RuntimeError):
        grads(loss, [x], create_graph=True)[0].sum().backward()


def test_the_operators_keep_torchs_contract():
    x, w, b, y = made(9, 4), made(7, 4, seed=2), made(7, seed=3), labels(9, classes=7)
    shared = (x, w, b, y, None, torch.rand(9), None)
    numbers = (-100, 0.1, 4.0, 0.1, None)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    for needs in ([True, True, True], [True, False, True], [False] * 3):
        torch.library.opcheck(losses._compiled, (*shared, "sum", *numbers, True, needs), test_utils=tests)
    torch.library.opcheck(losses._compiled, (*shared, "none", *numbers, False, [False] * 3), test_utils=tests)
    args = [t.detach() if isinstance(t, Tensor) else t for t in shared]
    torch.library.opcheck(
        losses._compiled_backward,
        (made(9, grad=False), *args, "none", *numbers, [True, True, False]),
        test_utils=tests[:2],
    )


# Refusals ----

X, W, Y = torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(4, dtype=torch.long)
REFUSED: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "hidden must be a tensor, got list", {"hidden": [1.0]}),
    (TypeError, "weight must be a dense tensor of .* got torch.int64", {"weight": W.long()}),
    (TypeError, "hidden must be a dense tensor of .* got torch.complex64", {"hidden": X.to(torch.complex64)}),
    (TypeError, "weight must be a dense .* layout torch.sparse_coo", {"weight": W.to_sparse()}),
    (TypeError, "hidden must be .* got torch.float8_e4m3fn", {"hidden": X.to(torch.float8_e4m3fn)}),
    (TypeError, "token_weight must be a dense real tensor, got torch.complex64", {"token_weight": X[:, 0] * 1j}),
    (TypeError, "target must be a dense real tensor", {"target": Y.to_sparse()}),
    (TypeError, "target must be a tensor, got list", {"target": [0, 0, 0, 0]}),
    (TypeError, "target must hold class indices .*torch.bool", {"target": Y.bool()}),
    (ValueError, r"weight must be \(V, 3\) .*\(0, 3\) \(an empty or flat shard", {"weight": torch.zeros(0, 3)}),
    (ValueError, r"weight must be \(V, 3\) .*\(15,\)", {"weight": W.flatten()}),
    (ValueError, r"weight must be \(V, 3\) .*\(5, 4\)", {"weight": torch.zeros(5, 4)}),
    (ValueError, r"hidden must have at least one feature .*\(4, 0\)", {"hidden": X[:, :0], "weight": W[:, :0]}),
    (ValueError, r"hidden must have at least one feature .*\(\)", {"hidden": torch.tensor(1.0)}),
    (ValueError, r"target must have shape \(4,\), got \(3,\)", {"target": Y[:3]}),
    (ValueError, r"target must have shape \(4,\), got \(4, 1\)", {"target": Y.unsqueeze(1)}),
    (ValueError, r"target must have shape \(4, 5\), got \(4,\)", {"target": Y.float()}),
    (ValueError, r"bias must have shape \(5,\), got \(1,\)", {"bias": torch.zeros(1)}),
    (ValueError, r"class_weight must have shape \(5,\), got \(4,\)", {"class_weight": torch.zeros(4)}),
    (ValueError, r"token_weight must have shape \(4,\), got \(4, 1\)", {"token_weight": torch.zeros(4, 1)}),
    (TypeError, "token_weight must be a tensor, got float", {"token_weight": 1.0}),
    (ValueError, r"denominator must have shape \(\), got \(1,\)", {"denominator": torch.ones(1)}),
    (ValueError, "denominator needs reduction=\"mean\", got 'sum'", {"denominator": 3, "reduction": "sum"}),
    (ValueError, "reduction must be .* got 'batchmean'", {"reduction": "batchmean"}),
    (ValueError, r"label_smoothing must be in \[0, 1\], got 1.5", {"label_smoothing": 1.5}),
    (ValueError, "label_smoothing must be .* got nan", {"label_smoothing": float("nan")}),
    (ValueError, "softcap must be positive and finite .* got 0.0", {"softcap": 0.0}),
    (ValueError, "softcap must be positive and finite .* got inf", {"softcap": float("inf")}),
    (ValueError, "z_loss must be finite, got nan", {"z_loss": float("nan")}),
    (ValueError, "chunk_rows must be at least 1 .* got 0", {"chunk_rows": 0}),
    (ValueError, "ignore_index=0 has no meaning for probabilities", {"target": torch.zeros(4, 5), "ignore_index": 0}),
    (ValueError, "weight is on meta, hidden on cpu", {"weight": W.to("meta")}),
    (RuntimeError, "target requires grad", {"target": torch.zeros(4, 5, requires_grad=True)}),
    (RuntimeError, "class_weight requires grad", {"class_weight": torch.ones(5, requires_grad=True)}),
    (RuntimeError, "token_weight requires grad", {"token_weight": torch.ones(4, requires_grad=True)}),
    (RuntimeError, "denominator requires grad", {"denominator": torch.ones((), requires_grad=True)}),
]


@pytest.mark.parametrize("kind, message, options", REFUSED, ids=[m for _, m, _ in REFUSED])
def test_refused_with_words(kind, message, options):
    arguments: dict[str, Any] = {"hidden": X, "weight": W, "target": Y} | options
    with pytest.raises(kind, match=message):
        linear_cross_entropy(**arguments)


def test_inplace_refusals():
    y = labels(4, classes=5)
    for z, message in (
        (torch.zeros(4, 5, dtype=torch.float16), "float16, where gradients underflow"),
        (torch.zeros(5).expand(4, 5), "cannot write to expanded logits"),
        (torch.zeros(4, 1).expand(4, 5), "cannot write to expanded logits"),
        (torch.zeros(2, 3, 5)[:, :-1], "one matrix in memory"),
    ):
        with pytest.raises(ValueError, match=message):
            cross_entropy(z, y.view(z.shape[:-1]), inplace=True)


def test_a_dtensor_is_refused(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        w, x = (distribute_tensor(t, mesh, [Shard(0)]) for t in (W, X))
        with pytest.raises(TypeError, match=r"weight is a DTensor.*full_tensor"):
            linear_cross_entropy(X, w, Y)
        with pytest.raises(TypeError, match="hidden is a DTensor"):
            linear_cross_entropy(x, W, Y)
        with pytest.raises(TypeError, match="logits is a DTensor"):
            cross_entropy(x, Y)
    finally:
        dist.destroy_process_group()


def test_the_module_is_the_function():
    x, w, b, y = made(2, 6, 4), made(7, 4, seed=2), made(7, seed=3), labels(2, 6, classes=7, ignored=0.2)
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 5.0, "reduction": "mean"}
    cw, tw = torch.rand(7), torch.rand(2, 6)
    module = FusedLinearCrossEntropy(class_weight=cw, **options)
    want = linear_cross_entropy(x, w, y, b, class_weight=cw, token_weight=tw, denominator=5.0, **options)
    assert torch.equal(copy.deepcopy(module)(x, w, y, b, token_weight=tw, denominator=5.0), want)
    assert module.state_dict() == {}
    assert [name for name, _ in module.named_buffers()] == ["class_weight"]
    assert "softcap=5.0" in repr(module)
    assert isinstance(FusedLinearCrossEntropy(return_stats=True)(x, w, y), LossStats)


# An hour of trying to make it finite and wrong ----


def test_a_zero_denominator_is_never_finite(route):
    x, w, y = made(5, 4), made(7, 4, seed=2), labels(5, classes=7)
    for zero in (0, 0.0, torch.tensor(0)):
        assert not linear_cross_entropy(x, w, y, denominator=zero).isfinite()
        assert not grads(linear_cross_entropy(x, w, y, denominator=zero), (x, w))[1].isfinite().any()
    assert not linear_cross_entropy(x, w, y, class_weight=torch.zeros(7)).isfinite()


def test_class_weight_of_an_ignored_target_does_not_count(route):
    x, w, y = made(6, 4), made(3, 4, seed=2), torch.tensor([0, 1, -100, 2, -100, 1])
    cw = torch.tensor([1e6, 2.0, 3.0], dtype=torch.float64)
    want = F.cross_entropy(F.linear(x, w), y, weight=cw)
    torch.testing.assert_close(linear_cross_entropy(x, w, y, class_weight=cw), want, **TIGHT)


def test_probabilities_that_do_not_sum_to_one_or_are_onehot(route):
    x, w, y = made(6, 4), made(5, 4, seed=2), labels(6, classes=5)
    for q in (3 * torch.rand(6, 5, dtype=torch.float64), -torch.rand(6, 5, dtype=torch.float64), torch.zeros(6, 5)):
        want, got = F.cross_entropy(F.linear(x, w), q.double()), linear_cross_entropy(x, w, q)
        torch.testing.assert_close(got, want, **TIGHT)
        for a, e in zip(grads(got, (x, w)), grads(want, (x, w)), strict=True):
            torch.testing.assert_close(a, e, **TIGHT)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        got = linear_cross_entropy(x, w, F.one_hot(y, 5).to(dtype))
        torch.testing.assert_close(got, linear_cross_entropy(x, w, y), **TIGHT)


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e30])
def test_extreme_logits_in_float32(route, scale):
    z = made(8, 30, dtype=torch.float32).detach() * scale
    y = labels(8, classes=30)
    for options in each({}, {"z_loss": 1e-9}, {"label_smoothing": 0.1}, {"softcap": 20.0, "z_loss": 1e-2}):
        a, e = z.clone().requires_grad_(), z.double().requires_grad_()
        got, want = cross_entropy(a, y, **options), plain(e, y, **options).loss
        torch.testing.assert_close(
            got.double(), want if want < 3e38 else torch.full_like(want, torch.inf), rtol=1e-5, atol=0
        )
        g, h = grads(got, [a])[0], grads(want, [e])[0]
        if h.abs().max() < 3e38 and got.isfinite():
            torch.testing.assert_close(g.double(), h, rtol=1e-4, atol=1e-6 * max(1.0, h.abs().max().item()))


def test_equal_logits_and_ties(route):
    z, y = torch.zeros(4, 6, requires_grad=True), torch.tensor([0, 3, 5, 0])
    result = cross_entropy(z, y, return_stats=True, reduction="sum")
    torch.testing.assert_close(result.loss, torch.tensor(4 * 1.791759469228055))
    assert result.hits.tolist() == [True, False, False, True]  # argmax takes the first
    one = cross_entropy(torch.full((3, 1), 7.0), torch.zeros(3, dtype=torch.long), return_stats=True)
    assert (one.loss.item(), one.logsumexp.tolist(), one.hits.all().item()) == (0.0, [7.0] * 3, True)


def test_all_classes_closed_is_nan(route):
    z = torch.full((2, 3), -torch.inf)
    assert cross_entropy(z, torch.tensor([0, 1])).isnan()
    open_elsewhere = torch.tensor([[0.0, -torch.inf, 1.0]])
    assert cross_entropy(open_elsewhere, torch.tensor([1])).item() == torch.inf


def test_upstream_gradients_of_every_kind(route):
    x, w, y = made(6, 4), made(5, 4, seed=2), labels(6, classes=5, ignored=0.3)
    want = F.cross_entropy(F.linear(x, w), y, reduction="none")
    for upstream in (
        torch.zeros(6, dtype=torch.float64),
        torch.tensor(2.0, dtype=torch.float64).expand(6),
        made(12, seed=4, grad=False)[::2],
        torch.tensor([0.0, -3.0, 1e30, 0.0, 1e-30, 1.0], dtype=torch.float64),
    ):
        got = linear_cross_entropy(x, w, y, reduction="none")
        expected = grads(want, (x, w), upstream, retain_graph=True)
        for a, e in zip(grads(got, (x, w), upstream), expected, strict=True):
            torch.testing.assert_close(a, e, **TIGHT)
    (part,) = grads(linear_cross_entropy(x, w, y, reduction="none")[2:4].sum(), [x])  # upstream reaches two rows only
    assert not part[[0, 1, 4, 5]].any()
    assert not grads(0.0 * linear_cross_entropy(x, w, y), [w])[0].any()
    assert not grads(-linear_cross_entropy(x, w, y) + linear_cross_entropy(x, w, y), [w])[0].abs().max() > 1e-16


def test_deterministic_mode_and_meta_tensors(route):
    x, w, y = made(6, 4), made(5, 4, seed=2), labels(6, classes=5, ignored=0.3)
    want = linear_cross_entropy(x, w, y)
    torch.use_deterministic_algorithms(True)  # fills empty memory with NaN: what is not written would show
    try:
        got = linear_cross_entropy(x, w, y)
        for a, e in zip(grads(got, (x, w)), grads(want, (x, w)), strict=True):
            assert torch.equal(a, e)
    finally:
        torch.use_deterministic_algorithms(False)
    x, w, y = (t.detach().to("meta").requires_grad_(t.is_floating_point()) for t in (x, w, y))
    for reduction, shape in (("mean", ()), ("none", (6,))):
        loss = linear_cross_entropy(x, w, y, reduction=reduction)
        assert loss.shape == shape
        assert [g.shape for g in grads(loss.sum(), (x, w))] == [x.shape, w.shape]


def test_inference_tensors():
    with torch.inference_mode():
        x, y = made(6, 4, grad=False), labels(6, classes=5)
    w = made(5, 4, seed=2, grad=False)
    assert linear_cross_entropy(x, w, y).isfinite()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        linear_cross_entropy(x, w.requires_grad_(), y)


def test_returned_gradients_share_no_memory():
    x, w, y = made(6, 6), made(6, 6, seed=2), labels(6, classes=6)
    for reduction in ("sum", "none"):
        first = grads(linear_cross_entropy(x, w, y, reduction=reduction).sum(), (x, w))
        second = grads(linear_cross_entropy(x, w, y, reduction=reduction).sum(), (x, w))
        assert len({t.data_ptr() for t in (*first, *second, x, w)}) == 6
    z = made(6, 6)
    (g,) = grads(cross_entropy(z, y), [z])
    assert g.data_ptr() != z.data_ptr()


def test_operands_are_left_alone():
    x, w, b, y = made(6, 4), made(5, 4, seed=2), made(5, seed=3), labels(6, classes=5, ignored=0.3)
    cw, tw, q = torch.rand(5), torch.rand(6), torch.rand(6, 5, dtype=torch.float64)
    denominator = torch.tensor(3.0, dtype=torch.float64)
    tensors = (x, w, b, y, cw, tw, q, denominator)
    before = [t.detach().clone() for t in tensors]
    for target in (y, q):
        for reduction in ("mean", "none"):
            options: dict[str, Any] = {"denominator": denominator} if reduction == "mean" else {}
            loss = linear_cross_entropy(
                x,
                w,
                target,
                b,
                class_weight=cw,
                token_weight=tw,
                reduction=reduction,
                label_smoothing=0.1,
                softcap=2.0,
                z_loss=0.1,
                **options,
            )
            grads(loss.sum(), (x, w, b))
            z = made(6, 5)
            grads(cross_entropy(z, target, class_weight=cw, token_weight=tw, softcap=2.0).sum(), [z])
            assert torch.equal(z, made(6, 5))
    for tensor, was in zip(tensors, before, strict=True):
        assert torch.equal(tensor, was)


def test_a_training_step_with_each_kind_of_token_weight(route):
    x, w, y = made(6, 4), made(5, 4, seed=2), labels(6, classes=5)
    for tw in (torch.tensor([1, 0, 1, 1, 0, 1]), torch.tensor([True, False, True, True, False, True])):
        want = (F.cross_entropy(F.linear(x, w), y, reduction="none") * tw).sum() / 6
        got = linear_cross_entropy(x, w, y, token_weight=tw)
        torch.testing.assert_close(got, want, **TIGHT)
        torch.testing.assert_close(grads(got, [w])[0], grads(want, [w])[0], **TIGHT)


def test_a_step_goes_against_the_gradient():
    x, w, y = made(64, 4, grad=False), made(5, 4, seed=2), labels(64, classes=5)
    start = linear_cross_entropy(x, w, y)
    start.backward()
    assert w.grad is not None
    with torch.no_grad():
        down, up = (linear_cross_entropy(x, w + sign * 0.1 * w.grad, y) for sign in (-1, 1))
    assert down < start < up
