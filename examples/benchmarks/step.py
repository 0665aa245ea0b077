"""Time of one optimizer step: every path of SELAdam against torch.optim.Adam, fused and foreach.

    python examples/benchmarks/step.py --output examples/benchmarks/results/step.json
    python examples/benchmarks/step.py --device cuda --output examples/benchmarks/results/step_cuda.json
    python examples/benchmarks/step.py --table examples/benchmarks/results/step.json     # the table of docs/performance.md

Everything compared steps in turn in one process; a ratio is the median over rounds of the ratio within a round. On one thread the clock
is the thread's CPU time, so that waiting for a core does not count; what shares the core's caches and arithmetic still does.
On more threads it is the wall clock. "memory" is the growth of the peak of resident memory during one step (Linux).
On a CUDA device "native" is the Triton kernel, the clock is that of device events around a step, and memory is the device's.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from runner import run_cases

from seloptim import SELAdam, kernels

GPT2 = [
    (50257, 768),
    (1024, 768),
    *[shape for _ in range(12) for shape in ((2304, 768), (768, 768), (3072, 768), (768, 3072))],
]
# name, shapes, whether the eager paths run too
SIZES: list[tuple[str, list[tuple[int, int]], bool]] = [
    ("8 of 1024 x 1024", [(1024, 1024)] * 8, True),
    ("8 of 512 x 2048", [(512, 2048)] * 8, True),
    ("64 of 256 x 256", [(256, 256)] * 64, True),
    ("2 of 4096 x 4096", [(4096, 4096)] * 2, False),
    ("GPT-2 124M", GPT2, False),
    ("16 of 1024 x 1024", [(1024, 1024)] * 16, True),
]
STEPS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "Adam single": lambda p: torch.optim.Adam(p, foreach=False),
    "native": lambda p: SELAdam(p, curved="all", fused=True),
    "native, frozen": lambda p: SELAdam(p, curved="all", fused=True, structure="none"),
    "eager": lambda p: SELAdam(p, curved="all", foreach=False),
    "eager, batched": lambda p: SELAdam(p, curved="all", foreach=True),
    "eager, frozen": lambda p: SELAdam(p, curved="all", foreach=False, structure="none"),
}


def optimizer_of(name: str, shapes: list[tuple[int, int]], device: str) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in shapes:
        p = torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(device))
        p.grad = (torch.randn(shape, generator=generator) * 0.01).to(device)
        params.append(p)
    return STEPS[name](params)


def seconds(step: Callable[[], Any], clock: Callable[[], float], device: str) -> float:
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    before = clock()
    step()
    return clock() - before


def peak_growth_kib(step: Callable[[], Any], device: str) -> int | None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) >> 10
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        return None

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key))

    clear.write_text("5")
    before = status("VmRSS")
    step()
    return status("VmHWM") - before


def measure(
    size: tuple[str, list[tuple[int, int]], bool], threads: int, rounds: int, device: str = "cpu"
) -> dict[str, Any]:
    label, shapes, eager = size
    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    names = [name for name in STEPS if eager or not name.startswith(("eager", "Adam single"))]
    steps = {name: optimizer_of(name, shapes, device).step for name in names}
    for step in steps.values():
        step()
        step()
    memory = {name: peak_growth_kib(step, device) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in names}
    for k in range(rounds):
        for name, step in steps.items():
            if name.startswith("eager") and k % 4:
                continue
            times[name].append(seconds(step, clock, device))

    def ratio(name: str, base: str = "Adam fused") -> float:
        every = 4 if name.startswith("eager") else 1
        return round(statistics.median(a / b for a, b in zip(times[name], times[base][::every], strict=True)), 2)

    return {
        "size": label,
        "threads": threads,
        "clock": "events" if device == "cuda" else "thread" if threads == 1 else "wall",
        "rounds": rounds,
        "ms": {name: round(1e3 * statistics.median(t), 2) for name, t in times.items()},
        "of Adam fused": {name: ratio(name) for name in names},
        "of Adam single": {name: ratio(name, "Adam single") for name in names if name.startswith("eager")},
        "memory KiB": memory,
    }


def table(report: dict[str, Any]) -> str:
    names = list(STEPS)
    lines = [
        "| size | threads | Adam fused ms | " + " | ".join(names[1:]) + " | native KiB |",
        "|---|" + "---:|" * (len(names) + 2),
    ]
    for case in report["cases"]:
        ratios = [str(case["of Adam fused"].get(name, "")) for name in names[1:]]
        cells = [case["size"], case["threads"], case["ms"]["Adam fused"], *ratios, case["memory KiB"]["native"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, nargs="*", help="default: 1 and 2 on a CPU, 1 with a CUDA device")
    parser.add_argument("--only", type=int, nargs="*", help="indices of the sizes to run")
    parser.add_argument("--output", type=Path, help="write JSON here, after every case")
    parser.add_argument("--table", type=Path, metavar="JSON", help="print the table of an earlier run, and stop")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return
    if args.device == "cpu":
        kernels.build()
    elif not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    threads = args.threads or ([1, 2] if args.device == "cpu" else [1])
    sizes = [SIZES[i] for i in args.only] if args.only is not None else SIZES
    cases = [(size, count) for size in sizes for count in threads]
    run_cases(
        cases, lambda case: measure(*case, args.rounds, args.device), table, device=args.device, output=args.output
    )


if __name__ == "__main__":
    main()
