"""Plain against curved, one base optimizer at a time: final validation losses of a small GPT, each at its own best rate.

    python examples/benchmarks/bases.py --minutes 60    # runs what is missing; call again to go on
    python examples/benchmarks/bases.py --report        # the table of what has been run so far

The matrices of the linear layers get the base optimizer, plain or under `Curved`; embeddings, norms and the like get
torch.optim.Adam at one fixed rate in every run, so that only the matrices differ. Rates are first compared by one seed, over
the base's grid, which is extended where its edge is best; the best rate is then run with the other seeds. Every finished
run is one line in results/bases.jsonl. The scales take Adam steps of the same size under every base.
"""

import argparse
import json
import math
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_gpt

from seloptim import Curved, param_groups

RESULTS = Path(__file__).parent / "results" / "bases.jsonl"
BASES = {  # class, options, the middle of the grid of rates: plain, curved
    "SGD": (torch.optim.SGD, {"momentum": 0.9}, 0.3, 0.1),
    "RMSprop": (torch.optim.RMSprop, {}, 1e-3, 1e-3),
    "Adam": (torch.optim.Adam, {}, 3e-3, 3e-3),
    "NAdam": (torch.optim.NAdam, {}, 3e-3, 3e-3),
    "Muon": (torch.optim.Muon, {"weight_decay": 0.0}, 2e-2, 2e-2),
}
FACTOR, GRID, SEEDS = 2.0, range(-2, 3), (0, 1, 2)  # at least five rates, a factor of two apart
REST_LR, SCALE_STEP = 3e-3, 1e-2
WIDTH, DEPTH, HEADS, CONTEXT, BATCH = 64, 2, 2, 64, 16


def make_optimizers(model, base, curved, lr):
    make, options, *_ = BASES[base]
    groups = param_groups(model)
    matrices = [p for group in groups if group["curved"] for _, p in group["params"]]
    rest = [p for group in groups if not group["curved"] for _, p in group["params"]]
    if curved:
        scale_lr = {"e": SCALE_STEP / lr, "l": SCALE_STEP / lr, "m": SCALE_STEP / lr / 20}
        first = Curved(make, matrices, lr=lr, scale_lr=scale_lr, init="mismatched", **options)
    else:
        first = make(matrices, lr=lr, **options)
    return [first, torch.optim.Adam(rest, lr=REST_LR)]


def loss_on(model, inputs, targets):
    return F.cross_entropy(F.linear(model(inputs), model.head.weight).flatten(0, 1), targets.flatten())


def run(text, base, curved, lr, seed, steps):
    """The validation loss at the end; inf where the run diverged."""
    torch.manual_seed(seed)
    model = train_gpt.GPT(text.vocabulary, WIDTH, DEPTH, HEADS, CONTEXT)
    optimizers = make_optimizers(model, base, curved, lr)
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        factor = min(1.0, (step + 1) / 20) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        starts = torch.randint(len(text.train) - CONTEXT, (BATCH,), generator=generator)
        loss = loss_on(model, *train_gpt.windows(text.train, starts, CONTEXT, "cpu"))
        if not loss.isfinite():
            return math.inf
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    starts = torch.randint(len(text.val) - CONTEXT, (256,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return loss_on(model, *train_gpt.windows(text.val, starts, CONTEXT, "cpu")).nan_to_num(math.inf).item()


def read(steps):
    """{(base, curved, place in the grid): {seed: loss}} of the runs that were done with this many steps."""
    done = {}
    for line in RESULTS.read_text().splitlines() if RESULTS.exists() else ():
        entry = json.loads(line)
        if entry["steps"] == steps:
            done.setdefault((entry["base"], entry["curved"], entry["place"]), {})[entry["seed"]] = entry["loss"]
    return done


def best_place(done, base, curved):
    return min((k for k in done if k[:2] == (base, curved)), key=lambda k: done[k].get(SEEDS[0], math.inf))[2]


def missing(done, base, curved):
    """(place, seed) of the next run of a row, or None."""
    places = {k[2] for k in done if k[:2] == (base, curved)}
    wanted = [place for place in GRID if place not in places]
    if wanted:
        return wanted[0], SEEDS[0]
    best = best_place(done, base, curved)
    if best in (min(places), max(places)):
        return (best - 1 if best == min(places) else best + 1), SEEDS[0]
    return next(((best, seed) for seed in SEEDS if seed not in done[base, curved, best]), None)


def rate(base, curved, place):
    return BASES[base][3 if curved else 2] * FACTOR**place


def report(done):
    print(f"{'base':9}{'':8}{'best lr':>10}{'val loss':>10}{'spread':>9}{'rates':>7}{'seeds':>7}")
    for base in BASES:
        for curved in (False, True):
            rows = [k for k in done if k[:2] == (base, curved)]
            if not rows:
                continue
            place = best_place(done, base, curved)
            losses = list(done[base, curved, place].values())
            print(
                f"{base:9}{'curved' if curved else 'plain':8}{rate(base, curved, place):10.4g}{statistics.mean(losses):10.4f}"
                f"{max(losses) - min(losses):9.4f}{len(rows):7}{len(losses):7}"
            )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="steps of a run (default 400)")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no run after so long (default 60)")
    parser.add_argument("--data", metavar="FILE", help="text to train on, as for train_gpt.py")
    parser.add_argument("--report", action="store_true", help="run nothing, print the table")
    args = parser.parse_args(argv)
    end = time.monotonic() + (0 if args.report else 60 * args.minutes)
    text = None if args.report else train_gpt.load_text(args.data)
    for base in BASES:
        for curved in (False, True):
            while time.monotonic() < end and (todo := missing(read(args.steps), base, curved)):
                place, seed = todo
                lr = rate(base, curved, place)
                entry = {"base": base, "curved": curved, "place": place, "lr": lr, "seed": seed, "steps": args.steps}
                started = time.perf_counter()
                entry["loss"] = run(text, base, curved, lr, seed, args.steps)
                entry |= {
                    "seconds": time.perf_counter() - started,
                    "torch": torch.__version__,
                    "machine": platform.machine(),
                }
                RESULTS.parent.mkdir(exist_ok=True)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
                print(json.dumps(entry), flush=True)
    report(read(args.steps))


if __name__ == "__main__":
    main()
