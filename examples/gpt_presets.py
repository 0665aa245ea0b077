"""The nine sizes of the paper's GPT as flags of train_gpt.py, and what a run will take, before it starts."""

from typing import NamedTuple

import torch

WIDTHS, DEPTHS = (1024, 2048, 3072), (12, 24, 36)
GPT2_VOCABULARY = 50304  # GPT-2's 50257 tokens and room up to a multiple of 64

# From the paper: the sizes, OpenWebText, the rates of the scales over 150,000 steps. From nanoGPT: context, warm-up, sequences
# in a step. Ours: heads of 64 dimensions, and the rate, of which the paper's value is not known to us.
COMMON = {
    "context": 1024,
    "batch": 16,
    "accumulate": 30,
    "steps": 150_000,
    "warmup": 2000,
    "eval_every": 1000,
    "save_every": 1000,
    "beta": "width",
    "scale_lr": "paper",
    "autocast": True,
    "vocabulary": GPT2_VOCABULARY,
}
PRESETS = {
    f"{width}x{depth}": {**COMMON, "width": width, "depth": depth, "heads": width // 64, "lr": 3e-4 * 1024 / width}
    for width in WIDTHS
    for depth in DEPTHS
}


class Estimate(NamedTuple):
    """All counts by arithmetic, checked against the model by a test."""

    parameters: int
    products: int  # parameters that stand in a matrix product: all but embeddings and norms
    flops_per_token: int  # forward and backward
    flops: int  # of the whole run, for one optimizer
    bytes_each: dict[str, int]  # optimizer -> weights, gradients and state on each process; activations come on top


def estimate(args, ranks):
    width, depth, vocabulary = args.width, args.depth, args.vocabulary
    products = 12 * depth * width**2 + vocabulary * width
    parameters = products + (vocabulary + args.context) * width + 2 * (2 * depth + 1) * width
    # 2 for the multiplication and the addition, 3 for forward and twice as much backward; attention over half the context.
    per_token = 6 * products + 6 * depth * width * args.context
    tokens = args.steps * args.batch * args.accumulate * args.context
    size = getattr(torch, args.dtype).itemsize
    # A matrix (rows, cols) has (rows + cols) factors of four kinds, each with two moments, in float32.
    sides = depth * ((3 + 1) * width + (1 + 1) * width + (4 + 1) * width + (1 + 4) * width) + vocabulary + width
    state = {"adam": 2 * size * parameters, "sel": 12 * products + 2 * size * (parameters - products) + 48 * sides}
    share = ranks if args.parallel == "fsdp" else 1
    each = {name: (2 * size * parameters + held) // share for name, held in state.items()}
    return Estimate(parameters, products, per_token, per_token * tokens, each)


def print_estimate(args, names, ranks):
    found = estimate(args, ranks)
    tokens = args.batch * args.accumulate * args.context
    print(
        f"preset {args.preset}: width {args.width}, depth {args.depth}, heads {args.heads}, vocabulary {args.vocabulary}"
    )
    print(f"parameters   {found.parameters:,}, of which {found.products:,} in matrix products")
    for name in names:
        memory = found.bytes_each[name] / 2**30
        print(f"memory       {memory:,.1f} GiB on each of {ranks} processes with {name}, and activations")
    print(
        f"compute      {found.flops_per_token / 1e9:,.2f} GFLOP a token, {tokens:,} tokens a step, "
        f"{found.flops / 1e18:,.0f} EFLOP for {args.steps:,} steps, each optimizer",
        flush=True,
    )
