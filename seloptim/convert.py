"""Adam's state from and to SELAdam's.

Moments are averages of gradients, and a gradient changes coordinates with the slope J = d weight / d raw:
grad_raw = J * grad_weight, so that exp_avg takes one factor J and exp_avg_sq two.
"""

import os
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _rule, _shards

if TYPE_CHECKING:
    from .optimizer import SELAdam

SMALLEST_SLOPE = 1e-3  # of the mean |J|: under it the division would turn rounding into momentum
POWERS = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}  # of J that a moment takes
ADAM_OPTIONS = (
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
)
GROUP_KEYS = (*ADAM_OPTIONS, "initial_lr", "param_names", "params")


def from_adam(
    adam: Mapping[str, Any],
    state: dict[str, Any],
    view: _rule.Views,
    curve: _rule.Curve,
    sums: _shards.Sums | None = None,
) -> None:
    """Put the moments and the step of an Adam state into a fresh SELAdam state of the same parameter, in place.

    The gradient of a factor is a sum of the weights' gradients, so that its exp_avg follows exactly and its exp_avg_sq as that
    of a sum of independent terms, or exp_avg^2 where that is more. Left at zero behind hundreds of counted steps, which
    bias correction takes for a long history, they would make the first steps of the scales 6 times too large.
    """
    raw, step = view.raw, as_step(adam["step"])
    first, second, *largest = (adam[key].to(raw.value).view_as(raw.value) for key in POWERS if key in adam)
    slope = _rule.slope(view, curve)
    mean, square = _rule.pull(first, view, curve), _rule.pull_squares(second, view, curve)
    if sums is not None:
        factors = [(getattr(found, name), name) for found in (mean, square) for name in ("scale_row", "scale_col")]
        _shards.add_up([(part, sums.mesh, getattr(sums, name)) for part, name in factors if part is not None])
    for slot, exp_avg, exp_avg_sq in zip(view, mean, square, strict=True):
        if slot is None or exp_avg is None or exp_avg_sq is None:
            continue
        slot.exp_avg.copy_(exp_avg)
        slot.exp_avg_sq.copy_(exp_avg_sq if slot is raw else torch.maximum(exp_avg_sq, exp_avg.square()))
        if slot.max_exp_avg_sq is not None:
            slot.max_exp_avg_sq.copy_(slot.exp_avg_sq)
    if largest and raw.max_exp_avg_sq is not None:
        raw.max_exp_avg_sq.copy_(largest[0] * slope.square())
    state["step"] = step


def as_step(step: Any) -> Tensor:
    """A count of steps as torch.optim.Adam keeps it; a copy, and older checkpoints hold plain numbers."""
    return torch.as_tensor(step).detach().to("cpu", torch.float32, copy=True).reshape(())


