"""The truth that every execution path is compared with: float64, naive, autograd. Imports nothing of the package.

Nothing here is fast or clever: the map is written as its formula, every gradient comes from autograd through it, every
update from torch.optim.Adam on plain leaf tensors, the inverse from bisection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

KINDS = ("e", "l", "m", "n")
START = {"e": 1.0, "l": 1.0, "m": 1.0, "n": 0.0}
DEFAULT_SCALE_LR: dict[str, Any] = {"e": (2.0, 0.3), "l": (2.0, 0.3), "m": (0.01, 0.5), "n": None}


def sel_map(raw: Tensor, e: Any, l: Any, m: Any, n: Any, beta: float, combine: str) -> Tensor:
    """weight = s*E(|raw|) + (l/beta)*(|raw| or raw), whose autograd at raw = 0 is e*m*exp(-n)."""
    # The sign is a constant and +1 at zero, and |raw| has the derivative 0 there: the mean of the two one-sided slopes.
    s = torch.where(raw.detach() < 0, -1.0, 1.0).to(raw.dtype)
    n = torch.as_tensor(n, dtype=raw.dtype)
    exponential = (e / beta) * torch.exp(-n) * torch.expm1(beta * m * (s * raw))
    linear = (l / beta) * (raw.abs() if combine == "mismatched" else raw)
    return s * exponential + linear


def sel_unmap(
    weight: Tensor, e: Any, l: Any, m: Any, n: Any, beta: float, combine: str, previous: Tensor | None = None
) -> Tensor:
    """The raw weights of `weight`, by bisection; NaN where there is none."""
    e, l, m, n = (torch.as_tensor(v, dtype=torch.float64).expand(weight.shape) for v in (e, l, m, n))
    m = torch.where(e == 0, 0.0, m)  # 0 * exp(large) means nothing
    zero = torch.zeros_like(weight)

    def on_branch(s: float) -> Tensor:
        def value(a: Tensor) -> Tensor:
            return torch.nan_to_num(sel_map(s * a, e, l, m, n, beta, combine) * weight.sign(), nan=math.inf)

        coefficient = (l / beta) * (1.0 if combine == "mismatched" else s) * weight.sign()
        first = e * m * torch.exp(-n) * s * weight.sign() + coefficient
        # d value / d a runs monotonically from `first` to `last`.
        last = torch.where(m > 0, e * s * weight.sign() * math.inf, coefficient)
        rising = (first >= 0) & (last >= 0) & ((first > 0) | (last > 0))
        low, high = zero, zero + 1e-3
        for _ in range(130):
            high = torch.where(value(high) < weight.abs(), 2 * high, high)
        reached = value(high) >= weight.abs()
        for _ in range(250):
            middle = (low + high) / 2
            below = value(middle) < weight.abs()
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return torch.where(rising & reached & torch.isfinite(weight), s * high, math.nan)

    positive, negative = on_branch(1.0), on_branch(-1.0)
    choice = torch.where(positive.isnan(), negative, positive)
    if previous is not None:
        choice = torch.where((previous < 0) & ~negative.isnan(), negative, choice)
    return torch.where(weight == 0, zero, choice)


def multiplier(start: float, end: float, anneal_steps: float | None, t: int) -> float:
    """The learning rate of a scale after t completed steps, as a multiple of the group's."""
    if start == end:
        return start
    if anneal_steps is None:
        return math.sqrt(start * end)
    progress = (1 - math.cos(math.pi * min(t / anneal_steps, 1.0))) / 2
    return math.exp(math.log(start) + (math.log(end) - math.log(start)) * progress)


