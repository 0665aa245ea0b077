"""Memory of the state and of a step, Adam's and SELAdam's, on one stack of matrices.

    python examples/benchmarks/memory.py                        # 8 matrices of 1024 x 1024
    python examples/benchmarks/memory.py --device cuda

State: what optimizer.state holds after a step. Step: the most that a step holds beyond what was held before it.
"""

import argparse
import platform
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train_gpt import peak

from seloptim import SELAdam

ARMS = {
    "Adam, one by one": lambda params: torch.optim.Adam(params, foreach=False),
    "Adam, foreach": lambda params: torch.optim.Adam(params, foreach=True),
    "SELAdam, one by one": lambda params: SELAdam(params, foreach=False),
    "SELAdam, foreach": lambda params: SELAdam(params, foreach=True),
}


def measure(make, dtype, args):
    torch.manual_seed(0)
    weights = (torch.randn(args.size, args.size, device=args.device) * 0.02 for _ in range(args.count))
    params = [nn.Parameter(weight.to(dtype)) for weight in weights]
    optimizer = make(params)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    state = sum(t.nbytes for values in optimizer.state.values() for t in values.values() if torch.is_tensor(t))
    return state / (args.count * args.size**2), peak(optimizer.step, args.device) / (args.count * args.size**2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of a matrix")
    parser.add_argument("--count", type=int, default=8, help="of matrices")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.machine()}, {args}")
    print(f"{'':22}{'dtype':>10}{'state, bytes a parameter':>28}{'step, bytes a parameter':>28}")
    for dtype in (torch.float32, torch.bfloat16):
        for name, make in ARMS.items():
            state, step = measure(make, dtype, args)
            print(f"{name:22}{str(dtype).removeprefix('torch.'):>10}{state:28.2f}{step:28.2f}")


if __name__ == "__main__":
    main()
