"""How many steps does SELAdam save? Final validation losses of optimizers, each at its own best learning rate.

    python examples/benchmarks/efficiency.py --suite quick              # a small table, in under 15 minutes on two cores
    python examples/benchmarks/efficiency.py --suite gpt --minutes 60   # an hour of a longer suite; call again to go on
    python examples/benchmarks/efficiency.py --suite gpt --report       # the table of what has been run so far

Every finished run is one line in results/efficiency.jsonl, with its settings, curve, times and machine, so that a killed
process loses one run at most. A learning rate that is best at the edge of its grid extends the grid, whatever the optimizer.
Comparisons hold at the end of training only, where the schedule has brought every learning rate down.
"""

import argparse
import copy
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "6")
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import train_gpt
from ideas import make_idea, orthogonalize

from seloptim import Curved, SELAdam, param_groups

RESULTS = Path(__file__).parent / "results" / "efficiency.jsonl"
EVALUATIONS = 20
REST_LR, SCALE_STEP = 3e-3, 1e-2  # of the suite "bases"


class Task(NamedTuple):
    """What is trained: `kind` gpt, mlp, conv or finetune."""

    kind: str
    width: int
    depth: int
    steps: int

    def __str__(self) -> str:
        return f"{self.kind} {self.width}x{self.depth}, {self.steps} steps"


class Family(NamedTuple):
    """An optimizer with its settings, and the learning rates at which it is first tried."""

    label: str
    optimizer: str
    settings: dict[str, Any]
    rates: tuple[float, ...]


class Suite(NamedTuple):
    """Each family at its own best rate or, with `equal`, all of them at those rates (a task each has its own)."""

    tasks: tuple[Task, ...]
    families: tuple[Family, ...]
    seeds: tuple[int, ...]
    equal: tuple[tuple[float, ...], ...] = ()


# ------------------------------------------------------------------------------------------------------------- tasks


class Problem(NamedTuple):
    model: nn.Module
    batch_loss: Callable[[nn.Module, torch.Generator], Tensor]
    validate: Callable[[nn.Module], float]


