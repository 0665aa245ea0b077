"""The state of one curved parameter, and its step as four stages: pull, (reduce), update, push.

A parameter is seen as a batch of matrices (batch, rows, cols); a lone matrix is a batch of one, a vector of n entries has
n rows and one column. A stage reads and writes only the tensors that it is handed, so that an executor may hand it one
parameter, a stack of equal ones, or a block of rows that fits the cache.

Source: arXiv:2607.09967, sections on the map and its scales; the Adam arithmetic follows torch.optim.Adam operation by
operation, so that the degenerate map (weight = raw) reproduces it bit for bit.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .functional import (
    KINDS,
    New,
    _inverse,
    _map,
    _no_inverse_reason,
    _over,
    _shares,
    _times,
    _writable,
    sel_derivatives,
)

STRUCTURES = ("row_col", "row", "col", "scalar", "none")
VALUES = ("raw", "scale_row", "scale_col", "residual_b", "residual_a")
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class Slot(NamedTuple):
    """One trained tensor and its Adam moments, all of one shape."""

    value: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None  # only under amsgrad


class Views(NamedTuple):
    """The state of a batch of matrices, as the stages see it."""

    raw: Slot  # (batch, rows, cols)
    scale_row: Slot | None  # (batch, rows or 1, kinds)
    scale_col: Slot | None  # (batch, cols, kinds)
    residual_b: Slot | None  # (batch, rows, rank)
    residual_a: Slot | None  # (batch, rank, cols)


class Curve(NamedTuple):
    """What the map of a parameter is, beside its state."""

    beta: float | Tensor  # (batch, 1, 1) in a stack
    combine: str
    learned: tuple[str, ...]  # the kinds of scale that train
    has_n: bool  # False promises n == 0 everywhere, which saves an exponential


class Hyper(NamedTuple):
    """What torch.optim.Adam calls its hyperparameters, read from the group at this step."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    amsgrad: bool
    maximize: bool


class Pulled(NamedTuple):
    """Gradients with respect to the state; factor gradients have the packed shape of their factor."""

    raw: Tensor
    scale_row: Tensor | None
    scale_col: Tensor | None
    residual_b: Tensor | None
    residual_a: Tensor | None


# ---------------------------------------------------------------------------------------------------------- the state


def matrix_shape(shape: torch.Size | tuple[int, ...], batch_dims: int) -> tuple[int, int, int]:
    """(batch, rows, cols) of a parameter: rows = shape[batch_dims], cols = everything behind it."""
    batch, rest = shape[:batch_dims], shape[batch_dims:]
    return math.prod(batch), (rest[0] if rest else 1), math.prod(rest[1:])


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 parameters, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def create_state(
    weight: Tensor,
    *,
    beta: float,
    combine: str,
    structure: str,
    batch_dims: int,
    scale_init: Mapping[str, float],  # kind -> number, in the order of KINDS
    residual_rank: int,
    amsgrad: bool,
    seed: int,
) -> dict[str, Tensor | float]:
    """The state of a parameter whose value is `weight`: raw = inverse(weight), scales at their start, moments zero.

    Raises ValueError where a weight is not finite or has no inverse; the caller knows the parameter's name.
    """
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("non-finite weights; initialise or repair them before the first step")
    dtype = state_dtype(weight.dtype)
    _, rows, cols = matrix_shape(weight.shape, batch_dims)
    lead = tuple(weight.shape[:batch_dims])
    start = torch.tensor([scale_init[kind] for kind in KINDS], dtype=dtype, device=weight.device)
    # On the host whatever the default device is, and never in the default dtype: a bfloat16 counter sticks at 256.
    state: dict[str, Tensor | float] = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}

    vector = weight.dim() - batch_dims < 2
    if structure in ("scalar", "none"):
        state["scale_row"] = start.expand(*lead, 1, len(KINDS)).clone()
    elif vector or structure == "row":
        state["scale_row"] = start.expand(*lead, rows, len(KINDS)).clone()
    elif structure == "col":
        state["scale_col"] = start.expand(*lead, cols, len(KINDS)).clone()
    else:
        state["scale_row"] = start.expand(*lead, rows, len(KINDS)).clone()
        state["scale_col"] = torch.ones((*lead, cols, len(KINDS)), dtype=dtype, device=weight.device)
    if residual_rank:
        # A private generator: creating an optimizer must not move the user's random numbers.
        generator = torch.Generator("cpu").manual_seed(seed)
        shape = (*lead, residual_rank, cols)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") / math.sqrt(cols or 1)
        state["residual_b"] = torch.zeros((*lead, rows, residual_rank), dtype=dtype, device=weight.device)
        state["residual_a"] = noise.to(dtype=dtype, device=weight.device)

    state["raw"] = inverse(weight, scale_init, beta=beta, combine=combine)
    for name in VALUES:
        if name in state:
            for moment in MOMENTS if amsgrad else MOMENTS[:2]:
                key = moment_key(name, moment)
                state[key] = torch.zeros_like(state[name])  # type: ignore[arg-type]
    state["beta"] = beta
    slope, _ = sel_derivatives(state["raw"], *scale_init.values(), beta=beta, combine=combine, kinds=())
    mean_slope = float(slope.abs().mean(dtype=torch.float64))
    state["mean_slope"] = mean_slope if mean_slope > 0 else 1.0  # NaN without elements
    return state


