"""What stats() measures of one curved parameter: tensors of one number each, so that all are fetched together."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import _rule
from ._rule import KINDS, Curve, Hyper, Slot, Views
from .functional import sel_forward

SAMPLE = 1 << 14  # weights that stand for all in the deciles; more would cost more than everything else together


class LastStep(NamedTuple):
    """What the last step of a parameter was made with."""

    hyper: Hyper
    step: float  # the count that it reached
    slope: float  # what lr is divided by for raw
    rates: Tensor  # (kinds,): multiples of lr, 0 where frozen


def measure(weight: Tensor, state: Views, curve: Curve, initial_rms: float, last: LastStep | None) -> dict[str, Tensor]:
    """{what: tensor of one number} of a parameter that is not empty. Nothing here waits for the device.

    TensorBoard sorts by name, in rows of three and pages of twelve: with these names a row holds what belongs together.
    """
    values = weight.to(state.raw.value).reshape(state.raw.value.shape)
    found = _scales(state, curve)
    least, greatest = values.aminmax()
    mean = values.mean()
    # Products and means, not torch.where and var_mean, which take five times as long on a CPU.
    squares = (values - mean).square_()
    variance = squares.mean()
    found["size_beta_rms"] = curve.beta * (variance + mean.square()).sqrt()

    slope = _rule.slope(state, curve)
    for what, side in (("slope_negative", values < 0), ("slope_positive", values > 0)):
        side = side.to(values.dtype)
        found[what] = side.mul(slope).mean() / side.mean()

    if last is not None:
        found.update(_last_moves(values, state, curve, last))
    squares.div_(variance)
    found["tail_beyond_4_sigma"] = (squares > 16).to(values.dtype).mean()
    found["tail_kurtosis"] = squares.square_().mean()
    if initial_rms > 0:
        found["tail_max_over_initial_rms"] = torch.maximum(greatest, -least) / initial_rms
    return found


def gather(found: Sequence[tuple[str, dict[str, Tensor]]]) -> dict[str, float]:
    """{"name/what": number}, by one transfer from each device.

    What comes out as NaN where the weights are finite had nothing to measure, and is left out.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for _, numbers in found:
        for number in numbers.values():
            by_device.setdefault(number.device, []).append(number)
    fetched = {device: iter(torch.stack(numbers).tolist()) for device, numbers in by_device.items()}
    stats: dict[str, float] = {}
    for name, numbers in found:
        values = {what: next(fetched[number.device]) for what, number in numbers.items()}
        finite = math.isfinite(values["size_beta_rms"])
        stats.update({f"{name}/{what}": v for what, v in values.items() if not (finite and math.isnan(v))})
    return stats


def _scales(state: Views, curve: Curve) -> dict[str, Tensor]:
    """Mean, least and greatest of row[i] * col[j], from the factors: the extremes are products of extremes."""
    row, col = _rule.factors(state)
    if row is None or col is None:
        factor = col if row is None else row
        assert factor is not None
        mean, least, greatest = factor.mean((0, 1)), factor.amin((0, 1)), factor.amax((0, 1))
    else:
        mean = (row.mean(1) * col.mean(1)).mean(0)
        corners = [a * b for a in (row.amin(1), row.amax(1)) for b in (col.amin(1), col.amax(1))]
        least, greatest = torch.stack(corners).amin((0, 1)), torch.stack(corners).amax((0, 1))
    found: dict[str, Tensor] = {}
    for k, kind in enumerate(KINDS):
        if kind != "n" or curve.has_n:
            for what, by_kind in (("mean", mean), ("min", least), ("max", greatest)):
                found[f"scale_{kind}_{what}"] = by_kind[k]
    return found


def _last_moves(values: Tensor, state: Views, curve: Curve, last: LastStep) -> dict[str, Tensor]:
    """Mean |change| over mean |weight| of the last step, in the smallest and the largest decile of |weight|; their ratio."""
    hyper, step, slope, rates = last
    wide = torch.float32 if values.device.type == "mps" else torch.float64  # a step is small beside its weight
    _, rows, cols = values.shape
    index = _spread(values.numel(), values.device)
    matrix, row, col = index // (rows * cols), index // cols % rows, index % cols

    def both(slot: Slot | None, lr: float | Tensor, decay: float = 0.0) -> list[Tensor] | None:
        """[value before the step, value now] in `wide`."""
        if slot is None:
            return None
        slot = Slot(*(None if t is None else t.to(wide) for t in slot))  # type: ignore[arg-type]
        return [_rule.undo(slot, hyper, step, lr, decay), slot.value]

    raw = Slot(*(None if t is None else t.flatten()[index] for t in state.raw))  # type: ignore[arg-type]
    raws = both(raw, hyper.lr / slope, hyper.weight_decay if hyper.decoupled else 0.0)
    scale_rows, scale_cols = both(state.scale_row, hyper.lr * rates), both(state.scale_col, hyper.lr * rates)
    residual_bs, residual_as = both(state.residual_b, hyper.lr), both(state.residual_a, hyper.lr)
    assert raws is not None

    weights: list[Tensor] = []
    for i in range(2):
        scales: list[Tensor] = []
        if scale_rows is not None:
            length = scale_rows[i].shape[1]  # 1 where one number serves all rows
            scales.append(scale_rows[i].flatten(0, 1).index_select(0, matrix * length + row % length))
        if scale_cols is not None:
            scales.append(scale_cols[i].flatten(0, 1).index_select(0, matrix * cols + col))
        by_kind = (scales[0] * scales[1] if len(scales) == 2 else scales[0]).T.contiguous()
        weight = sel_forward(raws[i], *by_kind, beta=curve.beta, combine=curve.combine)
        if residual_bs is not None and residual_as is not None:
            weight = weight + (residual_bs[i][matrix, row] * residual_as[i].mT[matrix, col]).sum(-1)
        weights.append(weight)

    change = (weights[1] - weights[0]).abs_()
    size = values.flatten()[index].to(wide).abs_()
    relative: list[Tensor] = []
    for largest in (False, True):
        tenth = size.topk(max(1, len(size) // 10), largest=largest, sorted=False).indices
        relative.append((change[tenth].sum() / size[tenth].sum()).to(values.dtype))
    return {
        "step_smallest_decile": relative[0],
        "step_largest_decile": relative[1],
        "step_ratio": relative[0] / relative[1],
    }


def _spread(length: int, device: torch.device) -> Tensor:
    """SAMPLE different places of `length`, spread evenly over all and, for any length of a row, over its columns."""
    if length <= SAMPLE:
        return torch.arange(length, device=device)
    stride = round(length * (math.sqrt(5) - 1) / 2)
    while math.gcd(stride, length) != 1:
        stride += 1
    return torch.arange(SAMPLE, device=device) * stride % length
