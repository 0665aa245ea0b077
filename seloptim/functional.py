"""The map between raw weights and weights, its derivatives and its inverse, in the symbols of arXiv:2607.09967.

    raw               what Adam moves           weight     what the model uses: weight = map(raw)
    beta > 0          curvature                 e, l       scales of the exponential and of the linear path
    m                 scale inside the exp      n          shift inside the exp

Everything here is pure and elementwise: `e`, `l`, `m`, `n` are numbers or tensors that broadcast to the raw weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

Scale = float | Tensor
Factor = Scale | tuple[Tensor, ...]  # a tuple stands for the product of its one or two parts: a row and a column
# Memory like a tensor's, for a temporary; None where autograd or a compiler is to see that nothing is overwritten.
New = Callable[[Tensor], Tensor] | None
KINDS = ("e", "l", "m", "n")


def sel_forward(
    raw: Tensor,
    e: Scale = 1.0,
    l: Scale = 1.0,
    m: Scale = 1.0,
    n: Scale = 0.0,
    *,
    beta: Scale,
    combine: str = "mismatched",
) -> Tensor:
    """Map raw weights to weights (SymExpLin): linear near zero, exponential away from it.

    ::

        E(a) = (e / beta) * exp(-n) * expm1(beta*m*a)
        mismatched:  weight = sign(raw) * E(|raw|) + (l / beta) * |raw|
        congruent:   weight = sign(raw) * E(|raw|) + (l / beta) * raw

    Differentiable any number of times in every argument but `beta`. At raw = 0 the derivative is e*m*exp(-n)
    (mismatched), the mean of the two one-sided slopes, so that a weight at zero can move.

    Arguments:
        raw: raw weights of any shape, real floating. float16 and bfloat16 are computed in float32.
        e: scale of the exponential path; a number or a tensor that broadcasts to `raw`. Default 1.
        l: scale of the linear path, likewise. Default 1.
        m: scale inside the exponential, likewise. Default 1.
        n: shift inside the exponential, likewise. Default 0.
        beta: curvature, positive: the weight's exponential regime begins near 1/beta.
        combine: "mismatched" (the paper: the linear path carries |raw|) or "congruent".

    Returns:
        The weights, in `raw`'s shape and dtype.

    Raises:
        ValueError: `beta` is not positive, or `combine` is neither name.
        TypeError: `raw` is not real floating.

    Example:
        >>> sel_forward(torch.tensor([-0.2, 0.0, 0.2]), beta=12.5)
        tensor([-0.8786,  0.0000,  0.9106])

    Source: arXiv:2607.09967, Eq. 3.
    """
    dtype = raw.dtype
    raw, e, l, m, n, beta, new = _prepare(raw, e, l, m, n, beta, combine)
    return _map(raw, _over(e, beta), _over(l, beta), _times(beta, m), n, combine=combine, new=new).to(dtype)


def _map(
    raw: Tensor, e: Factor, l: Factor, m: Factor, n: Scale, *, combine: str, new: New, out: Tensor | None = None
) -> Tensor:
    """`sel_forward` for a curvature of 1 (e is e/beta, l is l/beta, m is beta*m), in `out` where there is `new`."""
    owned = new is not None
    # The sign is a constant, +1 at zero: with it |raw| = s*raw has the derivative s, and s*s = 1 keeps zero alive.
    # Without autograd zero needs no sign, but where the linear path carries one: -0.0 stays -0.0.
    s = torch.sign(raw, out=new(raw)) if new and combine == "mismatched" else _sign_one_at_zero(raw)
    a = torch.abs(raw, out=new(raw)) if new else raw * s
    # E(a) = e * exp(-n) * expm1(m*a)
    E = _expm1_of(a, m, new)
    E = torch.mul(E, s, out=E if owned else None)
    E = _scaled(_scaled(E, e, owned), _exp_minus(n), owned)
    # weight = s*E(a) + l * (|raw| or raw)
    if combine == "congruent":
        return _add_scaled(E, raw, l, new, out=out)
    return _add_scaled(E, a if owned else raw.abs(), l, new, owned, out)


def sel_derivatives(
    raw: Tensor,
    e: Scale = 1.0,
    l: Scale = 1.0,
    m: Scale = 1.0,
    n: Scale = 0.0,
    *,
    beta: Scale,
    combine: str = "mismatched",
    kinds: Collection[str] = KINDS,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The elementwise derivatives of `sel_forward`: (d weight / d raw, {kind: d weight / d kind}) for `kinds`.

    ::

        X = expm1(beta*m*|raw|),  s = sign(raw) with sign(0) = 0
        d weight / d raw = e*m*exp(-n)*(X + 1) + s*l/beta    (congruent: + l/beta)
        d weight / d e   = s*exp(-n)*X / beta
        d weight / d l   = |raw| / beta                      (congruent: raw / beta)
        d weight / d m   = e*raw*exp(-n)*(X + 1)
        d weight / d n   = -s*(e/beta)*exp(-n)*X

    A kind that is not asked for costs nothing. The map with e, l, m, beta is that with e/beta, l/beta, beta*m, 1: with
    beta=1.0, whose products are skipped, a caller who holds the scales as factors saves three passes.

    Arguments:
        raw, e, l, m, n, beta, combine: as for `sel_forward`.
        kinds: which of "e", "l", "m", "n" to return.

    Returns:
        The slope and the dict, in `raw`'s shape, float32 for float16 and bfloat16. An entry may be `raw` itself: do not
        write to them.

    Raises:
        ValueError, TypeError: as `sel_forward`.

    Example:
        >>> slope, by = sel_derivatives(torch.tensor([0.0, 0.1]), beta=10.0, kinds=("l",))
        >>> slope, by
        (tensor([1.0000, 2.8183]), {'l': tensor([0.0000, 0.0100])})

    Source: arXiv:2607.09967, the gradients of Eq. 3.
    """
    raw, e, l, m, n, beta, new = _prepare(raw, e, l, m, n, beta, combine)
    owned = new is not None
    shares = dict(
        _shares(None, raw, _times(e, m), _over(l, beta), _times(beta, m), n, combine=combine, kinds=kinds, new=new)
    )
    by: dict[str, Tensor] = {}
    if "n" in kinds:
        # d weight / d n = -s*(e/beta)*exp(-n)*X
        by["n"] = shares["n"] * -_over(e, beta)
    if "e" in kinds:
        by["e"] = _scaled(shares["e"], _over(1.0, beta), owned)
    if "l" in kinds:
        by["l"] = _scaled(shares["l"], _over(1.0, beta), owned and combine == "mismatched")
    if "m" in kinds:
        # d weight / d m = e*raw*exp(-n)*(X + 1)
        by["m"] = _scaled(shares["m"], e, owned)
    return shares["raw"], by


