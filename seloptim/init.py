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


def calibrate_beta(tensor: Tensor, rule: str = "auto") -> float:
    """Choose the curvature so that the exponential regime begins near the usual size of a weight.

    ::

        rms = sqrt(mean(tensor**2));  rows, cols = tensor.shape[0], tensor.numel() / rows
        auto:   max(2, min(max(12.5, min(64, 0.28 / rms)), 1.1 / rms)),  12.5 where rms is 0
        width:  max(2, 0.276 * sqrt((rows + cols) / 2))

    Arguments:
        tensor: the initial weights of one parameter (of one slice, for stacked matrices), real floating, finite. A DTensor
            counts as a whole: every rank must call.
        rule: "auto", from the size of the weights, or "width", from the shape. Default "auto"; SELAdam's own is "width", lowered
            to 1.1 / rms where the weights are larger than their shape suggests.

    Returns:
        beta, a positive float.

    Raises:
        ValueError: an unknown rule, or weights that are not finite, or without values (on the meta device) under "auto".
        TypeError: `tensor` is not real floating.

    Example:
        >>> round(calibrate_beta(torch.full((4, 4), 0.02)), 3)
        14.0
        >>> round(calibrate_beta(torch.empty(2048, 2048), "width"), 2)
        12.49

    Source: arXiv:2607.09967, whose 12.5 at width 2048 the rules extend.
    """
    if rule not in RULES:
        raise ValueError(f'the rule for beta must be "auto" or "width", got {rule!r}')
    if not tensor.is_floating_point():
        raise TypeError(f"weights must be real and floating, got {tensor.dtype}")
    if rule == "width":
        rows = tensor.shape[0] if tensor.ndim else 1
        cols = math.prod(tensor.shape[1:])
        return max(2.0, 0.276 * math.sqrt((rows + cols) / 2))
    if tensor.is_meta:
        raise ValueError(f"beta cannot be chosen from weights {NO_VALUES}")
    rms = _rms(tensor)
    if not math.isfinite(rms):
        raise ValueError("beta cannot be chosen from weights that are not finite")
    if rms == 0:
        return 12.5
    return max(2.0, min(max(12.5, min(64.0, 0.28 / rms)), 1.1 / rms))


def choose_beta(tensor: Tensor, rule: str, batch_dims: int = 0) -> float:
    """beta of a parameter by a rule: "auto" looks at the values of all, "width" at the shape of one matrix of a stack.

    Under "width" too beta * rms stays at most 1.1, and beta at least 2: where weights are larger than their shape suggests
    (a layer with few inputs and many outputs), a curvature made for the shape alone would leave small weights still.
    """
    if rule != "width":
        return calibrate_beta(tensor, rule)
    by_shape = calibrate_beta(torch.empty(tensor.shape[batch_dims:], dtype=tensor.dtype, device="meta"), rule)
    rms = _rms(tensor)
    return min(by_shape, max(2.0, 1.1 / rms)) if 0 < rms < math.inf else by_shape


@torch.no_grad()
def mismatched_(tensor_or_module: Weights, beta: float | str = "width", curved: Curved = "matrices") -> Weights:
    """Break the symmetry of the signs, in place: positive weights stay, negative ones shrink.

    ::

        weight <- sel_forward(sel_inverse(weight, combine="congruent"), combine="mismatched")

    For training from scratch, like the functions of torch.nn.init; `SELAdam(init="mismatched")` does it by itself. A
    weight near zero goes from -w to -w*(beta - 1)/(beta + 1).

    Arguments:
        tensor_or_module: a tensor, taken whatever its shape, or a module whose parameters `curved` chooses.
        beta: a positive float, or a rule of `calibrate_beta` applied to each tensor. Default "width", lowered as SELAdam's. Of stacked
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
    beta = choose_beta(weight, beta) if isinstance(beta, str) else beta
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
