"""Does the loss jump where a run changes its optimizer? Adam, SELAdam, Adam again, with the moments converted or zeroed.

    python examples/benchmarks/seams.py --json examples/benchmarks/results/seams.json      # what the docs show
    python examples/benchmarks/seams.py                 # 500 steps each on a small byte-level GPT: minutes on two cores
    python examples/benchmarks/seams.py --steps 100     # a look

The three arms see the same batches: "adam" never changes; "converted" goes through load_state_dict and
seloptim.convert.to_adam at its seams; "zeroed" starts each optimizer anew. At each seam the table has the mean training loss
over the 20 steps behind it as an excess over the arm that never changed, beside the noise of such a mean: the spread of
the same arm's loss from step to step, over the square root of 20.
"""

import argparse
import copy
import json
import math
import platform
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_gpt

from seloptim import SELAdam, param_groups
from seloptim.convert import to_adam

WINDOW = 20


def step(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    loss = train_gpt.plain_loss(model(inputs), model.head.weight, targets)
    loss.backward()
    optimizer.step()
    return loss.item()


def change(model, optimizer, arm, lr):
    """The other optimizer for the same model, in the order in which param_groups lists the parameters."""
    groups = param_groups(model)
    if isinstance(optimizer, SELAdam):
        other = torch.optim.Adam([{"params": group["params"]} for group in groups], lr=lr)
        state = to_adam(optimizer)
    else:
        other = SELAdam(groups, lr=lr)
        state = optimizer.state_dict()
    if arm == "converted":
        other.load_state_dict(state)
    return other


def run(arm, model, batches, steps, lr):
    optimizer = torch.optim.Adam([{"params": group["params"]} for group in param_groups(model)], lr=lr)
    losses = []
    for k, batch in enumerate(batches):
        if k and k % steps == 0 and arm != "adam":
            optimizer = change(model, optimizer, arm, lr)
        losses.append(step(model, optimizer, *batch))
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="of each of the three stretches (default 500)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the losses and the table to this file")
    args = parser.parse_args()
    text = train_gpt.load_text(None)
    generator = torch.Generator().manual_seed(0)
    context, count = 64, 8
    starts = torch.randint(len(text.train) - context - 1, (3 * args.steps, count), generator=generator)
    batches = [train_gpt.windows(text.train, row, context, "cpu") for row in starts]
    torch.manual_seed(0)
    model = train_gpt.GPT(text.vocabulary, args.width, 2, 4, context)
    losses = {
        arm: run(arm, copy.deepcopy(model), batches, args.steps, args.lr) for arm in ("adam", "converted", "zeroed")
    }
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads, {args}")
    table = []
    for seam, name in ((args.steps, "Adam -> SELAdam"), (2 * args.steps, "SELAdam -> Adam")):
        for arm in ("converted", "zeroed"):
            excess = [a - b for a, b in zip(losses[arm], losses["adam"], strict=True)]
            before = statistics.fmean(excess[seam - WINDOW : seam])
            jump = statistics.fmean(excess[seam : seam + WINDOW]) - before
            noise = statistics.stdev(losses["adam"][seam : seam + 5 * WINDOW]) / math.sqrt(WINDOW)
            table.append({"seam": name, "arm": arm, "jump": jump, "noise": noise})
            print(f"{name:16} {arm:10} jump in loss {jump:+.4f}   noise {noise:.4f}")
    for arm, values in losses.items():
        print(f"{arm:10} loss over the last 50 steps {statistics.fmean(values[-50:]):.4f}")
    if args.json:
        rounded = {arm: [round(value, 4) for value in values] for arm, values in losses.items()}
        args.json.write_text(
            json.dumps({"torch": torch.__version__, "steps": args.steps, "table": table, "losses": rounded}) + "\n"
        )


if __name__ == "__main__":
    main()