def state_fault(
    state: Mapping[str, Any], shape: torch.Size, batch_dims: int, raw_has_moments: bool = True
) -> str | None:
    """Why a saved state cannot be that of a curved parameter of this shape; None where it can."""
    _, rows, cols = matrix_shape(shape, batch_dims)
    lead = tuple(shape[:batch_dims])
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {"raw": (tuple(shape),)}
    if "scale_row" in state or "scale_col" not in state:
        shapes["scale_row"] = ((*lead, rows, len(KINDS)), (*lead, 1, len(KINDS)))
    if "scale_col" in state:
        shapes["scale_col"] = ((*lead, cols, len(KINDS)),)
    if "residual_b" in state or "residual_a" in state:
        b = state.get("residual_b")
        rank = b.shape[-1] if isinstance(b, Tensor) and b.dim() else 0
        shapes |= {"residual_b": ((*lead, rows, rank),), "residual_a": ((*lead, rank, cols),)}
    for name, allowed in shapes.items():
        reason = tensor_fault(state, name, *allowed)
        for moment in MOMENTS if raw_has_moments or name != "raw" else ():
            key = moment_key(name, moment)
            if not reason and (moment != "max_exp_avg_sq" or key in state):
                reason = tensor_fault(state, key, tuple(state[name].shape))
        if reason:
            return reason
    return (
        number_fault(state, "step")
        or number_fault(state, "beta", positive=True)
        or number_fault(state, "mean_slope", positive=True)
    )


def tensor_fault(state: Mapping[str, Any], key: str, *shapes: tuple[int, ...]) -> str | None:
    """Why state[key] cannot be a tensor of one of these shapes; None where it can."""
    value = state.get(key)
    if not isinstance(value, Tensor):
        return f"its saved {key} is {value!r}"
    if value.layout != torch.strided or not (value.is_floating_point() or value.is_complex()):
        return f"its saved {key} is a tensor of {value.dtype}, {value.layout}"
    if tuple(value.shape) not in shapes:
        return f"its saved {key} has the shape {tuple(value.shape)}, not {' or '.join(map(str, shapes))}"
    return None


def number_fault(state: Mapping[str, Any], key: str, positive: bool = False) -> str | None:
    """Why state[key] cannot be one number, and a positive one; None where it can."""
    value = state.get(key)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    if not isinstance(value, (int, float)) or not value > (0 if positive else -1) or value == math.inf:
        return f"its saved {key} is {value!r}, not a {'positive number' if positive else 'count'}"
    return None


def inverse(
    weight: Tensor,
    scales: Mapping[str, float] | Mapping[str, Tensor],
    *,
    beta: float,
    combine: str,
    previous: Tensor | None = None,
) -> Tensor:
    """raw in the state's dtype, contiguous and never an alias of `weight`; ValueError where there is none."""
    wide = weight.detach().to(torch.float64)
    raw, exists = _inverse(wide, *(scales[kind] for kind in KINDS), beta=beta, combine=combine, previous=previous)
    if not bool(exists.all()):
        raise ValueError(
            _no_inverse_reason(wide, exists, *(scales[kind] for kind in KINDS), beta=beta, combine=combine)
        )
    return raw.to(state_dtype(weight.dtype)).contiguous()


