"""What is decided once, from the weights: the curvature, and the mismatched initialisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from seloptim import _shards
from seloptim.functional import sel_forward, sel_inverse

RULES = ("auto", "width")
# A default nn.Embedding has rms 1: the least beta would already put its weights deep into the exponential regime.
LARGEST_CURVED_RMS = 0.8
NO_VALUES = "on the meta device, which have no values: materialise them before (to_empty, then initialise or load them)"
Weights = TypeVar("Weights", Tensor, nn.Module)
Curved = str | Callable[[str, Tensor], bool]


def calibrate_beta(tensor: Tensor, rule: str = "width", batch_dims: int = 0) -> float:
    """Choose the curvature so that the exponential regime begins near the usual size of a weight: what SELAdam chooses.

    ::

        rms = sqrt(mean(tensor**2));  rows, cols = tensor.shape[0], tensor.numel() / rows
        width:  max(2, min(0.276 * sqrt((rows + cols) / 2), 1.1 / rms))
        auto:   max(2, min(max(12.5, min(64, 0.28 / rms)), 1.1 / rms)),  12.5 where rms is 0

    Arguments:
        tensor: the initial weights of one parameter, real floating, finite. A DTensor counts as a whole: every rank must
            call. One on the meta device has no rms; the width alone decides then.
        rule: "width", from the shape, or "auto", from the size of the weights. Default "width".
        batch_dims: leading dimensions that stack matrices: rows and cols are those of one. Default 0.

    Returns:
        beta, a positive float.

    Raises:
        ValueError: an unknown rule; weights that are not finite; "auto" for a tensor on the meta device.
        TypeError: `tensor` is not real floating.

    Example:
        >>> round(calibrate_beta(torch.full((4, 4), 0.02), "auto"), 3)
        14.0
        >>> round(calibrate_beta(torch.full((2048, 2048), 0.02)), 2)
        12.49

    Source: arXiv:2607.09967, whose 12.5 at width 2048 the rules extend.
    """
    if rule not in RULES:
        raise ValueError(f'the rule for beta must be "auto" or "width", got {rule!r}')
    if not tensor.is_floating_point():
        raise TypeError(f"weights must be real and floating, got {tensor.dtype}")
    if tensor.is_meta and rule == "auto":
        raise ValueError(f"beta cannot be chosen from weights {NO_VALUES}")
    rms = 0.0 if tensor.is_meta else _rms(tensor)
    if not math.isfinite(rms):
        raise ValueError("beta cannot be chosen from weights that are not finite")
    if rule == "width":
        rows, *others = tensor.shape[batch_dims:] or (1,)
        wanted = 0.276 * math.sqrt((rows + math.prod(others)) / 2)
    elif rms == 0:
        wanted = 12.5
    else:
        wanted = max(12.5, min(64.0, 0.28 / rms))
    # Where weights are larger than their shape suggests (a layer with few inputs and many outputs), a curvature made for the
    # shape alone would leave small weights still.
    return max(2.0, min(wanted, 1.1 / rms if rms else math.inf))


@torch.no_grad()
def mismatched_(tensor_or_module: Weights, beta: float | str = "width", curved: Curved = "matrices") -> Weights:
    """Break the symmetry of the signs, in place: positive weights stay, negative ones shrink.

    ::

        weight <- sel_forward(sel_inverse(weight, combine="congruent"), combine="mismatched")

    For training from scratch, like the functions of torch.nn.init; `SELAdam(init="mismatched")` does it by itself. A
    weight near zero goes from -w to -w*(beta - 1)/(beta + 1).

    Arguments:
        tensor_or_module: a tensor, taken whatever its shape, or a module whose parameters `curved` chooses.
        beta: a positive float, or a rule of `calibrate_beta` applied to each tensor. Default "width", as SELAdam's. Of stacked
            matrices (batch_dims) SELAdam's init="mismatched" knows the width; here give a number.
        curved: for a module: "matrices" (two or more dimensions, under a rule with rms up to 0.8), "all",
            "none", or a callable (name, parameter) -> bool. Default "matrices".

    Returns:
        `tensor_or_module`.

    Raises:
        ValueError: unknown `curved` or `beta`; weights that are not finite, or on the meta device; names the parameter.
        TypeError: a tensor that is not real floating.

    Example:
        >>> mismatched_(torch.tensor([[-0.1, 0.0, 0.1]]), beta=12.5)
        tensor([[-0.0900,  0.0000,  0.1000]])

    Source: arXiv:2607.09967, the mismatched initialisation.
    """
    if not callable(curved) and curved not in ("matrices", "all", "none"):
        raise ValueError(f'curved must be "matrices", "all", "none" or a callable, got {curved!r}')
    if isinstance(tensor_or_module, Tensor):
        _mismatch(tensor_or_module, beta)
        return tensor_or_module
    chosen = [(name, p) for name, p in tensor_or_module.named_parameters() if _is_curved(name, p, beta, curved)]
    for name, p in chosen:
        try:
            _mismatch(p, beta)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return tensor_or_module


def shrink(weight: Tensor, *scales: float, beta: float) -> Tensor:
    """What the mismatched initialisation makes of a weight, under the scales e, l, m, n."""
    # Through float32 for half precision: one rounding, at the end.
    precise = weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
    raw = sel_inverse(precise, *scales, beta=beta, combine="congruent")
    return sel_forward(raw, *scales, beta=beta, combine="mismatched")


def _mismatch(weight: Tensor, beta: float | str) -> None:
    if weight.is_meta:
        raise ValueError(f"weights {NO_VALUES}")
    beta = calibrate_beta(weight, beta) if isinstance(beta, str) else beta
    part = _shards.local(weight)
    part.copy_(shrink(part, beta=beta))


def _is_curved(name: str, p: Tensor, beta: float | str, curved: Curved) -> bool:
    if callable(curved):
        return bool(curved(name, p))
    if curved == "none" or not p.is_floating_point():
        return False
    return curved == "all" or (
        p.ndim >= 2 and not (isinstance(beta, str) and not p.is_meta and _rms(p) > LARGEST_CURVED_RMS)
    )


def _rms(tensor: Tensor) -> float:
    if tensor.numel() == 0:
        return 0.0
    norm = torch.linalg.vector_norm(_shards.local(tensor), dtype=torch.float64).item()
    if _shards.is_sharded(tensor):
        norm = math.sqrt(_shards.total(tensor, norm * norm)[0])
    return norm / math.sqrt(tensor.numel())
