"""Do curved weights grow heavier tails, and which weights move? AdamW and SELAdam over one training, matrices pooled.

    python examples/benchmarks/tails.py --json examples/benchmarks/results/tails.json      # about a minute

Excess kurtosis is 0 for a normal distribution. A weight's move is its distance from the start, and the table has the mean
move of the tenth of each matrix that was smallest at the start, and of the tenth that was largest.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import efficiency
from runner import machine

TASK = efficiency.Task("gpt", 64, 2, 400)
ARMS = (
    (efficiency.ADAM, 8e-3),
    (efficiency.sel("lr_space weight", lr_space="weight"), 8e-3),
    (efficiency.sel("lr_space raw", lr_space="raw"), 4e-3),
)


def excess_kurtosis(x: torch.Tensor) -> float:
    centred = x.double() - x.double().mean()
    return (centred.pow(4).mean() / centred.square().mean().square()).item() - 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = {"machine": machine(), "task": str(TASK), "rows": []}
    print("| optimizer | lr | step | excess kurtosis | move of the smallest tenth | of the largest tenth |")
    print("|---|---|---|---|---|---|")
    for family, lr in ARMS:
        seen: list[dict[str, float]] = []
        start: dict[str, torch.Tensor] = {}

        def watch(model: torch.nn.Module, step: int, seen=seen, start=start) -> None:
            matrices = {name: p.detach() for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name}
            if not start:
                start.update((name, p.clone()) for name, p in matrices.items())
            tails, small, large = [], [], []
            for name, p in matrices.items():
                tails.append(excess_kurtosis(p))
                order = start[name].abs().flatten().argsort()
                moved, tenth = (p - start[name]).abs().flatten()[order], order.numel() // 10
                small.append(moved[:tenth].mean().item())
                large.append(moved[-tenth:].mean().item())
            seen.append(
                {
                    "step": step,
                    **{k: statistics.fmean(v) for k, v in (("kurtosis", tails), ("small", small), ("large", large))},
                }
            )

        efficiency.run(TASK, family, lr, 0, watch)
        for row in seen:
            report["rows"].append({"optimizer": family.label, "lr": lr, **row})
            print(
                f"| {family.label} | {lr:g} | {row['step']} | {row['kurtosis']:.2f} | {row['small']:.4f} | {row['large']:.4f} |"
            )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
