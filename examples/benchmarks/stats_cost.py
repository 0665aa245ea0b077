"""What a call of optimizer.stats() costs, beside a step of the optimizer: python examples/benchmarks/stats_cost.py"""

import time
from collections.abc import Callable

import torch

from seloptim import SELAdam


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, 1 CPU thread; medians of 21, interleaved")
    for count, rows, cols in ((2, 1024, 1024), (8, 1024, 256), (16, 64, 64)):
        params = [torch.nn.Parameter(torch.randn(rows, cols) * 0.02) for _ in range(count)]
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer = SELAdam(params)
        optimizer.step()
        optimizer.stats()
        pairs = [(timed(optimizer.step), timed(optimizer.stats)) for _ in range(21)]
        step, stats = (sorted(times)[10] for times in zip(*pairs, strict=True))
        print(
            f"{count:3} x {rows} x {cols}: step {step * 1e3:6.2f} ms, stats {stats * 1e3:6.2f} ms, ratio {stats / step:.2f}"
        )


if __name__ == "__main__":
    main()
