"""Adam's state from and to SELAdam's.

Moments are averages of gradients, and a gradient changes coordinates with the slope J = d weight / d raw:
grad_raw = J * grad_weight, so that exp_avg takes one factor J and exp_avg_sq two.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .optimizer import SELAdam

SMALLEST_SLOPE = 1e-3  # of the mean |J|: under it the division would turn rounding into momentum
ADAM_KEYS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
    "initial_lr",
    "param_names",
)


def from_adam(adam: Mapping[str, Any], state: dict[str, Any], slope: Tensor) -> None:
    """Put the moments and the step of an Adam state into a fresh SELAdam state of the same parameter, in place."""
    state["step"] = torch.as_tensor(adam["step"], dtype=torch.float32).detach().clone().reshape(()).cpu()
    for key, power in (("exp_avg", 1), ("exp_avg_sq", 2), ("max_exp_avg_sq", 2)):
        if key in adam and key in state:
            state[key] = adam[key].to(slope.device, slope.dtype).reshape(slope.shape) * slope**power


def to_adam(optimizer: "SELAdam") -> dict[str, Any]:
    """The state of `optimizer` as a state_dict that torch.optim.Adam (or AdamW) of the same parameters loads.

    Moments are divided by the slope (its square for exp_avg_sq), whose size is floored at 1e-3 of its mean, and cast to the
    parameter's dtype. Raw weights and scales are left behind: the parameters already hold their map.

    Args:
        optimizer: a SELAdam; it is not changed.

    Returns:
        {"state": {position: {"step", "exp_avg", "exp_avg_sq"}}, "param_groups": [...]}, with Adam's group keys only.

    Example:
        >>> from seloptim import SELAdam
        >>> p = torch.nn.Parameter(torch.full((2, 2), 0.1))
        >>> p.grad = torch.ones(2, 2)
        >>> optimizer = SELAdam([p])
        >>> optimizer.step()
        >>> adam = torch.optim.Adam([p])
        >>> adam.load_state_dict(to_adam(optimizer))
        >>> adam.state[p]["exp_avg"].shape
        torch.Size([2, 2])

    Source: the chain rule; see docs/guide.md for what continues and what does not.
    """
    saved = optimizer.state_dict()
    slopes = optimizer._slopes()
    out: dict[int, dict[str, Any]] = {}
    for position, (p, slope) in enumerate(slopes):
        state = saved["state"].get(position)
        if not state:
            continue
        if slope is None:
            out[position] = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
            continue
        size = slope.abs()
        floored = torch.where(slope < 0, -1.0, 1.0) * size.clamp_min(
            SMALLEST_SLOPE * float(size.mean()) if size.numel() else 0.0
        )
        out[position] = {"step": state["step"].clone()}
        for key, power in (("exp_avg", 1), ("exp_avg_sq", 2), ("max_exp_avg_sq", 2)):
            if key in state:
                out[position][key] = (state[key] / floored**power).to(p.dtype)
    groups = []
    for group in saved["param_groups"]:
        groups.append({key: group[key] for key in (*ADAM_KEYS, "params") if key in group})
    return {"state": out, "param_groups": groups}
