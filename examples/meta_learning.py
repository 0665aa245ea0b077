"""Learn to learn digits: meta-gradients through three curved Adam steps train an initialisation and the rates of the scales.

    python examples/meta_learning.py --plot meta.png

A task is three of scikit-learn's digits in random order, five images of each to learn from and fifteen others to be tested
on. The tasks of the test have images that no meta-step has seen. The inner loop is `sel_adam`, a TorchOpt transformation
that can be differentiated. What is learned is where it starts, and how fast the scales e, l and m of each weight move.
Needs torchopt, scikit-learn and, for the plot, matplotlib.
"""

import argparse

import torch
import torchopt
from sklearn.datasets import load_digits
from torch.func import functional_call
from torch.nn import functional as F

from seloptim.transform import sel_adam

WAYS, SHOTS, QUERIES, INNER_STEPS = 3, 5, 15, 3


def draw(images, labels, generator):
    """One task: (inputs, targets) to learn from and to be tested on; which digit is which class is random."""
    support, query = [], []
    for place, digit in enumerate(torch.randperm(10, generator=generator)[:WAYS]):
        mine = images[labels == digit]
        mine = mine[torch.randperm(len(mine), generator=generator)[: SHOTS + QUERIES]]
        support.append((mine[:SHOTS], torch.full((SHOTS,), place)))
        query.append((mine[SHOTS:], torch.full((QUERIES,), place)))
    return [tuple(map(torch.cat, zip(*part, strict=True))) for part in (support, query)]


def adapt(model, params, rates, task):
    """Three steps on a task from `params`: the loss and the accuracy on its test images, before and after each."""
    (x, y), (test_x, test_y) = task
    # A large eps keeps meta-gradients small where a gradient is nearly zero: Adam's step there is a steep function of it.
    optimizer = sel_adam(3e-3, eps=1e-3, beta="auto", scale_lr={kind: rate.exp() for kind, rate in rates.items()})
    state = optimizer.init(params)
    losses, right = [], []
    for step in range(INNER_STEPS + 1):
        logits = functional_call(model, params, (test_x,))
        losses.append(F.cross_entropy(logits, test_y))
        right.append((logits.argmax(1) == test_y).float().mean())
        if step < INNER_STEPS:
            loss = F.cross_entropy(functional_call(model, params, (x,)), y)
            grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
            grads = dict(zip(params, grads, strict=True))
            updates, state = optimizer.update(grads, state, params=params, inplace=False)
            params = torchopt.apply_updates(params, updates, inplace=False)
    return torch.stack(losses), torch.stack(right)


def evaluate(model, params, rates, tasks):
    """Means over tasks of what adapt() returns, without the meta-graph."""
    found = []
    for task in tasks:
        params = {name: p.detach().requires_grad_() for name, p in params.items()}
        found.append(torch.stack(adapt(model, params, rates, task)).detach())
    return torch.stack(found).mean(0)


def plot(path, before, after, history):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for name, found in (("before meta-training", before), ("after meta-training", after)):
        axes[0].plot(found[1], marker="o", label=name)
    axes[0].set(xticks=range(INNER_STEPS + 1), xlabel="inner steps", ylabel="accuracy", title="New images")
    axes[0].legend()
    axes[1].plot([loss for loss, _ in history])
    axes[1].set(xlabel="meta-steps", ylabel="loss behind the inner loop", title="Meta-training")
    for kind in history[0][1]:
        axes[2].plot([rates[kind] for _, rates in history], label=kind)
    axes[2].set(
        xlabel="meta-steps", ylabel="rate of the scale, in lr", title="Learned rates of the scales", yscale="log"
    )
    axes[2].legend()
    figure.savefig(path, dpi=120)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=80, help="meta-steps")
    parser.add_argument("--tasks", type=int, default=4, help="tasks in a meta-step")
    parser.add_argument("--test-tasks", type=int, default=30, help="tasks to be tested on")
    parser.add_argument("--plot", metavar="FILE", help="write a picture")
    args = parser.parse_args(argv)

    torch.set_num_threads(1)  # the tensors are too small to be shared out
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(images), generator=generator)
    (test_images, images), (test_labels, labels) = (t[order].split([600, len(order) - 600]) for t in (images, labels))
    test_tasks = [draw(test_images, test_labels, generator) for _ in range(args.test_tasks)]

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, WAYS))
    params = dict(model.named_parameters())
    rates = {kind: torch.tensor(rate).log().requires_grad_() for kind, rate in (("e", 3.0), ("l", 3.0), ("m", 0.1))}
    meta = torch.optim.Adam([{"params": params.values(), "lr": 2e-3}, {"params": rates.values(), "lr": 0.02}])

    before = evaluate(model, params, rates, test_tasks)
    history = []
    for _ in range(args.steps):
        tasks = [draw(images, labels, generator) for _ in range(args.tasks)]
        loss = torch.stack([adapt(model, params, rates, task)[0][-1] for task in tasks]).mean()
        meta.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*params.values(), *rates.values()], 1.0)
        meta.step()
        history.append((loss.item(), {kind: rate.exp().item() for kind, rate in rates.items()}))
    after = evaluate(model, params, rates, test_tasks)

    print(f"loss behind the inner loop: {history[0][0]:.3f} -> {history[-1][0]:.3f} in {args.steps} meta-steps")
    print("rates of the scales: " + ", ".join(f"{kind} {rate:.2f}" for kind, rate in history[-1][1].items()))
    print(f"accuracy on new images after each of {INNER_STEPS} inner steps")
    for name, found in (("before", before), ("after", after)):
        print(f"  {name:6} " + "  ".join(f"{value:.3f}" for value in found[1]))
    if args.plot:
        plot(args.plot, before, after, history)
    return before, after


if __name__ == "__main__":
    main()