def nearest_inverse(
    weight: Tensor,
    *scales: Tensor,  # as patterns() has them, for a curvature of 1
    combine: str,
    previous: Tensor,
) -> tuple[Tensor, Tensor]:
    """(raw, reached): the inverse where there is one, else the raw whose weight is nearest; 1-D, float64.

    On a branch a = |raw| the weight is f(a) = E*expm1(b*a) + c*a towards the target t = |weight|. Where its two parts pull in
    opposite directions f has one stationary point; the target lies behind it (E > 0) or at most as high as it (E < 0).
    """
    raw, reached = _inverse(weight, *scales, beta=1.0, combine=combine, previous=previous)
    lost = ~reached
    if not bool(lost.any()):
        return raw, reached
    e, l, m, n = (scale[lost] for scale in scales)
    w = weight[lost]
    best, best_error = torch.zeros_like(w), w.abs()
    for branch in (1.0, -1.0):
        toward = branch * w.sign()
        E, b = toward * e * torch.exp(-n), m
        c = (w.sign() if combine == "mismatched" else toward) * l
        turn = torch.nan_to_num(torch.log(-c / (E * b)) / b, 0.0, 0.0, 0.0).clamp_min(0.0)
        low = torch.where(E > 0, turn, 0.0)
        high = torch.where(E > 0, turn + (torch.log1p((w.abs() + c.abs()) / E.abs()) + 60.0) / b.abs(), turn)
        for _ in range(200):
            middle = (low + high) / 2
            below = E * torch.expm1(b * middle) + c * middle < w.abs()
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        error = (E * torch.expm1(b * low) + c * low - w.abs()).abs()
        better = error < best_error
        best, best_error = torch.where(better, branch * low, best), torch.where(better, error, best_error)
    raw[lost] = best
    reached[lost] = best_error <= 1e-9 * w.abs()
    return raw, reached


def moment_key(name: str, moment: str) -> str:
    """raw's moments carry Adam's own names; the others carry their owner's name in front."""
    return moment if name == "raw" else f"{name}_{moment}"


def views(state: Mapping[str, Tensor | float], batch_dims: int, amsgrad: bool) -> Views:
    """The tensors of `state` as a batch of matrices, without a copy."""
    return in_batches(slots(state, amsgrad), matrix_shape(state["raw"].shape, batch_dims))  # type: ignore[union-attr]


def slots(state: Mapping[str, Any], amsgrad: bool) -> Views:
    """The tensors of `state` as they lie: what `in_batches` makes views of, which takes longer than a small parameter's step."""
    moments = MOMENTS if amsgrad else MOMENTS[:2]

    def slot(name: str) -> Slot | None:
        if name not in state:
            return None
        value = state[name]
        if moment_key(name, moments[0]) not in state:
            # Another optimizer moves raw and has the moments: pull and push read the value alone.
            return Slot(value, value, value, None)
        found = [state[moment_key(name, moment)] for moment in moments]
        return Slot(value, found[0], found[1], found[2] if amsgrad else None)

    raw = slot("raw")
    assert raw is not None
    return Views(raw, slot("scale_row"), slot("scale_col"), slot("residual_b"), slot("residual_a"))


def in_batches(state: Views, shape: tuple[int, int, int]) -> Views:
    """Views (batch, rows, cols) of raw, (batch, length, kinds) of factors and alike of the residual."""

    def viewed(slot: Slot | None, shape: tuple[int, ...]) -> Slot | None:
        return None if slot is None else Slot(*(None if t is None else t.view(shape) for t in slot))  # type: ignore[arg-type]

    raw, *others = state
    return Views(
        viewed(raw, shape),  # type: ignore[arg-type]
        *(viewed(slot, () if slot is None else (shape[0], *slot.value.shape[-2:])) for slot in others),
    )


# --------------------------------------------------------------------------------------------------------- the stages


class Scales(NamedTuple):
    """The factors of the scales, for a curvature of 1: scale[i, j] = row[i] * col[j] is e/beta, l/beta, beta*m, n.

    Unpacked once for a stage that is cut into blocks. A part is a vector each for e, l, m and e*m, and for n and e*n where
    there is an n; it is empty where the structure has no such factor.
    """

    row: tuple[Tensor, ...]  # (batch, rows or 1, 1)
    col: tuple[Tensor, ...]  # (batch, 1, cols)
    row_units: tuple[float | Tensor, ...]  # a kind each: what brings a sum over columns to the factor's gradient
    col_units: tuple[float | Tensor, ...]


# Where a kind's vector stands in Scales, and the vector that its shares are summed with: those of m and n are per unit of
# e (functional._shares), so that e comes in with the vectors: sum_j (share[i, j] * (e*m)[j]) * e[i].
VECTOR = {"e": 0, "l": 1, "m": 2, "n": 4}
SUMMED_WITH = {"e": 0, "l": 1, "m": 3, "n": 5}


