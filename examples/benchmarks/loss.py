"""Time and peak memory of the fused cross-entropy, against plain PyTorch, torch's own fused function, and bare products.

    python examples/benchmarks/loss.py --output examples/benchmarks/results/loss.json
    python examples/benchmarks/loss.py --table examples/benchmarks/results/loss.json     # the tables of docs/loss.md

Forward and backward, mean reduction, no bias, hidden and weight both requiring grad. Everything compared runs interleaved
in one process; a ratio is the median over rounds of the ratio within a round, so that a slow moment of the machine hits both
sides. torch's chunk is tuned in three rounds first; its defaults (much slower) run once there.
Peak memory is the allocator's, above the inputs, gradients included, from one call under torch's profiler.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from runner import run_cases

from seloptim.losses import linear_cross_entropy

MIB = 1 << 20
TRIALS = 3
TORCH_CHUNKS = (128, 256, 512, 1024, 2048)
# (N, D, V, threads, share of ignored targets)
CASES = [
    *((n, 256, 16384, threads, ignored) for threads in (2, 1) for n in (1024, 2048) for ignored in (0.0, 0.75)),
    (2048, 256, 65536, 2, 0.0),
    (512, 768, 32768, 2, 0.0),
    (4096, 128, 4096, 2, 0.0),
    (1024, 64, 256, 2, 0.0),
]

Run = Callable[[], Any]


def contestants(n: int, d: int, v: int, ignored: float, device: str, dtype: torch.dtype) -> dict[str, Run]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(v, d, generator=generator) * 0.05).to(device, dtype).requires_grad_()
    target = torch.randint(0, v, (n,), generator=generator)
    target = target.masked_fill(torch.rand(n, generator=generator) < ignored, -100).to(device)

    def step(loss: Callable[[], torch.Tensor]) -> Run:
        def run() -> None:
            hidden.grad = weight.grad = None
            loss().backward()

        return run

    def theirs(options: Any) -> Callable[[], torch.Tensor]:
        return lambda: F.linear_cross_entropy(hidden, weight, target, options=options)

    def products() -> None:
        """What no implementation can do without: the logits of the kept rows, dX and dW, in chunks of 512 rows."""
        x, w = hidden.detach(), weight.detach()
        rows = x[target != -100]
        dw = torch.zeros_like(w)
        for part in rows.split(512):
            z = part @ w.t()
            z @ w
            dw.addmm_(z.t(), part)

    runs: dict[str, Run] = {
        "plain": step(lambda: F.cross_entropy(F.linear(hidden, weight), target)),
        "fused": step(lambda: linear_cross_entropy(hidden, weight, target)),
        "products": products,
        "torch default": step(theirs(torch.nn.LinearCrossEntropyOptions())),
    }
    for rows in TORCH_CHUNKS:
        if rows <= n:
            runs[f"torch {rows}"] = step(theirs(torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)))
    if device == "cuda":
        try:
            from liger_kernel.transformers.functional import (  # pyright: ignore[reportMissingImports]
                liger_fused_linear_cross_entropy,
            )
        except ImportError:
            print("liger-kernel is not installed: left out", file=sys.stderr)
        else:
            runs["liger"] = step(lambda: liger_fused_linear_cross_entropy(hidden, weight, target))
    return runs


def timed(run: Run, device: str) -> float:
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_mib(run: Run, device: str) -> float:
    run()
    if device == "cuda":
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return (torch.cuda.max_memory_allocated() - base) / MIB
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events: list[Any] = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = list(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
    # The gradients of the call before are freed at the start and made again: count from the lowest point.
    return (max(held) - min(0, *held)) / MIB


def measure(case: tuple[int, int, int, int, float], rounds: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    n, d, v, threads, ignored = case
    torch.set_num_threads(threads)
    runs = contestants(n, d, v, ignored, device, dtype)
    # Tuning: a few rounds over every chunk of torch's function. The quickest stays for the rounds that count.
    trial: dict[str, list[float]] = {name: [] for name in runs}
    for k in range(1 + TRIALS):
        for name, run in runs.items():
            if name != "torch default" or k == TRIALS:
                trial[name].append(timed(run, device))
    tuned = {name: statistics.median(t[-TRIALS:]) for name, t in trial.items()}
    best = min((name for name in runs if name.startswith("torch ")), key=lambda name: tuned[name])
    kept = [name for name in runs if name == best or not name.startswith("torch ")]
    times: dict[str, list[float]] = {name: [] for name in kept}
    for _ in range(rounds):
        for name in kept:
            times[name].append(timed(runs[name], device))

    def ratio(a: str, b: str) -> float:
        return round(statistics.median(x / y for x, y in zip(times[a], times[b], strict=True)), 3)

    return {
        "N": n, "D": d, "V": v, "threads": threads, "ignored": ignored, "rounds": rounds,
        "ms": {name: round(1e3 * statistics.median(t), 2) for name, t in times.items()},
        "tuning ms": {name: round(1e3 * t, 2) for name, t in tuned.items()},
        "fused / plain": ratio("fused", "plain"),
        "torch best": best,
        "fused / torch best": ratio("fused", best),
        "fused / torch default": round(tuned["fused"] / tuned["torch default"], 3),
        "fused / products": ratio("fused", "products"),
        "peak MiB": {
            name: round(peak_mib(runs[name], device), 1)
            for name in dict.fromkeys(["plain", "fused", "torch default", best, *(["liger"] if "liger" in runs else [])])
        },
    }  # fmt: skip


def table(report: dict[str, Any]) -> str:
    lines = [
        "| N | D | V | threads | ignored | plain ms | fused ms | fused / plain | torch best (rows) | fused / torch best "
        "| fused / torch default | fused / products | peak MiB: fused | plain | torch best | torch default |",
        "|" + "---:|" * 16,
    ]
    for r in report["cases"]:
        best, peak = r["torch best"], r["peak MiB"]
        cells = [
            r["N"], r["D"], r["V"], r["threads"], r["ignored"], r["ms"]["plain"], r["ms"]["fused"], r["fused / plain"],
            f"{r['ms'][best]} ({best.removeprefix('torch ')})", r["fused / torch best"], r["fused / torch default"],
            r["fused / products"], peak["fused"], peak["plain"], peak[best], peak["torch default"],
        ]  # fmt: skip
        lines.append("| " + " | ".join(str(c) for c in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", type=int, nargs="*", help="indices of the cases to run")
    parser.add_argument("--output", type=Path, help="write JSON here, after every case")
    parser.add_argument("--table", type=Path, metavar="JSON", help="print the table of an earlier run, and stop")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return
    cases, dtype = list(CASES), torch.float32
    if args.device == "cuda":
        cases, dtype = [(8192, 4096, 128256, 1, 0.0)], torch.bfloat16
    if args.only is not None:
        cases = [cases[i] for i in args.only]
    run_cases(
        cases,
        lambda case: measure(case, args.rounds, args.device, dtype),
        table,
        device=args.device,
        output=args.output,
    )


if __name__ == "__main__":
    main()
