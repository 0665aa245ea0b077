"""Fine-tune with SELAdam what Adam has trained: with init="preserve" the first loss is the old one, to the last digit.

A small byte-level GPT learns Python from the sources of asyncio, then English from the language reference.
"""

import asyncio
import pydoc_data.topics
from pathlib import Path

import torch
from train_gpt import BYTES, GPT, as_bytes, windows

from seloptim import SELAdam, linear_cross_entropy, param_groups

CONTEXT, BATCH, STEPS = 64, 8, 120


def batch(tokens, generator):
    starts = torch.randint(len(tokens) - CONTEXT, (BATCH,), generator=generator)
    return windows(tokens, starts, CONTEXT, "cpu")


def loss_on(model, inputs, targets):
    return linear_cross_entropy(model(inputs), model.head.weight, targets)


def train(model, optimizer, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_on(model, *batch(tokens, generator)).backward()
        optimizer.step()


def main():
    python = as_bytes(b"".join(path.read_bytes() for path in sorted(Path(asyncio.__file__).parent.glob("*.py"))))
    english = as_bytes("\n".join(pydoc_data.topics.topics.values()).encode())
    test_batch = batch(english[-20_000:], torch.Generator().manual_seed(0))
    english = english[:-20_000]

    torch.manual_seed(0)
    model = GPT(BYTES, width=64, depth=2, heads=2, context=CONTEXT)
    train(model, torch.optim.Adam(model.parameters(), lr=3e-3), python, seed=1)
    with torch.no_grad():
        before = loss_on(model, *test_batch).item()

    optimizer = SELAdam(param_groups(model), lr=1e-3, init="preserve")
    with torch.no_grad():
        after = loss_on(model, *test_batch).item()
    print(f"loss on English after Adam's training:  {before!r}")
    print(f"loss on English with SELAdam at step 0: {after!r}")

    train(model, optimizer, english, seed=2)
    with torch.no_grad():
        print(f"loss on English after {STEPS} steps of it:   {loss_on(model, *test_batch).item()!r}")


if __name__ == "__main__":
    main()