def unpack(row: Tensor | None, col: Tensor | None, curve: Curve) -> Scales:
    """The packed factors (batch, length, kinds) as vectors, with the curvature in the first of them."""
    beta = curve.beta

    def vectors(factor: Tensor, first: bool) -> tuple[Tensor, ...]:
        # The packing has a stride of four numbers; a product with such a vector falls off the processor's vector path.
        e, l, m, n = factor.permute(2, 0, 1).contiguous().unsqueeze(-1).unbind()
        if first:
            e, l, m = _over(e, beta), _over(l, beta), m * beta  # type: ignore[assignment]
        return (e, l, m, e * m, n, e * n) if curve.has_n else (e, l, m, e * m)  # type: ignore[return-value]

    rows = () if row is None else vectors(row, True)
    cols = () if col is None else vectors(col, not rows)
    units, ones = (1 / beta, 1 / beta, beta, -1.0), (1.0, 1.0, 1.0, -1.0)
    return Scales(rows, tuple(v.mT for v in cols), units, ones if rows else units)


def pair(scales: Scales, place: int) -> tuple[Tensor, ...]:
    """The row and the column at a place of Scales, whose product is the scale; a missing one is 1."""
    return tuple(vectors[place] for vectors in (scales.row, scales.col) if vectors)


def patterns(scales: Scales, curve: Curve) -> list[Tensor | float]:
    """(e/beta, l/beta, beta*m, n), broadcastable to (batch, rows, cols): the map's scales for a curvature of 1."""
    return [*(math.prod(pair(scales, VECTOR[kind])) for kind in KINDS[:3]), shift(scales, curve)]


def shift(scales: Scales, curve: Curve) -> Tensor | float:
    """n, broadcastable to (batch, rows, cols), or the number 0, which costs no exponential."""
    return math.prod(pair(scales, VECTOR["n"])) if curve.has_n else 0.0


def factors(state: Views) -> tuple[Tensor | None, Tensor | None]:
    """The row and the column factors of the scales, (batch, rows or 1, kinds) and (batch, cols, kinds)."""
    return (
        None if state.scale_row is None else state.scale_row.value,
        None if state.scale_col is None else state.scale_col.value,
    )


def slope(state: Views, curve: Curve) -> Tensor:
    """d weight / d raw, (batch, rows, cols)."""
    scales = patterns(unpack(*factors(state), curve), curve)
    return sel_derivatives(state.raw.value, *scales, beta=1.0, combine=curve.combine, kinds=())[0]


def pull(grad: Tensor, state: Views, curve: Curve) -> Pulled:
    """Gradients of the state from the gradient of the weight, at the old raw and the old scales.

    raw: grad * slope;  a row factor: sum_j grad[i,j] * derivative[i,j] * col[j], and the other way round;
    B: grad A^T, A: B^T grad. What is not finite adds nothing to factors, and goes on to its own weight.
    """
    scales = unpack(*factors(state), curve)
    new = torch.empty_like if writable(state, grad) else None
    return _in_units(pull_part(grad, state, curve, scales, new), scales, curve)


def pull_part(grad: Tensor, state: Views, curve: Curve, scales: Scales, new: New) -> Pulled:
    """`pull` for a block of rows, whose sums for the factors are to be added to those of others, then given to `in_units`.

    `scales` are the state's. The gradient of raw may lie in memory from `new`.
    """
    # One NaN or inf, of a gradient or of a weight that met one before, would spread over its whole row and column through the
    # sums; its own weight meets it in grad * slope. On an accelerator a look at the sums would make the host wait.
    careful = grad.device.type != "cpu"
    raw, sum_row, sum_col = _sums(_shares_of(grad, state.raw.value, scales, curve, new), scales, careful)
    looked_at = sum_col if sum_row is None else sum_row
    if not careful and looked_at is not None and not math.isfinite(looked_at.detach().sum()):
        raw, sum_row, sum_col = _sums(_shares_of(grad, state.raw.value, scales, curve, new), scales, True)
    if state.residual_b is None or state.residual_a is None:
        return Pulled(raw, sum_row, sum_col, None, None)
    finite = torch.nan_to_num(grad, 0.0, 0.0, 0.0)
    return Pulled(raw, sum_row, sum_col, finite @ state.residual_a.value.mT, state.residual_b.value.mT @ finite)