def rows_and_cols(shape: Sequence[int], batch_dims: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the two factors that broadcast to `shape`: (batch, rows, 1, ..) and (batch, 1, everything else)."""
    batch, rest = tuple(shape[:batch_dims]), tuple(shape[batch_dims:])
    if not rest:
        return batch, batch
    return batch + (rest[0],) + (1,) * (len(rest) - 1), (*batch, 1, *rest[1:])


def resolve_beta(rule: float | str, weight: Tensor, batch_dims: int = 0) -> float:
    if not isinstance(rule, str):
        return float(rule)
    rms = weight.square().mean().sqrt().item() if weight.numel() else 0.0
    if rule == "width":
        row, col = rows_and_cols(weight.shape[batch_dims:])
        by_shape = max(2.0, 0.276 * math.sqrt((math.prod(row) + math.prod(col)) / 2))
        return min(by_shape, max(2.0, 1.1 / rms)) if rms else by_shape
    if rms == 0:
        return 12.5
    return max(2.0, min(max(12.5, min(64.0, 0.28 / rms)), 1.1 / rms))


class Curve:
    """One curved parameter: raw weights, factors and residual as leaves, each with its own torch.optim.Adam."""

    def __init__(self, weight: Tensor, lr: float, residual: tuple[Tensor, Tensor] | None, options: Mapping[str, Any]):
        o = self.options = options
        self.weight_shape, self.t = weight.shape, 0
        batch_dims = min(o["batch_dims"], weight.ndim)
        self.beta = resolve_beta(o["beta"], weight, batch_dims)
        start = dict(START)
        for kind, value in (o["scale_init"] or {}).items():
            start[kind] = self.beta if value == "beta" else float(value)
        row, col = rows_and_cols(weight.shape, batch_dims)
        one = weight.shape[:batch_dims] + (1,) * (weight.ndim - batch_dims)
        vector = weight.ndim - batch_dims <= 1
        # Which factors the structure has; the other side stays at one and is never trained.
        has_row = o["structure"] in ("row_col", "row") or (vector and o["structure"] == "col")
        has_col = o["structure"] in ("row_col", "col") and not vector
        if o["structure"] in ("scalar", "none"):
            row, col, has_row = one, one, o["structure"] == "scalar"
        elif vector:
            col = one
        row = row if has_row else one
        col = col if has_col else one
        self.pair: dict[str, tuple[Tensor, Tensor]] = {}
        trained: dict[str, list[Tensor]] = {}
        for kind in KINDS:
            first_is_col = has_col and not has_row
            row_value, col_value = (1.0, start[kind]) if first_is_col else (start[kind], 1.0)
            r = torch.full(row, row_value, dtype=torch.float64, requires_grad=True)
            c = torch.full(col, col_value, dtype=torch.float64, requires_grad=True)
            self.pair[kind] = (r, c)
            trained[kind] = [leaf for leaf, has in ((r, has_row), (c, has_col)) if has]

        e, l, m, n = (start[kind] for kind in KINDS)
        if o["init"] == "mismatched":
            congruent = sel_unmap(weight, e, l, m, n, self.beta, "congruent")
            weight = sel_map(congruent, e, l, m, n, self.beta, "mismatched")
        raw = sel_unmap(weight, e, l, m, n, self.beta, o["combine"])
        assert torch.isfinite(raw).all(), "a weight without inverse"
        self.raw = raw.requires_grad_()
        (slope,) = torch.autograd.grad(self.map().sum(), self.raw)
        self.mean_slope = slope.abs().mean().item() if o["lr_space"] == "weight" else 1.0

        self.B: Tensor | None = None
        if residual is not None:
            A, B = residual
            self.A = A.detach().double().clone().requires_grad_()
            self.B = B.detach().double().clone().requires_grad_()

        def adam(leaf: Tensor) -> torch.optim.Adam:
            return torch.optim.Adam([leaf], lr, o["betas"], o["eps"], amsgrad=o["amsgrad"], foreach=False)

        self.raw_adam = adam(self.raw)
        self.residual_adams = [adam(leaf) for leaf in (self.A, self.B)] if self.B is not None else []
        scale_lr = DEFAULT_SCALE_LR if o["scale_lr"] is None else o["scale_lr"]
        self.factor_adams: list[tuple[torch.optim.Adam, float, float]] = []
        for kind in KINDS:
            rate = scale_lr.get(kind)
            if rate is not None:
                first, last = (rate, rate) if isinstance(rate, (int, float)) else rate
                self.factor_adams += [(adam(leaf), first, last) for leaf in trained[kind]]

    def map(self) -> Tensor:
        e, l, m, n = (r * c for r, c in self.pair.values())
        return sel_map(self.raw, e, l, m, n, self.beta, self.options["combine"])

    def weight(self) -> Tensor:
        weight = self.map()
        if self.B is not None:
            weight = weight + (self.B @ self.A).view(weight.shape)
        return weight

    def step(self, grad: Tensor, lr: float) -> None:
        o = self.options
        weight = self.weight()
        g = -grad if o["maximize"] else grad
        if o["weight_decay"] and not o["decoupled_weight_decay"]:
            g = g + o["weight_decay"] * weight.detach()
        leaves = [a.param_groups[0]["params"][0] for a, *_ in self.factor_adams]
        leaves += [a.param_groups[0]["params"][0] for a in self.residual_adams]
        (self.raw.grad,) = torch.autograd.grad(weight, self.raw, g, retain_graph=True)
        if leaves:
            # A non-finite element reaches only its own weight.
            safe = torch.where(torch.isfinite(g), g, 0.0)
            for leaf, gradient in zip(leaves, torch.autograd.grad(weight, leaves, safe), strict=True):
                leaf.grad = gradient
        if o["decoupled_weight_decay"]:
            with torch.no_grad():
                self.raw.mul_(1 - lr * o["weight_decay"])
        self.advance(self.raw_adam, lr / self.mean_slope)
        for adam, first, last in self.factor_adams:
            self.advance(adam, lr * multiplier(first, last, o["anneal_steps"], self.t))
        for adam in self.residual_adams:
            self.advance(adam, lr)
        self.t += 1

    @staticmethod
    def advance(adam: torch.optim.Adam, lr: float) -> None:
        adam.param_groups[0]["lr"] = lr
        adam.step()


class Oracle:
    """Trains copies of `params` as SELAdam has to; not curved parameters by torch.optim.Adam.

    Arguments:
        params: the initial weights, cast to float64.
        residuals: for residual_rank > 0, one (A, B) per curved parameter as the optimizer drew them, or None.
        options: SELAdam's, except callables; `curved` may also be a list of booleans, one per parameter.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        curved: str | Sequence[bool] = "matrices",
        combine: str = "mismatched",
        init: str = "preserve",
        beta: float | str = "width",
        lr_space: str = "weight",
        structure: str = "row_col",
        batch_dims: int = 0,
        scale_init: Mapping[str, Any] | None = None,
        scale_lr: Mapping[str, Any] | None = None,
        anneal_steps: int | None = None,
        residual_rank: int = 0,
        residuals: Sequence[tuple[Tensor, Tensor] | None] | None = None,
    ):
        shared: dict[str, Any] = {
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        options = shared | {
            "combine": combine,
            "init": init,
            "beta": beta,
            "lr_space": lr_space,
            "structure": structure,
            "batch_dims": batch_dims,
            "scale_init": scale_init,
            "scale_lr": scale_lr,
            "anneal_steps": anneal_steps,
        }
        assert (residual_rank > 0) == (residuals is not None)
        self.lr = lr
        self.curves: list[Curve | None] = []
        self.plain: list[tuple[Tensor, torch.optim.Adam] | None] = []
        for index, param in enumerate(params):
            weight = param.detach().double().clone(memory_format=torch.contiguous_format)
            if self._is_curved(curved, index, weight, beta):
                self.curves.append(Curve(weight, lr, residuals[index] if residuals else None, options))
                self.plain.append(None)
            else:
                leaf = weight.requires_grad_()
                self.curves.append(None)
                self.plain.append((leaf, torch.optim.Adam([leaf], lr, foreach=False, **shared)))

    @staticmethod
    def _is_curved(curved: str | Sequence[bool], index: int, weight: Tensor, beta: float | str) -> bool:
        if not isinstance(curved, str):
            return curved[index]
        if curved != "matrices":
            return curved == "all"
        large = isinstance(beta, str) and weight.numel() > 0 and weight.square().mean().sqrt().item() > 0.8
        return weight.ndim >= 2 and not large

    def step(self, grads: Sequence[Tensor | None], lr: float | None = None) -> None:
        """One step with these gradients of the weights; None leaves a parameter alone."""
        self.lr = self.lr if lr is None else lr
        for curve, plain, grad in zip(self.curves, self.plain, grads, strict=True):
            if grad is None:
                continue
            grad = grad.detach().double().contiguous()
            if curve is not None:
                curve.step(grad, self.lr)
            elif plain is not None:
                plain[0].grad = grad
                Curve.advance(plain[1], self.lr)

    def weights(self) -> list[Tensor]:
        """The weights of now, in the order of the parameters."""
        weights = []
        for curve, plain in zip(self.curves, self.plain, strict=True):
            if curve is not None:
                weights.append(curve.weight().detach())
            elif plain is not None:
                weights.append(plain[0].detach().clone())
        return weights

    def curve(self, index: int) -> Curve:
        curve = self.curves[index]
        assert curve is not None, f"parameter {index} is not curved"
        return curve

    def raw(self, index: int) -> Tensor:
        return self.curve(index).raw.detach().clone()

    def factors(self, index: int) -> dict[str, tuple[Tensor, Tensor]]:
        """kind -> (row, col), shaped to broadcast to the parameter; ones on a side that the structure lacks."""
        return {k: (r.detach().clone(), c.detach().clone()) for k, (r, c) in self.curve(index).pair.items()}

    def beta(self, index: int) -> float:
        return self.curve(index).beta