def gpt(task: Task, seed: int) -> Problem:
    context, batch = 128, 8
    text = _text()
    torch.manual_seed(seed)
    model = train_gpt.GPT(text.vocabulary, task.width, task.depth, max(1, task.width // 32), context)
    starts = torch.linspace(0, len(text.val) - context - 1, 64, dtype=torch.float64).long()
    held_out = [train_gpt.windows(text.val, part, context, "cpu") for part in starts.split(16)]

    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return train_gpt.linear_cross_entropy(model(inputs), model.head.weight, targets)  # type: ignore[union-attr,arg-type]

    def batch_loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        at = torch.randint(len(text.train) - context, (batch,), generator=generator)
        return loss(model, *train_gpt.windows(text.train, at, context, "cpu"))

    def validate(model: nn.Module) -> float:
        return statistics.fmean(loss(model, *part).item() for part in held_out)

    return Problem(model, batch_loss, validate)


_cached: dict[str, Any] = {}


def _text() -> train_gpt.Text:
    if "text" not in _cached:
        _cached["text"] = train_gpt.load_text(None)
    return _cached["text"]


def digits(task: Task, seed: int) -> Problem:
    """An MLP or a small convolution net on scikit-learn's digits; `finetune` starts where Adam left the upright digits."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16 - 0.3, torch.tensor(data.target)  # type: ignore[attr-defined]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, val = order[:1300], order[1300:]
    torch.manual_seed(seed)
    if task.kind == "conv":
        layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, task.width, 3, padding=1), nn.ReLU()]
        for _ in range(task.depth - 1):
            layers += [nn.Conv2d(task.width, task.width, 3, padding=1), nn.ReLU()]
        model = nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * task.width, 10))
    else:
        layers = [nn.Linear(64, task.width), nn.ReLU()]
        for _ in range(task.depth - 1):
            layers += [nn.Linear(task.width, task.width), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(task.width, 10))

    def make(inputs: Tensor) -> Problem:
        def batch_loss(model: nn.Module, generator: torch.Generator) -> Tensor:
            chosen = train[torch.randint(len(train), (64,), generator=generator)]
            return F.cross_entropy(model(inputs[chosen]), y[chosen], label_smoothing=0.1)

        def validate(model: nn.Module) -> float:
            return F.cross_entropy(model(inputs[val]), y[val], label_smoothing=0.1).item()

        return Problem(model, batch_loss, validate)

    if task.kind != "finetune":
        return make(x)
    upright = make(x)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(300):
        optimizer.zero_grad()
        upright.batch_loss(model, generator).backward()
        optimizer.step()
    return make(x.view(-1, 8, 8).mT.reshape(-1, 64))


TASKS: dict[str, Callable[[Task, int], Problem]] = {"gpt": gpt, "mlp": digits, "conv": digits, "finetune": digits}


# -------------------------------------------------------------------------------------------------------- optimizers


class Muon32(torch.optim.Optimizer):
    """torch.optim.Muon(adjust_lr_fn="match_rms_adamw") with its products in float32: bfloat16 ones are slow on a CPU."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(buffer, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))


def make_optimizers(family: Family, model: nn.Module, lr: float, steps: int) -> list[torch.optim.Optimizer]:
    settings = dict(family.settings)
    if family.optimizer == "adamw":
        _start_as(settings.pop("init", ""), model)
        return [torch.optim.AdamW(model.parameters(), lr=lr, **settings)]
    if family.optimizer == "muon":
        curved, plain = _curved_and_plain(model)
        return [
            Muon32([p for p in curved if p.ndim == 2], lr=lr),
            torch.optim.AdamW([*plain, *(p for p in curved if p.ndim != 2)], lr=lr / 2),
        ]
    if family.optimizer == "schedulefree":
        import schedulefree  # type: ignore[import-not-found]

        return [schedulefree.AdamWScheduleFree(model.parameters(), lr=lr, warmup_steps=steps // 20, **settings)]
    if family.optimizer == "slope":
        # Adam whose rate for each tensor is multiplied by the mean slope that SELAdam would have had: only a larger rate.
        sel = SELAdam(param_groups(copy.deepcopy(model)), beta="auto", **settings)
        sel.state_dict()
        curved = {name: sel.state[p]["mean_slope"] for name, p in sel.named_curved()}
        groups = [{"params": [p], "lr": lr * curved.get(name, 1.0)} for name, p in model.named_parameters()]
        return [torch.optim.AdamW(groups, lr=lr, weight_decay=0.0)]
    if family.optimizer == "base":
        # Only the matrices differ: the rest gets Adam at one fixed rate. The scales take steps of one size under every base.
        make, options = getattr(torch.optim, settings["class"]), settings["options"]
        matrices, rest = _curved_and_plain(model)
        if settings["curved"]:
            scale_lr = {"e": SCALE_STEP / lr, "l": SCALE_STEP / lr, "m": SCALE_STEP / lr / 20}
            sel = {"scale_lr": scale_lr, "init": "mismatched", "beta": "auto", "lr_space": "raw"}
            first = Curved(make, matrices, lr=lr, **sel, **options)
        else:
            first = make(matrices, lr=lr, **options)
        return [first, torch.optim.Adam(rest, lr=REST_LR)]
    if family.optimizer == "idea":
        return make_idea(model, lr, steps, settings)
    if settings.get("anneal_steps") == "run":
        settings["anneal_steps"] = steps
    # "matrices": only the class name changed; "layers": param_groups' choice.
    chosen = model.parameters() if settings.pop("groups", "layers") == "matrices" else param_groups(model)
    return [SELAdam(chosen, lr=lr, **settings)]


@torch.no_grad()
def _start_as(init: str, model: nn.Module) -> None:
    """For Adam, the weights that SELAdam(init="mismatched") starts from; "smaller": of their size, but symmetric."""
    if not init:
        return
    before = {p: p.clone() for p in model.parameters()}
    SELAdam(param_groups(model), init="mismatched", beta="width")
    for p, old in before.items() if init == "smaller" else ():
        p.copy_(old * (p.norm() / old.norm()).nan_to_num(1.0))


def _curved_and_plain(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    parts: dict[bool, list[Tensor]] = {True: [], False: []}
    for group in param_groups(model):
        parts[group["curved"]] += [p for _, p in group["params"]]
    return parts[True], parts[False]


# --------------------------------------------------------------------------------------------------------------- runs


def key(task: Task, family: Family, lr: float, seed: int) -> str:
    return json.dumps([*task, family.optimizer, family.settings, float(f"{lr:.6g}"), seed], sort_keys=True)


def run(
    task: Task, family: Family, lr: float, seed: int, watch: Callable[[nn.Module, int], None] = lambda model, step: None
) -> dict[str, Any]:
    """Train once; `watch` sees the model at the start and at every quarter of the way."""
    problem = TASKS[task.kind](task, seed)
    model, generator = problem.model, torch.Generator().manual_seed(seed + 1)
    optimizers = make_optimizers(family, model, lr, task.steps)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = [group["lr"] for group in groups]
    scheduled = family.optimizer != "schedulefree"
    wall, cpu, curve = time.perf_counter(), time.process_time(), []
    for optimizer in optimizers if not scheduled else ():
        optimizer.train()  # type: ignore[attr-defined]
    watch(model, 0)
    for step in range(task.steps):
        if scheduled:
            for group, peak in zip(groups, peaks, strict=True):
                warm = min(1.0, (step + 1) / max(1, task.steps // 20))
                group["lr"] = peak * warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / task.steps)))
        model.zero_grad()
        loss = problem.batch_loss(model, generator)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if (step + 1) % (task.steps // 4) == 0:
            watch(model, step + 1)
        if not math.isfinite(loss.item()):
            curve.append([step + 1, math.inf])
            break
        if (step + 1) % max(1, task.steps // EVALUATIONS) == 0 or step + 1 == task.steps:
            for optimizer in optimizers if not scheduled else ():
                optimizer.eval()  # type: ignore[attr-defined]
            with torch.no_grad():
                loss_now = problem.validate(model)
            curve.append([step + 1, round(loss_now, 6) if math.isfinite(loss_now) else math.inf])
            for optimizer in optimizers if not scheduled else ():
                optimizer.train()  # type: ignore[attr-defined]
    return {
        "key": key(task, family, lr, seed),
        "task": task._asdict(),
        "optimizer": family.optimizer,
        "settings": family.settings,
        "lr": lr,
        "seed": seed,
        "final": curve[-1][1],
        "curve": curve,
        "wall_seconds": round(time.perf_counter() - wall, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}",
    }


class Record:
    """What has been run; get() runs what has not, until the time is over."""

    def __init__(self, path: Path, minutes: float) -> None:
        self.path, self.until = path, time.monotonic() + 60 * minutes
        lines = path.read_text().splitlines() if path.exists() else []
        self.done = {entry["key"]: entry for entry in map(json.loads, lines)}

    def get(self, task: Task, family: Family, lr: float, seed: int) -> dict[str, Any] | None:
        wanted = key(task, family, lr, seed)
        if wanted not in self.done:
            if time.monotonic() > self.until:
                return None
            entry = run(task, family, lr, seed)
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            self.done[wanted] = entry
            print(f"{task}: {family.label} lr {lr:.3g} seed {seed}: {entry['final']:.4f}", file=sys.stderr, flush=True)
        return self.done[wanted]


def best_rate(record: Record, task: Task, family: Family, seed: int) -> tuple[dict[float, float], float] | None:
    """(final loss by rate, best rate) on one seed; the grid grows until the best rate has a neighbour on either side."""
    rates = sorted(family.rates)
    finals: dict[float, float] = {}
    while True:
        for lr in rates:
            if lr not in finals:
                entry = record.get(task, family, lr, seed)
                if entry is None:
                    return None
                finals[lr] = entry["final"]
        best = min(rates, key=lambda lr: finals[lr])
        ratio = family.rates[1] / family.rates[0]
        if best == rates[0]:
            rates.insert(0, best / ratio)
        elif best == rates[-1]:
            rates.append(best * ratio)
        else:
            return finals, best


# ------------------------------------------------------------------------------------------------------------- report


def steps_to(curve: list[list[float]], target: float) -> float | None:
    """The first step at which a curve, linear between its points, is at or below the target."""
    before: list[float] | None = None
    for step, loss in curve:
        if loss <= target:
            if before is None or before[1] <= loss:
                return step
            share = (before[1] - target) / (before[1] - loss)
            return before[0] + share * (step - before[0])
        before = [step, loss]
    return None


def report(record: Record, suite: Suite) -> Iterator[str]:
    return report_equal(record, suite) if suite.equal else report_best(record, suite)


def report_equal(record: Record, suite: Suite) -> Iterator[str]:
    """(a): everybody at the same learning rates."""
    for task, rates in zip(suite.tasks, suite.equal, strict=True):
        yield f"\n### {task}\n"
        yield f"All at the same rates; mean of {len(suite.seeds)} seeds, and their spread, of the final loss.\n"
        yield "| optimizer | " + " | ".join(f"lr {lr:.2g}" for lr in rates) + " |"
        yield "|---|" + "---|" * len(rates)
        for family in suite.families:
            cells = []
            for lr in rates:
                entries = [record.get(task, family, lr, seed) for seed in suite.seeds]
                losses = [entry["final"] for entry in entries if entry is not None]
                if len(losses) < len(entries):
                    cells.append("not finished")
                else:
                    cells.append(f"{statistics.fmean(losses):.4f} ({min(losses):.3f} to {max(losses):.3f})")
            yield f"| {family.label} | " + " | ".join(cells) + " |"


def report_best(record: Record, suite: Suite) -> Iterator[str]:
    """(b): each at its own best rate."""
    for task in suite.tasks:
        yield f"\n### {task}\n"
        yield f"Each at its own best rate; {len(suite.seeds)} seeds; steps to the first row's final loss, as a share of its steps.\n"
        yield "| optimizer | best lr | final loss, mean (spread) | steps to match | by rate, first seed |"
        yield "|---|---|---|---|---|"
        reference: dict[int, float] = {}
        for family in suite.families:
            found = best_rate(record, task, family, suite.seeds[0])
            if found is None:
                yield f"| {family.label} | not finished | | | |"
                continue
            finals, best = found
            entries = [record.get(task, family, best, seed) for seed in suite.seeds]
            done = [entry for entry in entries if entry is not None]
            losses = [entry["final"] for entry in done]
            if not reference:
                reference = {entry["seed"]: entry["final"] for entry in done}
            shares = [
                steps_to(entry["curve"], reference[entry["seed"]]) for entry in done if entry["seed"] in reference
            ]
            reached = [share / task.steps for share in shares if share is not None]
            match = (
                f"{statistics.fmean(reached):.2f}"
                if len(reached) == len(done)
                else f"{len(reached)} of {len(done)} reach it"
            )
            by_rate = ", ".join(f"{lr:.2g}: {loss:.3f}" for lr, loss in sorted(finals.items()))
            spread = f"{min(losses):.3f} to {max(losses):.3f}" if len(losses) > 1 else "one seed"
            yield f"| {family.label} | {best:.2g} | {statistics.fmean(losses):.4f} ({spread}) | {match} | {by_rate} |"


def scale_lr(start: float, end: float) -> dict[str, Any]:
    return {"e": (start, end), "l": (start, end), "m": (0.01, 0.5)}


# Written out, so that a result keeps its meaning when a default changes. The specification's choices, which the sweep starts from.
SPECIFIED = {"lr_space": "raw", "beta": "auto", "scale_lr": scale_lr(8.0, 1.3)}


def sel(label: str, rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3), **settings: Any) -> Family:
    return Family(f"SELAdam, {label}", "sel", {**SPECIFIED, **settings}, rates)


def scratch(label: str, **settings: Any) -> Family:
    """The paper's way with an untrained model, but for `settings`."""
    return sel(label, **{"init": "mismatched", "anneal_steps": "run", **settings})


ADAM = Family("AdamW", "adamw", {"weight_decay": 0.0}, (1e-3, 2e-3, 4e-3))
DEFAULT = {"lr_space": "weight", "beta": "width", "scale_lr": scale_lr(2.0, 0.3)}
ADAM_SCRATCH = Family(
    "AdamW, mismatched init", "adamw", {"weight_decay": 0.0, "init": "mismatched"}, (1e-3, 2e-3, 4e-3)
)
ADAM_SMALLER = Family(
    "AdamW, as small but symmetric", "adamw", {"weight_decay": 0.0, "init": "smaller"}, (1e-3, 2e-3, 4e-3)
)
SEL = sel("defaults", **DEFAULT)
SEL_SCRATCH = scratch("defaults, mismatched init, annealed", **DEFAULT)
SEL_PAPER = scratch("as specified")
SLOPE = Family("AdamW x SELAdam's mean slope", "slope", {}, (1e-3, 2e-3, 4e-3))
MUON = Family("Muon", "muon", {}, (4e-3, 8e-3, 1.6e-2))
SCHEDULE_FREE = Family("schedule-free AdamW", "schedulefree", {}, (2e-3, 4e-3, 8e-3))

# One choice at a time, from the paper's way.
SWEEP = (
    ADAM,
    ADAM._replace(label="AdamW, decay 0.1", settings={"weight_decay": 0.1}),
    SEL_PAPER,
    scratch("decay 0.1", weight_decay=0.1, decoupled_weight_decay=True),
    sel("preserve, not annealed"),
    sel("preserve", anneal_steps="run"),
    sel("preserve, not annealed, every matrix", groups="matrices"),
    scratch("every matrix", groups="matrices"),
    sel("preserve, not annealed, lr_space weight", lr_space="weight"),
    sel("preserve, not annealed, lr_space weight, every matrix", lr_space="weight", groups="matrices"),
    scratch("lr_space weight", lr_space="weight"),
    scratch("congruent", combine="congruent"),
    sel("congruent, preserve", combine="congruent", anneal_steps="run"),
    sel("congruent, preserve, lr_space weight", combine="congruent", lr_space="weight"),
    scratch("beta width", beta="width"),
    scratch("beta 6", beta=6.0),
    scratch("beta 12.5", beta=12.5),
    scratch("beta 25", beta=25.0),
    scratch("beta 50", beta=50.0),
    scratch("scales frozen", structure="none"),
    scratch("structure row", structure="row"),
    scratch("structure col", structure="col"),
    scratch("structure scalar", structure="scalar"),
    scratch("scale_lr e, l 2 to 0.3", scale_lr=scale_lr(2.0, 0.3)),
    scratch("scale_lr e, l 20 to 3", scale_lr=scale_lr(20.0, 3.0)),
    scratch("scale_lr of the paper", scale_lr=scale_lr(50.0, 8.0)),
    scratch("m frozen", scale_lr={"e": (8.0, 1.3), "l": (8.0, 1.3)}),
    scratch("m 2", scale_lr={"e": (8.0, 1.3), "l": (8.0, 1.3), "m": 2.0}),
    scratch("n learned", scale_lr={"e": (8.0, 1.3), "l": (8.0, 1.3), "m": (0.01, 0.5), "n": (0.01, 0.5)}),
    scratch("scales not annealed", anneal_steps=None),
    scratch("e 0.25, beta 25", scale_init={"e": 0.25, "l": 1.0}, beta=25.0, init="preserve"),
    scratch("e 0.1, beta 60", scale_init={"e": 0.1, "l": 1.0}, beta=60.0, init="preserve"),
    scratch("l 0", scale_init={"l": 0.0}, init="preserve"),
    scratch(
        "no curvature: row and column scales of 8 only",
        combine="congruent",
        init="preserve",
        scale_init={"e": 0.0, "l": "beta"},
        scale_lr={"l": (8.0, 1.3)},
    ),
)


def idea(label: str, rates: tuple[float, ...] = (4e-3, 8e-3, 1.6e-2), **settings: Any) -> Family:
    return Family(label, "idea", settings, rates)


IDEAS = (
    ADAM,
    idea("Adam x slope / mean", idea="sloped", direction="adam", power=1.0),
    idea("Adam x slope / row mean", idea="sloped", direction="adam", power=1.0, mean="row"),
    idea("Adam x slope / column mean", idea="sloped", direction="adam", power=1.0, mean="col"),
    idea("Adam x slope^0.5 / mean", idea="sloped", direction="adam", power=0.5),
    idea("second moment in weight space: Adam x slope^2", idea="sloped", direction="adam", power=2.0),
    idea("curvature follows the rms", idea="moving beta", plan="rms"),
    idea("curvature annealed in", idea="moving beta", plan="in"),
    idea("curvature annealed out", idea="moving beta", plan="out"),
    idea("scales of 8 to 1.3, no curve, Adam", idea="scaled", direction="adam", log=False, multiple=(8.0, 1.3)),
    idea("log scales of 8 to 1.3, no curve, Adam", idea="scaled", direction="adam", log=True, multiple=(8.0, 1.3)),
    idea("log scales of 2, no curve, Adam", idea="scaled", direction="adam", log=True, multiple=(2.0, 2.0)),
    MUON,
    idea("Muon, no decay", idea="sloped", direction="muon", power=0.0),
    idea("Muon x slope / mean", idea="sloped", direction="muon", power=1.0),
    idea("Muon x slope / mean, renormalized", idea="sloped", direction="muon", power=1.0, renormalize=True),
    idea("Muon x slope / row mean", idea="sloped", direction="muon", power=1.0, mean="row"),
    idea("Muon x slope^0.5 / row mean", idea="sloped", direction="muon", power=0.5, mean="row"),
    idea("Muon of the pulled gradient x slope", idea="sloped", direction="muon", power=1.0, before=True),
    idea("Muon x slope^-0.5 / mean", idea="sloped", direction="muon", power=-0.5),
    idea("scales of 8 to 1.3, no curve, Muon", idea="scaled", direction="muon", log=False, multiple=(8.0, 1.3)),
    idea("log scales of 2, no curve, Muon", idea="scaled", direction="muon", log=True, multiple=(2.0, 2.0)),
    idea("log scales of 1, no curve, Muon", idea="scaled", direction="muon", log=True, multiple=(1.0, 1.0)),
    idea(
        "log scales of 1, no curve, Muon, decay 0.1",
        idea="scaled",
        direction="muon",
        log=True,
        multiple=(1.0, 1.0),
        decay=0.1,
    ),
)


def dropin(groups: str, space: str, beta: str, scales: str) -> Family:
    options = {
        "frozen": {"structure": "none"},
        "8 to 1.3": {"scale_lr": scale_lr(8.0, 1.3)},
        "2 to 0.3": {"scale_lr": scale_lr(2.0, 0.3)},
    }[scales]
    label = f"{groups}, lr_space {space}, beta {beta}, scales {scales}"
    return sel(label, groups=groups, lr_space=space, beta=beta, **options)


# Only the class name changes in a script whose rate was tuned for Adam ("matrices"), and the same with param_groups ("layers").
SPACES = (("raw", "auto"), ("weight", "auto"), ("weight", "width"))
DROPIN = (
    ADAM,
    *(
        dropin(groups, space, beta, scales)
        for groups in ("matrices", "layers")
        for space, beta in SPACES
        for scales in ("8 to 1.3", "2 to 0.3", "frozen")
    ),
)
DROPIN_128 = (
    ADAM,
    *(dropin(groups, "raw", "auto", "8 to 1.3") for groups in ("matrices", "layers")),
    *(dropin(groups, "weight", beta, "2 to 0.3") for groups in ("matrices", "layers") for beta in ("auto", "width")),
)


def base_pair(name: str, options: dict[str, Any], plain: float, curved: float) -> tuple[Family, Family]:
    """An optimizer of torch.optim plain and under Curved, each at five rates a factor of two apart around a middle one."""

    def family(is_curved: bool, middle: float) -> Family:
        settings = {"class": name, "options": options, "curved": is_curved}
        rates = tuple(middle * 2.0**place for place in range(-2, 3))
        return Family(f"{name}, {'curved' if is_curved else 'plain'}", "base", settings, rates)

    return family(False, plain), family(True, curved)


DIGITS = Task("mlp", 128, 2, 400), Task("conv", 16, 2, 400), Task("finetune", 128, 2, 200)
GPT_128 = Task("gpt", 128, 3, 800)
SUITES = {
    "quick": Suite(
        (Task("gpt", 64, 2, 200),),
        tuple(
            family._replace(rates=(4e-3, 8e-3, 1.6e-2))
            for family in (ADAM, SEL, SEL_SCRATCH, ADAM_SCRATCH, ADAM_SMALLER)
        ),
        (0, 1, 2),
    ),
    "baselines": Suite(
        (Task("gpt", 64, 2, 400),),
        (
            ADAM,
            *(
                family._replace(rates=(4e-3, 8e-3, 1.6e-2))
                for family in (SEL, SEL_SCRATCH, ADAM_SCRATCH, ADAM_SMALLER, SLOPE, SCHEDULE_FREE, MUON)
            ),
        ),
        (0, 1, 2),
    ),
    "long": Suite((Task("gpt", 64, 2, 4000),), (ADAM, SEL, SEL_SCRATCH, ADAM_SCRATCH), (0,), equal=((4e-3,),)),
    "wide": Suite((Task("gpt", 256, 4, 200),), (ADAM, SEL), (0,), equal=((2e-3,),)),
    "sweep": Suite((Task("gpt", 64, 2, 400),), SWEEP, (0, 1)),
    "dropin": Suite((Task("gpt", 64, 2, 400),), DROPIN, (0, 1), equal=((4e-3, 8e-3),)),
    "dropin128": Suite((GPT_128,), DROPIN_128, (0, 1), equal=((2e-3,),)),
    "dropin-digits": Suite(DIGITS, DROPIN, (0, 1, 2), equal=((4e-3, 3.2e-2), (4e-3, 6.4e-2), (4e-3, 3.2e-2))),
    "ideas": Suite((Task("gpt", 64, 2, 400),), IDEAS, (0, 1, 2)),
    "gpt": Suite(
        (GPT_128,),
        (
            ADAM._replace(rates=(2e-3, 4e-3)),
            dropin("layers", "weight", "width", "2 to 0.3")._replace(label="SELAdam, defaults", rates=(2e-3, 4e-3)),
            dropin("layers", "raw", "auto", "8 to 1.3")._replace(label="SELAdam, as specified", rates=(2e-3, 4e-3)),
            SEL_SCRATCH._replace(rates=(2e-3, 4e-3)),
            ADAM_SCRATCH._replace(rates=(2e-3, 4e-3)),
        ),
        (0,),
    ),
    "bases": Suite(
        (Task("gpt", 64, 2, 400),),
        (
            *base_pair("SGD", {"momentum": 0.9}, 0.3, 0.1),
            *base_pair("RMSprop", {}, 1e-3, 1e-3),
            *base_pair("Adam", {}, 3e-3, 3e-3),
            *base_pair("NAdam", {}, 3e-3, 3e-3),
            *base_pair("Muon", {"weight_decay": 0.0}, 2e-2, 2e-2),
        ),
        (0, 1, 2),
    ),
    "digits": Suite(
        DIGITS,
        tuple(family._replace(rates=(8e-3, 1.6e-2, 3.2e-2)) for family in (ADAM, SEL, SEL_PAPER, SLOPE)),
        (0, 1, 2),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="quick")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after so many minutes")
    parser.add_argument("--report", action="store_true", help="only report what has been run")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    record = Record(args.results, -1 if args.report else args.minutes)
    for line in report(record, SUITES[args.suite]):
        print(line)


if __name__ == "__main__":
    main()