def pull_squares(grad_sq: Tensor, state: Views, curve: Curve) -> Pulled:
    """Mean squares of the state's gradients from those of the weight's, as if its elements were independent:

    raw: grad_sq * slope^2;  a row factor: sum_j grad_sq[i,j] * derivative[i,j]^2 * col[j]^2, and the other way round.
    """
    scales = unpack(*factors(state), curve)
    derivatives = _shares_of(None, state.raw.value, scales, curve, torch.empty_like if writable(state) else None)
    squared = ((kind, grad_sq * derivative.square()) for kind, derivative in derivatives)
    squared_scales = Scales(*(tuple(v * v for v in part) for part in scales))  # type: ignore[arg-type]
    square_raw, square_row, square_col = _sums(squared, squared_scales, True)
    square_b = square_a = None
    if state.residual_b is not None and state.residual_a is not None:
        square_b = grad_sq @ state.residual_a.value.square().mT
        square_a = state.residual_b.value.square().mT @ grad_sq
    return _in_units(Pulled(square_raw, square_row, square_col, square_b, square_a), squared_scales, curve)


def writable(state: Views, *others: Tensor) -> bool:
    """Whether temporaries of a stage may be overwritten."""
    return _writable(*others, *(slot.value for slot in state if slot is not None))


def _shares_of(
    grad: Tensor | None, raw: Tensor, scales: Scales, curve: Curve, new: New
) -> Iterator[tuple[str, Tensor]]:
    l, m, em = (pair(scales, place) for place in (1, 2, 3))
    n = shift(scales, curve)
    return _shares(grad, raw, em, l, m, n, combine=curve.combine, kinds=curve.learned, new=new, keep=False)