def adam_fault(state: Mapping[str, Any], shape: torch.Size) -> str | None:
    """Why a saved state cannot be that of torch.optim.Adam for a parameter of this shape; None where it can."""
    if not {"step", "exp_avg", "exp_avg_sq"} <= state.keys():
        return f"its saved state has {', '.join(map(str, state)) or 'nothing'}, neither Adam's keys nor SELAdam's"
    reasons = [_rule.tensor_fault(state, key, tuple(shape)) for key in POWERS if key in state]
    return next(filter(None, reasons), _rule.number_fault(state, "step"))


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

    Source: the chain rule; see docs/state.md for what continues and what does not.
    """
    converted = to_adam_state(optimizer.state_dict())
    params = (p for group in optimizer.param_groups for p in group["params"])
    for position, p in enumerate(params):
        state = converted["state"].get(position, {})
        state.update({key: state[key].to(p.dtype) for key in POWERS if key in state})
    return converted


@torch.no_grad()
def to_adam_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """`to_adam` of a saved state, without the optimizer or the model: moments stay in the state's dtype.

    torch.optim.Adam casts them to the parameters' dtype as it loads them.

    Args:
        state_dict: what SELAdam.state_dict() returned, by position or by name; it is not changed, and nothing is shared.

    Raises:
        ValueError: not a SELAdam state.

    Example:
        >>> from seloptim import SELAdam
        >>> saved = SELAdam(torch.nn.Linear(2, 2).parameters()).state_dict()
        >>> sorted(to_adam_state(saved)["state"][0])
        ['exp_avg', 'exp_avg_sq', 'step']
    """
    check_layout(state_dict)
    if not all("sel_format" in group for group in state_dict["param_groups"]):
        raise ValueError("not a SELAdam state: its parameter groups hold no sel_format")
    states: dict[Any, dict[str, Any]] = {}
    for group in state_dict["param_groups"]:
        for key in group["params"]:
            saved = state_dict["state"].get(key)
            if saved:
                states[key] = _moments(saved, group, key)
    groups = [{key: group[key] for key in GROUP_KEYS if key in group} for group in state_dict["param_groups"]]
    return {"state": states, "param_groups": groups}


def _moments(saved: Mapping[str, Any], group: Mapping[str, Any], key: Any) -> dict[str, Any]:
    if any(_shards.is_sharded(value) for value in saved.values()):
        raise ValueError(
            f"parameter {key}: its state is cut over ranks; gather it before, with get_optimizer_state_dict(model, optimizer, "
            "options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict, and convert that with "
            "to_adam_state"
        )
    curved = "raw" in saved
    weight_like = saved.get("raw" if curved else "exp_avg")
    shape = weight_like.shape if isinstance(weight_like, Tensor) else torch.Size()
    batch_dims = group.get("batch_dims", 0)
    if not isinstance(batch_dims, int) or batch_dims < 0:
        raise ValueError(f"Invalid batch_dims: {batch_dims!r}; use an int >= 0")
    reason = _rule.state_fault(saved, shape, batch_dims) if curved else adam_fault(saved, shape)
    if reason:
        raise ValueError(f"parameter {key}: {reason}")
    moments = {"step": as_step(saved["step"])}
    if not curved:
        return moments | {name: saved[name].clone() for name in POWERS if name in saved}
    saved = {name: value.contiguous() if isinstance(value, Tensor) else value for name, value in saved.items()}
    curve = _rule.Curve(saved["beta"], group.get("combine", ""), learned=(), has_n=True)
    slope = _rule.slope(_rule.views(saved, batch_dims, amsgrad=False), curve).view(shape)
    size = slope.abs()
    floor = SMALLEST_SLOPE * float(size.mean()) if size.numel() else 0.0
    floored = torch.where(slope < 0, -1.0, 1.0) * size.clamp_min(floor)
    return moments | {name: saved[name] / floored**power for name, power in POWERS.items() if name in saved}


def check_layout(state_dict: Any) -> None:
    """ValueError where `state_dict` is not laid out as what torch's optimizers save."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError('not an optimizer state: expected the keys "state" and "param_groups" of a state_dict()')
    states, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(states, Mapping) or not all(isinstance(state, Mapping) for state in states.values()):
        raise ValueError('not an optimizer state: "state" must map parameters to mappings')
    if not isinstance(groups, (list, tuple)) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups
    ):
        raise ValueError('not an optimizer state: "param_groups" must be a list of mappings with "params"')


def read_checkpoint(path: "str | os.PathLike[str]", mmap: bool = False) -> Any:
    """What torch.save wrote to `path`, on the CPU; no code from the file runs.

    mmap: leave the tensors in the file until they are read, where its format allows that.

    Raises:
        ValueError: no checkpoint, a truncated one, or one that holds more than tensors and plain values. OSError: no file.
    """
    with open(path, "rb"):
        pass  # its OSError is about the file; what torch.load raises below is about its content
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and zipfile.is_zipfile(path))
    except Exception as error:  # what a damaged file makes torch raise has no common class
        raise ValueError(
            f"{os.fspath(path)} is no checkpoint of tensors and plain values, or is damaged; nothing in it was run"
        ) from error
