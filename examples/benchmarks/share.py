"""How much of a training step is the optimizer? examples/train_gpt.py's model, by default at width 1024 with two layers, 8,192 tokens.

    python examples/benchmarks/share.py --json examples/benchmarks/results/share.json      # minutes, and some 3 GB of memory

The clock is the CPU time of all threads. Adam(fused=True) and SELAdam(fused=True), all scales learned, step in turn on copies of the
model, over one gradient; forward and backward run before that, --passes times.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import train_gpt
from runner import machine

from seloptim import SELAdam, kernels, param_groups


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--passes", type=int, default=2, help="forward and backward passes to time (default 2)")
    parser.add_argument("--rounds", type=int, default=15, help="optimizer steps to time (default 15)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernels.build()
    text = train_gpt.load_text(None)
    torch.manual_seed(0)
    model = train_gpt.GPT(text.vocabulary, args.width, args.depth, args.width // 64, args.context)
    twin = copy.deepcopy(model)
    starts = torch.randint(len(text.train) - args.context, (args.batch,))
    inputs, targets = train_gpt.windows(text.train, starts, args.context, "cpu")

    def forward_and_backward() -> None:
        model.zero_grad()
        train_gpt.linear_cross_entropy(model(inputs), model.head.weight, targets).backward()

    passes = [seconds(forward_and_backward) for _ in range(args.passes)]
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    adam = torch.optim.Adam(model.parameters(), fused=True)
    sel = SELAdam(param_groups(twin), fused=True)
    times: dict[str, list[float]] = {"adam": [], "sel": []}
    for k in range(args.rounds + 2):
        for name, optimizer in (("adam", adam), ("sel", sel)):
            took = seconds(optimizer.step)
            if k >= 2:
                times[name].append(took)
    adam_s, sel_s, pass_s = (statistics.median(v) for v in (times["adam"], times["sel"], passes))
    report = {
        "machine": machine(),
        "width": args.width,
        "depth": args.depth,
        "tokens": args.batch * args.context,
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": args.threads,
        "forward and backward s": round(pass_s, 3),
        "Adam fused s": round(adam_s, 4),
        "SELAdam fused s": round(sel_s, 4),
        "extra, % of a step": round(100 * (sel_s - adam_s) / (pass_s + adam_s), 2),
    }
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