def _sums(
    shares: Iterable[tuple[str, Tensor]], scales: Scales, careful: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """raw's share, and the others summed over columns and over rows, packed as the factors but for what does not learn.

    `careful`: what is not finite adds nothing.
    """
    row, col = scales.row, scales.col
    by_row: dict[str, Tensor] = {}
    by_col: dict[str, Tensor] = {}
    for kind, share in shares:
        if kind == "raw":
            return share, _packed(by_row), _packed(by_col)
        place = SUMMED_WITH[kind]
        if careful:
            share = torch.nan_to_num(share, 0.0, 0.0, 0.0)
        if row:
            summed = _product_with(col[place] if col else None, share.mT)
            by_row[kind] = summed.sum(-1, keepdim=True) if row[0].shape[-2] == 1 else summed
        if col:
            by_col[kind] = _product_with(row[place].mT if row else None, share)
    raise AssertionError("raw's share comes last")


def _product_with(vector: Tensor | None, share: Tensor) -> Tensor:
    """sum_i vector[:, :, i] * share[:, i, j], or the sum alone, (batch, 1, j): so written, faster than share times vector."""
    return share.sum(-2, keepdim=True) if vector is None else torch.bmm(vector, share)


def _packed(sums: Mapping[str, Tensor]) -> Tensor | None:
    return torch.cat([sums[kind] for kind in KINDS if kind in sums], -2).mT if sums else None


def _in_units(pulled: Pulled, scales: Scales, curve: Curve) -> Pulled:
    named = {name: getattr(pulled, name) for name in ("scale_row", "scale_col")}
    return pulled._replace(
        **{name: in_units(name, sums, scales, curve) for name, sums in named.items() if sums is not None}
    )


def in_units(name: str, sums: Tensor, scales: Scales, curve: Curve) -> Tensor:
    """The gradient of a packed factor from the sums for it, which lack units, the factor e for m and n, and what is frozen."""
    if name == "scale_row":
        e, units = scales.row[0], scales.row_units
    else:
        e, units = scales.col[0].mT, scales.col_units
    parts = dict(zip((kind for kind in KINDS if kind in curve.learned), sums.split(1, -1), strict=True))
    zero = torch.zeros_like(e)
    by_kind = zip(KINDS, units, (1.0, 1.0, e, e), strict=True)
    return torch.cat([_times(unit, _times(of, parts[k])) if k in parts else zero for k, unit, of in by_kind], -1)  # type: ignore[arg-type]


def update(
    slot: Slot,
    grad: Tensor,
    hyper: Hyper,
    step: float | Tensor,
    lr: float | Tensor,
    decay: float = 0.0,
    new: New = None,
) -> None:
    """Adam on one slot, in place, in torch.optim.Adam's order of operations.

    `step` counts this one; a number, or a float64 tensor that broadcasts (a device's counter). `lr` is a number, or a tensor
    that broadcasts (a device tensor, one rate a kind of scale, one a matrix of a stack); where it is 0 the value keeps every
    bit, the moments move.
    """
    value, exp_avg, exp_avg_sq, max_exp_avg_sq = slot
    exp_avg.lerp_(grad, 1 - hyper.beta1)
    exp_avg_sq.mul_(hyper.beta2).addcmul_(grad, grad, value=1 - hyper.beta2)
    if max_exp_avg_sq is not None:
        torch.maximum(max_exp_avg_sq, exp_avg_sq, out=max_exp_avg_sq)
        exp_avg_sq = max_exp_avg_sq
    if is_zero(lr):
        return
    bias_correction1 = 1 - hyper.beta1**step
    bias_correction2_sqrt = (1 - hyper.beta2**step) ** 0.5
    if isinstance(step, Tensor):
        bias_correction1 = bias_correction1.to(value.dtype)
        bias_correction2_sqrt = bias_correction2_sqrt.to(value.dtype)
    step_size = lr / bias_correction1
    root = _sqrt(exp_avg_sq, new)
    denom = (root / bias_correction2_sqrt if root.requires_grad else root.div_(bias_correction2_sqrt)).add_(hyper.eps)
    if on_host(step_size):
        if decay:
            value.mul_(1 - hyper.lr * decay)
        value.addcdiv_(exp_avg, denom, value=-step_size)  # type: ignore[arg-type]
        return
    # A graph keeps the old value, which is overwritten below.
    old = value.clone() if decay and torch.is_grad_enabled() else value
    decayed = old * (1 - hyper.lr * decay) if decay else old
    moved = decayed + (exp_avg * -step_size).div_(denom)
    value.copy_(torch.where(step_size == 0, value, moved))


def _sqrt(x: Tensor, new: New) -> Tensor:
    """sqrt(x); where it is differentiated, with derivative 0 at 0: factors without a gradient yet have exact zeros there."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return torch.sqrt(x, out=new(x) if new else None)
    zero = x == 0
    return x.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def on_host(rate: float | Tensor) -> bool:
    """Whether a rate can be read as one number without waiting for a device, and without compiling its value in."""
    return not isinstance(rate, Tensor) or (
        rate.dim() == 0 and rate.device.type == "cpu" and not torch.compiler.is_compiling()
    )


def is_zero(rate: float | Tensor) -> bool:
    """Whether a rate is known on the host to be 0."""
    return on_host(rate) and bool(rate == 0)


def undo(slot: Slot, hyper: Hyper, step: float, lr: float | Tensor, decay: float = 0.0) -> Tensor:
    """The value before the update that `step` counts, to rounding: update() run backwards, from the moments that it left."""
    value, exp_avg, exp_avg_sq, max_exp_avg_sq = slot
    if not isinstance(lr, Tensor) and lr == 0:
        return value
    second = exp_avg_sq if max_exp_avg_sq is None else max_exp_avg_sq
    denom = (second.sqrt() / (1 - hyper.beta2**step) ** 0.5).add_(hyper.eps)
    step_size = lr / (1 - hyper.beta1**step)
    before = value + exp_avg * step_size / denom
    if decay:
        before = before / (1 - hyper.lr * decay)
    return torch.where(step_size == 0, value, before) if isinstance(step_size, Tensor) else before


def push(
    state: Views,
    curve: Curve,
    scales: Scales | None = None,
    new: New = None,
    out: Tensor | None = None,
) -> Tensor:
    """The weight, (batch, rows, cols): map(raw, scales), plus the residual B @ A.

    It may lie in memory from `new`, or in `out`, of its shape and dtype.
    """
    if scales is None:
        scales = unpack(*factors(state), curve)
        new = torch.empty_like if writable(state) else None
    raw = state.raw.value
    e, l, m = (pair(scales, place) for place in (0, 1, 2))
    n = shift(scales, curve)
    low_rank = residual(state)
    weight = _map(raw, e, l, m, n, combine=curve.combine, new=new, out=out if low_rank is None else None)
    return weight if low_rank is None else weight + low_rank


def residual(state: Views) -> Tensor | None:
    """B @ A where there is one, in its own precision also where the caller is under autocast."""
    if state.residual_b is None or state.residual_a is None:
        return None
    with torch.autocast(state.raw.value.device.type, enabled=False):
        return state.residual_b.value @ state.residual_a.value
