"""The learning rate of a scale, as a multiple of its group's, over its parameter's steps."""

from __future__ import annotations

import math
from typing import overload

import torch
from torch import Tensor


@overload
def scale_lr_multiplier(start: float, end: float, anneal_steps: float | None, t: float) -> float: ...
@overload
def scale_lr_multiplier(start: float, end: float, anneal_steps: float | None, t: Tensor) -> Tensor: ...
def scale_lr_multiplier(start: float, end: float, anneal_steps: float | None, t: float | Tensor) -> float | Tensor:
    """Multiplier of the group's learning rate for a scale after `t` completed steps: a cosine in log space.

    ::

        exp(log(start) + (log(end) - log(start)) * (1 - cos(pi * min(t / anneal_steps, 1))) / 2)
        anneal_steps = None:  sqrt(start * end)

    Arguments:
        start: multiplier at the first step, positive; or equal to `end`, then any number >= 0.
        end: multiplier from step `anneal_steps` on, likewise.
        anneal_steps: length of the way from `start` to `end` in steps, positive; None for a constant multiplier.
        t: completed steps of the parameter, 0 at its first step; a number, or a tensor whose value stays on its device.

    Returns:
        The multiplier, a float for a number and a tensor of `t`'s shape and device for a tensor (float64 if `t` is
        float64, otherwise float32).

    Raises:
        ValueError: a negative or infinite multiplier, a zero one that is not constant, or `anneal_steps` not positive.

    Example:
        >>> [round(scale_lr_multiplier(8.0, 2.0, 100, t), 3) for t in (0, 25, 50, 100, 1000)]
        [8.0, 6.53, 4.0, 2.0, 2.0]
        >>> scale_lr_multiplier(8.0, 2.0, None, 0)
        4.0

    Source: arXiv:2607.09967, the annealed learning rates of the scales.
    """
    constant = start == end
    for name, value in (("start", start), ("end", end)):
        if not (0 < value < math.inf or (value == 0 and constant)):
            raise ValueError(f"{name} must be a positive multiple of the learning rate, got {value!r}")
    if anneal_steps is not None and not anneal_steps > 0:
        raise ValueError(f"anneal_steps must be positive or None, got {anneal_steps!r}")
    if constant or anneal_steps is None:
        value = start if constant else math.sqrt(start * end)
        return torch.full_like(t, value, dtype=_dtype(t)) if isinstance(t, Tensor) else float(value)
    # exp(log(start) + (log(end) - log(start)) * (1 - cos(pi * min(t / anneal_steps, 1))) / 2)
    way = math.log(end) - math.log(start)
    if isinstance(t, Tensor):
        progress = (1 - torch.cos(math.pi * (t.to(_dtype(t)) / anneal_steps).clamp(max=1.0))) / 2
        return torch.exp(math.log(start) + way * progress)
    return math.exp(math.log(start) + way * (1 - math.cos(math.pi * min(t / anneal_steps, 1.0))) / 2)


def _dtype(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32
