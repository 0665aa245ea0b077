"""Does the best learning rate stay where it is when the model grows? SELAdam without mup's parametrisation, and with it.

A network of three hidden layers on scikit-learn's digits, at several widths, each trained at a grid of learning rates. The
narrowest is mup's base: there all arms are one. The best rate is where a parabola through the lowest loss and its neighbours has
its least. Needs mup and scikit-learn.

    python examples/benchmarks/width.py
"""

import argparse
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from runner import run_cases
from torch import Tensor, nn

from seloptim import SELAdam, param_groups

ARMS = ("without mup", "mup", "mup, scale_lr left alone")
SCALE_LR = {"e": (8.0, 1.3), "l": (8.0, 1.3), "m": (0.01, 0.5)}


def network(width: int, readout: type[nn.Linear]) -> nn.Sequential:
    hidden = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *hidden, readout(width, 10))


def curvature(name: str, p: Tensor) -> float:
    """The rule "auto" without its floor, so that the map bends at the same place of the weights' distribution at every width."""
    return max(2.0, 0.28 / float(p.detach().square().mean().sqrt()))


def network_and_optimizer(
    arm: str, base: int, width: int, lr: float, steps: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    options: dict[str, Any] = {
        "lr": lr,
        "beta": curvature,
        "anneal_steps": steps,
        "scale_lr": SCALE_LR,
        "lr_space": "raw",
    }
    if arm == "without mup":
        model = network(width, nn.Linear)
        return model, SELAdam(param_groups(model), **options)
    from mup import MuAdam, MuReadout, set_base_shapes

    model = network(width, MuReadout)
    set_base_shapes(model, network(base, MuReadout), delta=network(2 * base, MuReadout))
    # mup reads a shape from each parameter, so it takes them without names.
    groups = [{**group, "params": [p for _, p in group["params"]]} for group in param_groups(model)]
    optimizer = MuAdam(groups, impl=SELAdam, **options)
    if arm == "mup":
        for group in optimizer.param_groups:
            # A scale is a gain, of size 1 at every width: its rate is not to shrink with the matrices'.
            shrunk = lr / group["lr"]
            group["scale_lr"] = {kind: (shrunk * start, shrunk * end) for kind, (start, end) in SCALE_LR.items()}
    return model, optimizer


def loss_at(arm: str, base: int, width: int, lr: float, steps: int, seed: int) -> float:
    """Mean loss over the last fifth of a training; infinite where it diverged."""
    from sklearn.datasets import load_digits

    pixels, digits = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    pixels = (pixels.float() - 8) / 6
    torch.manual_seed(seed)
    batches = torch.Generator().manual_seed(seed)
    model, optimizer = network_and_optimizer(arm, base, width, lr, steps)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    losses: list[Tensor] = []
    for _ in range(steps):
        batch = torch.randint(len(digits), (128,), generator=batches)
        loss = nn.functional.cross_entropy(model(pixels[batch]), digits[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if not loss.isfinite():
            return math.inf
    return float(torch.stack(losses[-steps // 5 :]).mean())


def best(rates: list[float], losses: list[float]) -> float:
    """log2 of the best rate: the least of a parabola through the lowest log loss and its neighbours."""
    k = min(range(len(losses)), key=losses.__getitem__)
    x = math.log2(rates[k])
    if k in (0, len(losses) - 1) or not all(map(math.isfinite, losses[k - 1 : k + 2])):
        return x
    left, middle, right = (math.log(loss) for loss in losses[k - 1 : k + 2])
    return x + math.log2(rates[k + 1] / rates[k]) * (left - right) / (2 * (left - 2 * middle + right))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    arm, base, width, rates, steps, seeds = case.values()
    losses = [sum(loss_at(arm, base, width, lr, steps, seed) for seed in range(seeds)) / seeds for lr in rates]
    return {**case, "losses": losses, "log2_best": best(rates, losses)}


def shift(report: dict[str, Any], arm: str) -> float:
    """By how many factors of two the best rate moves from the narrowest network to the widest."""
    found = {case["width"]: case["log2_best"] for case in report["cases"] if case["arm"] == arm}
    return found[max(found)] - found[min(found)]


def table(report: dict[str, Any]) -> str:
    lines = ["", f"{'':26}{'width':>6}  {'best lr':>8}  {'loss':>6}"]
    for case in report["cases"]:
        lines.append(f"{case['arm']:26}{case['width']:6}  {2 ** case['log2_best']:8.2g}  {min(case['losses']):6.3f}")
    lines += [f"{arm}: the best lr moves by a factor of {2 ** shift(report, arm):.2g}" for arm in ARMS]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--rates", type=float, nargs=2, default=[-11, -4], help="log2 of the least and the greatest lr")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(arguments)
    rates = [2.0**k for k in range(int(args.rates[0]), int(args.rates[1]) + 1)]
    # At the upper end of the grid the optimizer warns, rightly, that lr is too large.
    warnings.filterwarnings("ignore", message="lr \\* beta", category=UserWarning)
    cases = [
        {"arm": arm, "base": min(args.widths), "width": width, "rates": rates, "steps": args.steps, "seeds": args.seeds}
        for arm in ARMS
        for width in args.widths
    ]
    run_cases(cases, measure, table, output=args.output)


if __name__ == "__main__":
    main()
