"""Draw the figures of the documentation: python docs/figures.py [FOLDER], by default beside itself (needs matplotlib)."""

import io
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt
from matplotlib.ticker import NullFormatter
from PIL import Image

HERE = Path(__file__).parent
OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
sys.path.insert(0, str(HERE.parent))

from seloptim import PAPER_SCALE_LR  # noqa: E402
from seloptim.functional import sel_forward, sel_inverse, sel_pullback  # noqa: E402
from seloptim.init import calibrate_beta, mismatched_  # noqa: E402
from seloptim.schedule import scale_lr_multiplier  # noqa: E402

BLUE, ORANGE, GREY, GREEN = "#1f6fb4", "#d9661f", "#8a8a8a", "#2f8f4e"
BETA = 12.5


def save(figure, name):
    png = io.BytesIO()
    figure.savefig(png, dpi=120)
    plt.close(figure)
    Image.open(png).convert("RGB").quantize(64).save(OUT / name, optimize=True)


def panels(count, width):
    figure = plt.figure(figsize=(width * count, 2.9), layout="constrained")
    axes = [figure.add_subplot(1, count, k + 1) for k in range(count)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e6e6e6", linewidth=0.7)
    return figure, axes


def curve():
    """The map, its slope over the weight, and the relative step against Adam's."""
    figure, (left, middle, right) = panels(3, 2.85)
    raw = torch.linspace(-0.25, 0.25, 1001, dtype=torch.float64)
    ones = torch.ones_like(raw)
    for combine, color, style in (("mismatched", BLUE, "-"), ("congruent", ORANGE, "--")):
        weight = sel_forward(raw, beta=BETA, combine=combine)
        slope, *_ = sel_pullback(ones, raw, beta=BETA, combine=combine)
        left.plot(raw, weight, style, color=color, label=combine)
        slope[raw == 0] = float("nan")
        middle.plot(weight, slope, style, color=color, label=combine)
    left.plot(raw, raw, ":", color=GREY, label="Adam: weight = raw")
    left.set(xlabel="raw weight", ylabel="weight", title="The map, beta = 12.5")
    middle.axhline(1, linestyle=":", color=GREY, label="Adam")
    middle.set(xlabel="weight", ylabel="d weight / d raw", title="Slope: about 1 + beta * |weight|", xlim=(-1.6, 1.6))
    size = torch.logspace(-4, 0, 200, dtype=torch.float64)
    lr = 1e-3
    at = sel_inverse(size, beta=BETA)
    slope, *_ = sel_pullback(torch.ones_like(at), at, beta=BETA)
    right.loglog(size, lr * slope / size, color=BLUE, label="SELAdam")
    right.loglog(size, lr / size, ":", color=GREY, label="Adam")
    right.axhline(lr * BETA, color=GREEN, linewidth=0.9, linestyle="--", label="lr * beta")
    right.set(xlabel="|weight|", ylabel="step / |weight|", title="Relative step at lr = 0.001")
    for axis in (left, middle, right):
        axis.legend(frameon=False, fontsize=8)
    save(figure, "curve.png")


def choices():
    """How beta follows from a tensor's size, and how the scales' learning rates go over training."""
    figure, (left, right) = panels(2, 4.0)
    rms = torch.logspace(-3, 0, 300, dtype=torch.float64)
    betas = torch.tensor([calibrate_beta(torch.full((2, 2), float(r), dtype=torch.float64), "auto") for r in rms])
    left.loglog(rms, betas, color=BLUE, label='beta under "auto"')
    left.loglog(rms, betas * rms, color=ORANGE, linestyle="--", label="beta * rms")
    left.set(xlabel="rms of the initial weights", title='beta="auto"')
    steps = torch.linspace(0, 1.2, 200)
    for label, (start, end), color, style in (
        ("e, l: default (2, 0.3)", (2.0, 0.3), BLUE, "-"),
        ("e, l: PAPER_SCALE_LR", PAPER_SCALE_LR["e"], ORANGE, "--"),
        ("m: both (0.01, 0.5)", (0.01, 0.5), GREEN, "-."),
    ):
        right.semilogy(steps, scale_lr_multiplier(start, end, 1.0, steps), style, color=color, label=label)
    right.set(xlabel="completed steps / anneal_steps", ylabel="multiple of lr", title="Learning rates of the scales")
    for axis in (left, right):
        axis.legend(frameon=False, fontsize=8)
    save(figure, "choices.png")


def initialisation():
    """What init="mismatched" does to a matrix of normal weights."""
    figure, (left, right) = panels(2, 4.0)
    weight = torch.randn(400, 400, generator=torch.Generator().manual_seed(0)) * 0.02
    shrunk = mismatched_(weight.clone(), beta=BETA)
    for values, color, label in ((weight, GREY, "before"), (shrunk, BLUE, "after")):
        left.hist(values.flatten(), bins=120, histtype="step", color=color, label=label)
    left.set(xlabel="weight", ylabel="count", title="Normal weights, rms 0.02, beta = 12.5")
    ordered = torch.linspace(-0.5, 0.5, 501, dtype=torch.float64)
    for beta, color in ((2.0, ORANGE), (5.0, GREEN), (12.5, BLUE)):
        right.plot(ordered, mismatched_(ordered.clone(), beta=beta), color=color, label=f"beta = {beta:g}")
    right.plot(ordered, ordered, ":", color=GREY, label="before")
    right.set(xlabel="weight before", ylabel="weight after", title="Negative weights shrink")
    for axis in (left, right):
        axis.legend(frameon=False, fontsize=8)
    save(figure, "mismatched.png")


def seams():
    """What a change of optimizer does to the loss: examples/benchmarks/seams.py wrote the numbers."""
    measured = json.loads((HERE.parent / "examples" / "benchmarks" / "results" / "seams.json").read_text())
    steps, losses = measured["steps"], {arm: torch.tensor(values) for arm, values in measured["losses"].items()}

    def smooth(values):
        return values.unfold(0, 20, 1).mean(1)

    figure, (left, right) = panels(2, 4.0)
    x = torch.arange(20, 3 * steps + 1)
    for arm, color, style in (("zeroed", ORANGE, "-"), ("converted", BLUE, "-")):
        left.plot(x, smooth(losses[arm]), style, color=color, label=f"moments {arm}", linewidth=0.9)
        right.plot(x, smooth(losses[arm] - losses["adam"]), style, color=color, label=f"moments {arm}", linewidth=0.9)
    left.plot(x, smooth(losses["adam"]), ":", color=GREY, label="Adam throughout")
    right.axhline(0, linestyle=":", color=GREY, label="Adam throughout")
    noise = max(row["noise"] for row in measured["table"])
    right.axhspan(-noise, noise, color="#eeeeee", label="noise of such a mean")
    left.set(xlabel="step", title="Training loss, mean of 20 steps", ylim=(None, float(smooth(losses["adam"])[80])))
    right.set(xlabel="step", title="Excess over Adam throughout")
    for axis in (left, right):
        for seam in (steps, 2 * steps):
            axis.axvline(seam, color=GREY, linewidth=0.7)
    left.legend(frameon=False, fontsize=8)
    right.legend(frameon=False, fontsize=8, loc="lower left")
    save(figure, "seams.png")


def by_rate():
    """Final loss by learning rate, the first seed of examples/benchmarks/efficiency.py."""
    sys.path.insert(0, str(HERE.parent / "examples" / "benchmarks"))
    import efficiency as e

    record = e.Record(e.RESULTS, minutes=-1)
    specified = e.dropin("layers", "raw", "auto", "8 to 1.3")
    arms = (
        (e.ADAM, "AdamW", GREY, "o-"),
        (e.dropin("layers", "weight", "width", "2 to 0.3"), "SELAdam, defaults", BLUE, "o-"),
        (specified, "SELAdam, lr_space raw, beta auto, scales 8 to 1.3", ORANGE, "o--"),
    )
    tasks = (
        (e.Task("gpt", 64, 2, 400), "GPT, width 64"),
        (e.GPT_128, "GPT, width 128"),
        (e.DIGITS[0], "MLP on digits"),
    )
    figure, axes = panels(3, 2.85)
    for axis, (task, title) in zip(axes, tasks, strict=True):
        for family, label, color, style in arms:
            # The same runs under the name that another suite gives them, without "groups".
            short = {key: value for key, value in family.settings.items() if key != "groups"}
            both = (family, family._replace(settings=short))
            rates = [2.0**k * 1e-3 for k in range(8)]
            found = {lr: record.get(task, f, lr, 0) for f in both for lr in rates if record.get(task, f, lr, 0)}
            kept = {lr: entry["final"] for lr, entry in sorted(found.items())}
            axis.semilogx(list(kept), list(kept.values()), style, color=color, label=label, markersize=3, linewidth=1)
        axis.xaxis.set_minor_formatter(NullFormatter())
        best = min(line.get_ydata().min() for line in axis.get_lines())
        axis.set(xlabel="lr", title=title, ylim=(best * 0.98, best * 1.2))
    axes[0].set_ylabel("final loss")
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside lower center", ncols=3)
    save(figure, "by_rate.png")


if __name__ == "__main__":
    plt.rcParams.update({"font.size": 9, "lines.linewidth": 1.6})
    curve()
    choices()
    initialisation()
    seams()
    by_rate()
