"""Ideas for a real gain over tuned AdamW, each as small as it can be tried; efficiency.py --suite ideas measures them.

They live here and not in the package: none of them has earned an option (docs/evidence.md says what each did).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from seloptim import SELAdam, param_groups
from seloptim.functional import sel_inverse, sel_pullback
from seloptim.init import calibrate_beta


def orthogonalize(update: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly: five Newton-Schulz steps of torch.optim.Muon's quintic."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = update.mT if update.shape[0] > update.shape[1] else update
    x = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if update.shape[0] > update.shape[1] else x


def slope(weight: Tensor, beta: float) -> Tensor:
    """d weight / d raw of the congruent map with scales of 1 at this weight, without its raw: 1 + beta*|weight| nearly."""
    return 1 / beta + 1 + beta * weight.abs()


class Sloped(torch.optim.Optimizer):
    """Adam's or Muon's direction in weight space times the slope, and nothing else of SEL: no raw weights, no scales.

    direction: "adam", or "muon" (orthogonal, at Adam's size).
    power: of the slope; 1 is what SEL does to first order, 2 keeps Adam's second moment in weight space.
    mean: the slope is divided by its mean over the "tensor", each "row", or each "col".
    before: multiply the gradient too, as a pull through the map does, before the direction is found from it.
    renormalize: give the direction back its own size, per mean's unit, after the slope.
    """

    def __init__(self, params: Any, lr: float, direction: str, power: float, mean: str = "tensor", before: bool = False,
                 renormalize: bool = False, beta: float | None = None) -> None:  # fmt: skip
        defaults = {"direction": direction, "power": power, "mean": mean, "before": before, "renormalize": renormalize}
        super().__init__(params, {"lr": lr, "beta": beta, **defaults})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            dims = {"tensor": None, "row": 1, "col": 0}[group["mean"]]
            for p in group["params"]:
                state, g, matrix = self.state[p], p.grad, p.ndim == 2
                if not state:
                    state["beta"] = group["beta"] or calibrate_beta(p, "auto")
                    state["exp_avg"], state["exp_avg_sq"], state["step"] = torch.zeros_like(p), torch.zeros_like(p), 0
                state["step"] += 1
                factor = slope(p, state["beta"])
                over = dims if matrix else None
                factor = (factor / factor.mean(dim=over, keepdim=True)) ** group["power"]
                if group["before"]:
                    g = g * factor
                if group["direction"] == "muon" and matrix:
                    state["exp_avg"].lerp_(g, 0.05)
                    update = orthogonalize(g.lerp(state["exp_avg"], 0.95)) * 0.2 * math.sqrt(max(p.shape))
                else:
                    state["exp_avg"].lerp_(g, 0.1)
                    state["exp_avg_sq"].lerp_(g.square(), 0.001)
                    update = state["exp_avg"] / (1 - 0.9 ** state["step"])
                    update = update / ((state["exp_avg_sq"] / (1 - 0.999 ** state["step"])).sqrt() + 1e-8)
                moved = update * factor
                if group["renormalize"]:
                    size = update.square().mean(dim=over, keepdim=True) / moved.square().mean(dim=over, keepdim=True)
                    moved = moved * size.clamp(max=1e12).sqrt()
                p.sub_(moved, alpha=group["lr"])


class Scaled(torch.optim.Optimizer):
    """weight[i, j] = row[i] * col[j] * inner[i, j]: SEL's scales without its curve, trained in log space or not.

    inner moves by Adam or Muon ("adam", "muon"), the scales by Adam with multiples of lr from start to end over the run.
    """

    def __init__(self, params: Any, lr: float, direction: str, log: bool, multiple: tuple[float, float], steps: int,
                 decay: float = 0.0) -> None:  # fmt: skip
        super().__init__(
            params, {"lr": lr, "direction": direction, "log": log, "multiple": multiple, "steps": steps, "decay": decay}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    ones = torch.zeros if group["log"] else torch.ones
                    state.update(step=0, inner=p.clone())
                    state["row"], state["col"] = ones(p.shape[0], 1), ones(1, p.shape[1])
                    for name in ("inner", "row", "col"):
                        state[name + "_1"], state[name + "_2"] = (
                            torch.zeros_like(state[name]),
                            torch.zeros_like(state[name]),
                        )
                state["step"] += 1
                row, col = (state[k].exp() if group["log"] else state[k].clone() for k in ("row", "col"))
                base = p.grad * state["inner"]
                grads = {"row": (base * col).sum(1, keepdim=True), "col": (base * row).sum(0, keepdim=True)}
                if group["log"]:
                    grads = {"row": grads["row"] * row, "col": grads["col"] * col}
                start, end = group["multiple"]
                phase = (1 - math.cos(math.pi * min(state["step"] / group["steps"], 1))) / 2
                multiple = start * (end / start) ** phase
                inner_grad = p.grad * row * col
                if group["direction"] == "muon":
                    state["inner_1"].lerp_(inner_grad, 0.05)
                    update = orthogonalize(inner_grad.lerp(state["inner_1"], 0.95)) * 0.2 * math.sqrt(max(p.shape))
                else:
                    update = self._adam(state, "inner", inner_grad)
                state["inner"].mul_(1 - group["lr"] * group["decay"]).sub_(update, alpha=group["lr"])
                for name, g in grads.items():
                    state[name].sub_(self._adam(state, name, g), alpha=group["lr"] * multiple)
                row, col = (state[k].exp() if group["log"] else state[k] for k in ("row", "col"))
                p.copy_(state["inner"] * row * col)

    @staticmethod
    def _adam(state: dict[str, Any], name: str, g: Tensor) -> Tensor:
        first, second, step = state[name + "_1"], state[name + "_2"], state["step"]
        first.lerp_(g, 0.1)
        second.lerp_(g.square(), 0.001)
        return first / (1 - 0.9**step) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)


class MovingBeta(SELAdam):
    """SELAdam whose curvature changes during training; the weights stay, raw and its moments follow.

    plan: (done share of the run, parameter, its first beta) -> the curvature that it should have now; asked every tenth step.
    """

    def plan_by(self, plan: Callable[[float, Tensor, float], float], steps: int) -> None:
        self._plan, self._steps, self._first = plan, steps, {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for _, p in self.named_curved():
            raw, done = self.raw(p), float(self.state[p]["step"])
            if done % 10 or not done:
                continue
            old = self.beta(p)
            new = self._plan(done / self._steps, p, self._first.setdefault(p, old))
            scales = {kind: row * col for kind, (row, col) in self.scales(p).items()}
            combine = self.defaults["combine"]
            try:
                inverted = sel_inverse(p.double(), **scales, beta=new, combine=combine).to(raw.dtype)
            except ValueError:
                continue  # a branch turns at this curvature: keep the old one
            ones = torch.ones_like(raw)
            ratio = sel_pullback(ones, inverted, **scales, beta=new, combine=combine)[0]
            ratio = ratio / sel_pullback(ones, raw, **scales, beta=old, combine=combine)[0]
            state = self.state[p]
            state["raw"].copy_(inverted)
            state["beta"] = new
            state["exp_avg"].mul_(ratio)
            state["exp_avg_sq"].mul_(ratio.square())
        return super().step(closure)


def toward(start: float, end: float) -> Callable[[float, Tensor, float], float]:
    """Curvature times start at first and times end at last, evenly in logarithm."""
    return lambda done, p, first: max(2.0, first * start * (end / start) ** done)


PLANS: dict[str, Callable[[float, Tensor, float], float]] = {
    "rms": lambda done, p, first: calibrate_beta(p, "auto"),
    "in": toward(0.2, 2.0),
    "out": toward(2.0, 0.2),
}


def make_idea(model: nn.Module, lr: float, steps: int, settings: dict[str, Any]) -> list[torch.optim.Optimizer]:
    """The optimizers of one idea: the matrices by it, the rest by Adam."""
    settings = dict(settings)
    name = settings.pop("idea")
    if name == "moving beta":
        specified = {
            "lr_space": "raw",
            "beta": "auto",
            "scale_lr": {"e": (8.0, 1.3), "l": (8.0, 1.3), "m": (0.01, 0.5)},
        }
        optimizer = MovingBeta(param_groups(model), lr=lr, anneal_steps=steps, init="mismatched", **specified)
        optimizer.plan_by(PLANS[settings["plan"]], steps)
        return [optimizer]
    curved = [p for group in param_groups(model) if group["curved"] for _, p in group["params"] if p.ndim == 2]
    chosen = set(curved)
    rest = [p for p in model.parameters() if p not in chosen]
    rest_lr = lr / 2 if settings["direction"] == "muon" else lr
    if name == "sloped":
        first: torch.optim.Optimizer = Sloped(curved, lr, **settings)
    else:
        first = Scaled(curved, lr, steps=steps, **settings)
    return [first, torch.optim.Adam(rest, lr=rest_lr)]
