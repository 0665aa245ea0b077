"""What the options of a group mean, their defaults and their checks: shared by every optimizer and transformation."""

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import _rule
from ._rule import KINDS
from .init import RULES
from .schedule import scale_lr_multiplier

SEL_DEFAULTS: dict[str, Any] = {
    "curved": "matrices",
    "combine": "mismatched",
    "init": "preserve",
    "beta": "width",
    "lr_space": "weight",
    "structure": "row_col",
    "batch_dims": 0,
    "scale_init": None,
    "scale_lr": None,
    "anneal_steps": None,
    "residual_rank": 0,
    "check_edits": "tracked",
}


EXECUTION = ("foreach", "capturable", "differentiable", "fused")


CHOICES = {
    "combine": ("mismatched", "congruent"),
    "init": ("preserve", "mismatched"),
    "lr_space": ("raw", "weight"),
    "structure": _rule.STRUCTURES,
    "check_edits": ("tracked", "full"),
}


DEFAULT_SCALE_LR: dict[str, Any] = {
    "e": (2.0, 0.3),
    "l": (2.0, 0.3),
    "m": (0.01, 0.5),
    "n": None,
}


PAPER_SCALE_LR: dict[str, Any] = {
    "e": (50.0, 8.0),
    "l": (50.0, 8.0),
    "m": (0.01, 0.5),
    "n": None,
}


def learned_kinds(group: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds of scale that train in this group."""
    if group["structure"] == "none":
        return ()
    given = DEFAULT_SCALE_LR if group["scale_lr"] is None else group["scale_lr"]
    return tuple(kind for kind in KINDS if given.get(kind) is not None)


def check_group(group: dict[str, Any]) -> None:
    """Every SEL option of a group; all become plain values, so that torch.load(weights_only=True) reads a saved group."""
    if "betas" in group:
        check_betas(group["betas"])
    for name, allowed in CHOICES.items():
        if group[name] not in allowed:
            raise ValueError(f"Invalid {name}: {group[name]!r}; use one of {', '.join(map(repr, allowed))}")
    curved = group["curved"]
    if not (callable(curved) or isinstance(curved, (bool, list)) or curved in ("matrices", "all", "none")):
        raise ValueError(
            f"Invalid curved: {curved!r}; use 'matrices', 'all', 'none', a bool (in a group) or a callable (name, p) -> bool"
        )
    beta, count = group["beta"], len(group["params"])
    for name, each in (("curved", curved), ("beta", beta)):
        if isinstance(each, list) and len(each) != count and not (name == "beta" and len(each) == 2):
            raise ValueError(
                f"Invalid {name}: {len(each)} entries for {count} parameters; what a callable chose when a group was added stands by "
                "position: take out the entries of parameters that you take out, or set one value for all"
            )
    if isinstance(beta, list) and len(beta) == len(group["params"]):
        group["beta"] = [check_beta(b, f"{i} of its group") for i, b in enumerate(beta)]
    elif not callable(beta):
        group["beta"] = check_beta(beta)
    for name in ("batch_dims", "residual_rank"):
        if isinstance(group[name], bool) or not isinstance(group[name], int) or group[name] < 0:
            raise ValueError(f"Invalid {name}: {group[name]!r}; use an int >= 0")
    steps = group["anneal_steps"]
    if steps is not None and (
        isinstance(steps, bool) or not isinstance(steps, (int, float)) or not 0 < steps < math.inf
    ):
        raise ValueError(f"Invalid anneal_steps: {steps!r}; use a positive number of steps, or None")
    group["scale_init"] = check_scale_init(group["scale_init"])
    group["scale_lr"] = check_scale_lr(group["scale_lr"])


def check_beta(beta: Any, name: str | None = None) -> float | str:
    where = "" if name is None else f" for parameter {name}"
    if isinstance(beta, (tuple, list)):
        raise ValueError(f"beta is the curvature, one number, got {beta!r}{where}; did you mean betas={tuple(beta)!r}?")
    if isinstance(beta, str) and beta in RULES:
        return beta
    try:
        number = float(beta)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(beta, (bool, str)) or not 0 < number < math.inf:
        raise ValueError(
            f"Invalid beta: {beta!r}{where}; use a positive number, 'auto', 'width' or a callable (name, p) -> float"
        )
    return number


def check_betas(betas: Any) -> None:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(
            f"betas is Adam's pair of decay rates, got {betas!r}; did you mean beta={betas!r}, the curvature?"
        )


def check_kinds(name: str, mapping: Any) -> None:
    if not isinstance(mapping, Mapping):
        raise ValueError(f"Invalid {name}: {mapping!r}; use None or a mapping from {', '.join(KINDS)}")
    for kind in mapping:
        if kind not in KINDS:
            raise ValueError(f"Invalid {name}: unknown kind {kind!r}; the kinds are {', '.join(KINDS)}")


def check_scale_init(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    check_kinds("scale_init", given)
    for kind, value in given.items():
        fine = value == "beta" or (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        )
        if not fine:
            raise ValueError(f"Invalid scale_init for {kind}: {value!r}; use a finite number or 'beta'")
    return {kind: value if value == "beta" else float(value) for kind, value in given.items()}


def check_scale_lr(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    check_kinds("scale_lr", given)
    checked: dict[str, Any] = {}
    for kind, value in given.items():
        numbers = value if isinstance(value, (tuple, list)) else (value, value)
        fine = value is None or (
            len(numbers) == 2
            and all(isinstance(v, (int, float)) and not isinstance(v, bool) and 0 < v < math.inf for v in numbers)
        )
        if not fine:
            raise ValueError(
                f"Invalid scale_lr for {kind}: {value!r}; use None (frozen), a positive number or a pair (start, end) of them"
            )
        checked[kind] = None if value is None else [float(v) for v in numbers]
    return checked


def device_scale_rates(group: dict[str, Any], done: Tensor) -> Tensor:
    """scale_rates for counters on a device, (parameters,): (parameters, kinds), without a look at them."""
    pairs = _pairs(group)
    columns = [
        torch.zeros_like(done) if kind not in pairs else scale_lr_multiplier(*pairs[kind], group["anneal_steps"], done)
        for kind in KINDS
    ]
    return torch.stack(columns, -1)


def scale_rates(group: dict[str, Any], done: float) -> list[float]:
    """Multiples of lr for each kind of scale after `done` steps, 0 where frozen."""
    pairs = _pairs(group)
    return [
        float(scale_lr_multiplier(*pairs[kind], group["anneal_steps"], done)) if kind in pairs else 0.0
        for kind in KINDS
    ]


def _pairs(group: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """(start, end) of each kind that trains."""
    given = DEFAULT_SCALE_LR if group["scale_lr"] is None else group["scale_lr"]
    pairs: dict[str, tuple[float, float]] = {}
    for kind in learned_kinds(group):
        first, last = given[kind] if isinstance(given[kind], (tuple, list)) else (given[kind], given[kind])
        pairs[kind] = (first, last)
    return pairs


def near_names(name: str, options: Iterable[str], cutoff: float = 0.6) -> str:
    near = difflib.get_close_matches(name, options, 3, cutoff)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