def _shares(
    grad: Tensor | None,
    raw: Tensor,
    em: Factor,
    l: Factor,
    m: Factor,
    n: Scale,
    *,
    combine: str,
    kinds: Collection[str],
    new: New,
    keep: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """grad times the derivatives, for a curvature of 1 (l is l/beta, m is beta*m), with e taken out where it is a factor:

        X = expm1(m*|raw|),  s = sign(raw) with sign(0) = 0
        "e", "n"    grad * s*exp(-n)*X                                          n: per unit of -e
        "l"         grad * |raw|                                                (congruent: grad * raw)
        "m"         grad * raw*exp(-n)*(X + 1)                                  per unit of e
        "raw"       grad * slope = em * grad*exp(-n)*(X + 1) + l * grad*s       (congruent: + l*grad)

    None for grad is 1 everywhere. e and m come as their product: where they are row and column factors, that saves passes,
    and the sums of the shares over rows and columns take e as a vector. Without `keep` a share is good until the next is asked
    for, so that a caller who adds it up at once does so in the cache.
    """
    mismatched, owned = combine == "mismatched", new is not None
    exp_n = _exp_minus(n)
    a = torch.abs(raw, out=new(raw)) if new else raw * _sign_one_at_zero(raw)
    X = _expm1_of(a, m, new)
    # grad*exp(-n)*(X + 1)
    if grad is None:
        slope = _one_plus(X, exp_n)
    else:
        grad_n = _scaled(grad, exp_n, False)
        slope = torch.addcmul(grad_n, grad_n, X, out=new(raw) if new else None)
    signed = None
    if mismatched or "e" in kinds or "n" in kinds:
        signed = torch.sign(raw, out=new(raw)) if new else raw.detach().sign()
        if grad is not None:
            signed = _scaled(signed, grad, owned)
        if "e" in kinds or "n" in kinds:
            share = _scaled(_scaled(X, signed, owned), exp_n, owned)
            yield from ((kind, share) for kind in ("e", "n") if kind in kinds)
    if "l" in kinds:
        path = raw if not mismatched else a if owned else raw.abs()
        yield "l", path if grad is None else _scaled(path, grad, owned and mismatched)
    if "m" in kinds:
        yield "m", torch.mul(slope, raw, out=(new(raw) if keep else X) if new else None)
    slope = _scaled(slope, em, owned)
    if mismatched and signed is not None:
        slope = _add_scaled(slope, signed, l, new, owned)
    else:
        slope = _add_scaled(slope, torch.ones_like(slope) if grad is None else grad, l, new)
    yield "raw", slope


def sel_pullback(
    grad: Tensor,
    raw: Tensor,
    e: Scale = 1.0,
    l: Scale = 1.0,
    m: Scale = 1.0,
    n: Scale = 0.0,
    *,
    beta: Scale,
    combine: str = "mismatched",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Carry the gradient of the weights back to the raw weights and the scales, elementwise.

    ::

        (grad * d weight/d raw, grad * d weight/d e, grad * d weight/d l, grad * d weight/d m, grad * d weight/d n)

    with the derivatives of `sel_forward`. Summing one of the last four to a scale's shape gives that scale's gradient.

    Arguments:
        grad: gradient of the weights, in `raw`'s shape.
        raw, e, l, m, n, beta, combine: as for `sel_forward`.

    Returns:
        (grad_raw, grad_e, grad_l, grad_m, grad_n), each in `raw`'s shape and dtype.

    Raises:
        ValueError, TypeError: as `sel_forward`.

    Example:
        >>> grad_raw, grad_e, *_ = sel_pullback(torch.ones(2), torch.tensor([0.0, 0.1]), beta=10.0)
        >>> grad_raw, grad_e
        (tensor([1.0000, 2.8183]), tensor([0.0000, 0.1718]))

    Source: arXiv:2607.09967, the gradients of Eq. 3.
    """
    slope, by = sel_derivatives(raw, e, l, m, n, beta=beta, combine=combine)
    grad = grad.to(slope.dtype)
    grad_raw, grad_e, grad_l, grad_m, grad_n = ((grad * d).to(raw.dtype) for d in (slope, *(by[k] for k in KINDS)))
    return grad_raw, grad_e, grad_l, grad_m, grad_n


def sel_inverse(
    weight: Tensor,
    e: Scale = 1.0,
    l: Scale = 1.0,
    m: Scale = 1.0,
    n: Scale = 0.0,
    *,
    beta: Scale,
    combine: str = "mismatched",
) -> Tensor:
    """The raw weights that `sel_forward` maps to these weights.

    ::

        sel_forward(sel_inverse(weight, ...), ...) = weight

    By Newton's method in float64, at most 60 iterations. Zero maps to zero. Where both signs of raw reach a weight
    (scales of other signs than the initial ones), the positive raw is taken. Differentiable any number of times.

    Arguments:
        weight: weights of any shape, real floating, finite.
        e, l, m, n, beta, combine: as for `sel_forward`.

    Returns:
        The raw weights, in `weight`'s shape and dtype.

    Raises:
        ValueError: a weight has no inverse (mismatched with e, l, m > 0: negative weights where beta < l*exp(n)/(e*m))
            or is not finite; otherwise as `sel_forward`. The message has the weight and, where that is the reason, the
            least beta that would do.
        TypeError: `weight` is not real floating.

    Example:
        >>> raw = sel_inverse(torch.tensor([-0.5, 0.0, 0.5]), beta=12.5)
        >>> raw
        tensor([-0.1602,  0.0000,  0.1567])
        >>> sel_forward(raw, beta=12.5)
        tensor([-0.5000,  0.0000,  0.5000])

    Source: arXiv:2607.09967, Eq. 3, inverted.
    """
    _validate(weight, beta, combine)
    scales = [
        v if isinstance(v, Tensor) else weight.new_full((), v, dtype=_compute_dtype(weight)) for v in (e, l, m, n)
    ]
    return _Inverse.apply(weight, *scales, beta, combine)  # pyright: ignore[reportReturnType]


def _inverse(
    weight: Tensor,
    e: Scale = 1.0,
    l: Scale = 1.0,
    m: Scale = 1.0,
    n: Scale = 0.0,
    *,
    beta: Scale,
    combine: str = "mismatched",
    previous: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`sel_inverse` that does not raise: (raw, which weights have an inverse), raw being NaN for the others.

    Where both signs of raw reach a weight, the sign of `previous` is taken if it is given.
    """
    _validate(weight, beta, combine)
    with torch.no_grad():
        _, e, l, m, n, beta, _ = _prepare(weight, e, l, m, n, beta, combine)
        # In the dtype of the map, so that l = beta gives a linear coefficient of exactly 1 in both directions.
        coefficients = (_times(_over(e, beta), _exp_minus(n)), _over(l, beta), _times(beta, m))
        ce, cl, bm = (
            torch.as_tensor(v, dtype=torch.float64, device=weight.device).expand(weight.shape) for v in coefficients
        )
        raw, has_inverse = torch.empty_like(weight), torch.empty_like(weight, dtype=torch.bool)
        # Float64 temporaries of a whole embedding are many times its size, and slow: one cache's worth at a time.
        at_once = 1 << (17 if weight.device.type == "cpu" else 24)
        length = weight.shape[0] if weight.ndim else 1
        rows = max(1, at_once * length // max(1, weight.numel()))
        for start in range(0, length, rows):
            part = slice(start, start + rows) if weight.ndim else ()
            sign = None if previous is None else previous[part]
            w = weight[part].to(torch.float64)
            raw[part], has_inverse[part] = _solve(w, ce[part], cl[part], bm[part], sign, combine == "congruent")
        return raw, has_inverse


def _no_inverse_reason(
    weight: Tensor, has_inverse: Tensor, e: Scale, l: Scale, m: Scale, n: Scale, *, beta: Scale, combine: str
) -> str:
    """Say which weight has no inverse, and the least beta that would do when beta is the reason."""
    index = (~has_inverse).nonzero()[0].tolist()
    where = tuple(index)
    value = weight[where].item()
    place = f"weight {value:.6g} at index {index}" if index else f"weight {value:.6g}"
    if not math.isfinite(value):
        return f"{place} is not finite"

    def at(v: Scale) -> Tensor:
        return torch.as_tensor(v, dtype=torch.float64, device=weight.device).expand(weight.shape)

    values = ", ".join(
        f"{k}={at(v)[where].item():.6g}" for k, v in zip(("beta", *KINDS), (beta, e, l, m, n), strict=True)
    )
    reason = f"{place} has no inverse under the {combine} map with {values}"
    # With m > 0 the exponential path points at the weight on one branch, where only a steeper linear path can stop it.
    least = at(l).abs() * at(n).exp() / (at(e) * at(m)).abs()
    least = least[~has_inverse & weight.isfinite() & (at(m) > 0) & (at(e) != 0)]
    if least.numel() and math.isfinite(needed := least.max().item()):
        text = f"{needed:.6g}"
        if float(text) < needed:
            text = f"{needed * (1 + 5e-6):.6g}"
        reason += f"; the least beta that would do is {text}"
    return reason


class _Inverse(torch.autograd.Function):
    """The implicit function theorem: d raw = (d weight - sum over kinds of (d weight / d kind) * d kind) / slope."""

    generate_vmap_rule = False

    @staticmethod
    def forward(weight: Tensor, e: Tensor, l: Tensor, m: Tensor, n: Tensor, beta: Scale, combine: str) -> Tensor:
        raw, has_inverse = _inverse(weight, e, l, m, n, beta=beta, combine=combine)
        if not has_inverse.all():
            raise ValueError(_no_inverse_reason(weight, has_inverse, e, l, m, n, beta=beta, combine=combine))
        return raw

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *scales, ctx.beta, ctx.combine = inputs
        ctx.save_for_backward(output, *scales)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raw, *scales = ctx.saved_tensors
        slope, by = sel_derivatives(raw, *scales, beta=ctx.beta, combine=ctx.combine)
        grad = grads[0] / slope
        to_scales = [(-grad * by[k]).sum_to_size(v.shape).to(v.dtype) for k, v in zip(KINDS, scales, strict=True)]
        return grad.to(raw.dtype), *to_scales, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        def batched(v: Any, dim: int | None, ndim: int) -> Any:
            if not isinstance(v, Tensor) or dim is None:
                return v
            v = v.movedim(dim, 0)
            return v.reshape(v.shape[:1] + (1,) * (ndim + 1 - v.ndim) + v.shape[1:])

        weight = args[0] if in_dims[0] is not None else args[0].expand(info.batch_size, *args[0].shape)
        weight = weight.movedim(in_dims[0] or 0, 0)
        rest = [batched(v, d, weight.ndim - 1) for v, d in zip(args[1:], in_dims[1:], strict=True)]
        return _Inverse.apply(weight, *rest), 0  # pyright: ignore[reportReturnType]


def _solve(
    w: Tensor, ce: Tensor, cl: Tensor, bm: Tensor, previous: Tensor | None, congruent: bool
) -> tuple[Tensor, Tensor]:
    """raw with s*ce*expm1(bm*|raw|) + cl*(|raw| or raw) = w, in float64, and where there is one.

    On the branch s the equation is f(a) = E*expm1(bm*a) + c*a = |w| with a = |raw|, E = sign(w)*s*ce, c = sign(w)*cl,
    times s if congruent. f' runs monotonically from k + c, k = E*bm, to c if bm < 0, else to infinity with k's sign.
    """
    t, sign = w.abs(), w.sign()

    def branch(s: Scale) -> tuple[Tensor, Tensor]:
        return sign * s * ce, sign * cl * s if congruent else sign * cl

    def solvable(E: Tensor, c: Tensor) -> Tensor:
        first, last = E * bm + c, torch.where((bm > 0) & (E != 0), E, c)
        rising = (first >= 0) & (last >= 0) & ((first > 0) | (last > 0))
        # A falling exponential alone is bounded by its coefficient.
        return rising & ~((bm < 0) & (c == 0) & (t >= -E))

    positive, negative = solvable(*branch(1.0)), solvable(*branch(-1.0))
    take_negative = negative & ~positive if previous is None else negative & (~positive | (previous < 0))
    has_inverse = (positive | negative | (w == 0)) & w.isfinite()
    s = 1.0 - 2.0 * take_negative.to(w.dtype)
    E, c = branch(s)
    # Nothing to solve: a = 0 on a line. And without an exponential path (E = 0) its overflow means nothing.
    idle = ~has_inverse | (w == 0)
    E, c, t = E.masked_fill(idle, 0.0), c.masked_fill(idle, 1.0), t.masked_fill(idle, 0.0)
    bm = bm.masked_fill(E == 0, 0.0)

    # Start where the rest of the way is monotone: above the root of a convex f, below the root of a concave one.
    k = E * bm
    k_plus_c = k + c
    ratio = t / E
    exponential = torch.where(ratio.isinf(), t.log() - E.log(), torch.log1p(ratio)) / bm
    tangent, asymptote = t / k_plus_c, (t + E) / c
    growing = torch.where(c >= 0, torch.minimum(exponential, tangent), exponential)
    bounded = torch.where(k >= 0, torch.maximum(tangent, asymptote), torch.minimum(tangent, asymptote))
    a = torch.where(bm > 0, growing, torch.where(c == 0, exponential, bounded))
    a = torch.where(bm == 0, t / c, a)
    for _ in range(60):
        X = torch.expm1(bm * a)
        # step = (f(a) - t) / f'(a)
        step = torch.addcmul(-t, c, a).addcmul_(E, X).div_(torch.addcmul(k_plus_c, k, X)).nan_to_num_(0.0)
        a = torch.where(step < a, a - step, 0.5 * a)
        if not bool((step.abs_() > 1e-14 * a).any()):
            break
    raw = torch.where(w == 0, w, s * a)
    return raw.masked_fill(~has_inverse, math.nan), has_inverse


def _prepare(
    raw: Tensor, e: Scale, l: Scale, m: Scale, n: Scale, beta: Scale, combine: str
) -> tuple[Tensor, Scale, Scale, Scale, Scale, Scale, New]:
    """Everything in the dtype of the computation, and where temporaries come from."""
    _validate(raw, beta, combine)
    dtype = _compute_dtype(raw)
    scales = [v.to(dtype) if isinstance(v, Tensor) else float(v) for v in (e, l, m, n, beta)]
    return raw.to(dtype), *scales, torch.empty_like if _owned(raw, *scales) else None  # pyright: ignore[reportReturnType]


def _owned(raw: Tensor, *others: Scale | None) -> bool:
    """Whether temporaries of raw's shape may be overwritten, by what broadcasts to it."""
    tensors = [v for v in others if isinstance(v, Tensor)]
    return _writable(raw, *tensors) and all(_broadcasts_to(v.shape, raw.shape) for v in tensors)


def _writable(*tensors: Tensor | None) -> bool:
    """Whether results of operations on these may be overwritten.

    Autograd keeps what it needs, torch.func cannot write batched values into unbatched ones, a compiler fuses anyway.
    """
    return not (
        torch.compiler.is_compiling()
        or peek_interpreter_stack() is not None
        or (torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in tensors))
    )


def _broadcasts_to(shape: torch.Size, target: torch.Size) -> bool:
    """Without torch.broadcast_shapes, which takes longer than a small parameter's whole map."""
    return len(shape) <= len(target) and all(
        size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(target), strict=False)
    )


def _validate(raw: Tensor, beta: Scale, combine: str) -> None:
    if not raw.is_floating_point():
        raise TypeError(f"weights must be real and floating, got {raw.dtype}")
    if combine not in ("mismatched", "congruent"):
        raise ValueError(f'combine must be "mismatched" or "congruent", got {combine!r}')
    if not isinstance(beta, Tensor) and not 0 < beta < math.inf:
        raise ValueError(f"beta must be a positive number, got {beta!r}")


def _compute_dtype(raw: Tensor) -> torch.dtype:
    return torch.float32 if raw.dtype in (torch.float16, torch.bfloat16) else raw.dtype


def _sign_one_at_zero(raw: Tensor) -> Tensor:
    return torch.copysign(raw.new_ones(()), raw.detach())


def _over(scale: Scale, beta: Scale) -> Scale:
    """scale / beta, exactly 1 where they are equal."""
    if isinstance(beta, Tensor):
        # number / tensor is a product with the reciprocal
        return (scale if isinstance(scale, Tensor) else beta.new_full((), scale)) / beta
    if beta == 1.0:
        return scale
    if isinstance(scale, Tensor) and scale.device.type != "cpu":
        # and so is tensor / number on an accelerator
        return scale / scale.new_full((), beta)
    return scale / beta


def _exp_minus(n: Scale) -> Scale:
    if isinstance(n, Tensor):
        return torch.exp(-n)
    return 1.0 if n == 0.0 else math.exp(-n) if n > -700 else math.inf


def _times(x: Scale, y: Scale) -> Scale:
    """x * y without a pass for a factor that is the number 1."""
    if not isinstance(x, Tensor) and x == 1.0:
        return y
    return x if not isinstance(y, Tensor) and y == 1.0 else x * y


def _scaled(x: Tensor, factor: Factor, owned: bool) -> Tensor:
    """x * factor, into x if it is owned."""
    if isinstance(factor, tuple):
        for part in factor:
            x = torch.mul(x, part, out=x if owned else None)
        return x
    if not isinstance(factor, Tensor) and factor == 1.0:
        return x
    return torch.mul(x, factor, out=x if owned else None)


def _product(x: Tensor, factor: Factor, new: New) -> Tensor:
    """x * factor, never into x."""
    first, *rest = factor if isinstance(factor, tuple) else (factor,)
    return _scaled(torch.mul(x, first, out=new(x) if new else None), tuple(rest), new is not None)


def _add_scaled(
    x: Tensor, y: Tensor, factor: Factor, new: New, y_owned: bool = False, out: Tensor | None = None
) -> Tensor:
    """x + factor*y, into `out` or x where temporaries may be overwritten; y may then be lost if it is one."""
    out = (x if out is None else out) if new else None
    if isinstance(factor, tuple):
        *first, factor = factor
        if first:
            y = torch.mul(y, first[0], out=y if y_owned else new(x) if new else None)
    if isinstance(factor, Tensor):
        return torch.addcmul(x, y, factor, out=out)
    return torch.add(x, y, alpha=factor, out=out)


def _one_plus(X: Tensor, factor: Scale) -> Tensor:
    """factor * (1 + X) in one pass."""
    if isinstance(factor, Tensor):
        return torch.addcmul(factor, factor, X)
    return X + 1.0 if factor == 1.0 else torch.add(X.new_full((), factor), X, alpha=factor)


def _expm1_of(a: Tensor, factor: Factor, new: New) -> Tensor:
    """expm1(a * factor) with one temporary."""
    x = _product(a, factor, new)
    return torch.expm1(x, out=x if new else None)
