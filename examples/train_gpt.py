"""Train a small byte-level GPT with Adam and with SELAdam, side by side: same batches, same initial weights.

For instance:
    python examples/train_gpt.py                                     # the standard library's sources, a few minutes
    python examples/train_gpt.py --plot curves.png --logdir runs     # a picture, and logs for TensorBoard
    python examples/train_gpt.py --data book.txt --optimizer sel     # your own text, one optimizer alone
    python examples/train_gpt.py --save gpt.pt                       # Ctrl-C at any time, then --resume gpt.pt
    torchrun --nproc-per-node=2 examples/train_gpt.py --parallel fsdp                            # or ddp
    torchrun --nproc-per-node=8 examples/train_gpt.py --parallel fsdp --preset 2048x24 --data openwebtext --optimizer sel
"""

import argparse
import copy
import importlib.util
import json
import math
import os
import signal
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple, NoReturn

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # before torch loads: its profiler would write to the terminal

import gpt_parallel as parallel
import torch
from gpt_presets import PRESETS, print_estimate
from torch import nn
from torch.nn import functional as F

from seloptim import PAPER_SCALE_LR, SELAdam, linear_cross_entropy, param_groups
from seloptim.tensorboard import log_scales

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

CHECKPOINT = "seloptim train_gpt 1"
BYTES = 256
EVAL_SEQUENCES = 64
FINAL_LR = 0.1


def fail(message) -> NoReturn:
    print(f"train_gpt.py: {message}", file=sys.stderr)
    raise SystemExit(2)


# ------------------------------------------------------------------------------------------------------ text


def standard_library():
    """The sources of Python's own library, without its tests, which some systems leave out."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    paths = (p.relative_to(root) for p in root.rglob("*.py"))
    return [(root / p).read_bytes() for p in sorted(p for p in paths if skipped.isdisjoint(p.parts))]


class Text(NamedTuple):
    train: torch.Tensor  # (tokens,)
    val: torch.Tensor  # (tokens,)
    vocabulary: int

    def sizes(self):
        return [len(self.train), len(self.val), self.vocabulary]


def load_text(path, vocabulary=None):
    try:
        if path is None:
            files = standard_library()
            cut = len(files) * 9 // 10
            train, val = b"".join(files[:cut]), b"".join(files[cut:])
        elif Path(path).is_dir():
            return load_bins(Path(path), vocabulary)
        else:
            data = Path(path).read_bytes()
            cut = len(data) * 9 // 10
            train, val = data[:cut], data[cut:]
    except OSError as error:
        fail(f"--data {path}: {error.strerror}")
    if not val:
        fail(f"--data {path}: the text is empty")
    return Text(as_bytes(train), as_bytes(val), BYTES)


def as_bytes(text):
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def load_bins(folder, vocabulary):
    """The train.bin and val.bin that nanoGPT prepares: uint16 tokens, mapped into memory, and read only to find the largest."""
    splits = []
    for path in (folder / "train.bin", folder / "val.bin"):
        size = path.stat().st_size if path.is_file() else 0
        if size == 0 or size % 2:
            fail(f"--data {folder}: {path.name} is missing, empty or no list of uint16 tokens")
        splits.append(torch.from_file(str(path), size=size // 2, dtype=torch.uint16))
    if vocabulary is None:
        vocabulary = 1 + max(int(part.int().max()) for tokens in splits for part in tokens.split(1 << 24))
    return Text(*splits, vocabulary)


def windows(tokens, starts, context, device):
    """Sequences that begin at `starts`, and the same moved on by one token: inputs and targets."""
    rows = torch.stack([tokens[start : start + context + 1] for start in starts.tolist()]).long().to(device)
    return rows[:, :-1], rows[:, 1:]


# ----------------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Pre-norm GPT. It returns the last hidden states, or the loss, which takes them together with `head.weight`."""

    def __init__(self, vocabulary, width, depth, heads, context):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=(2 * width * depth if residual else width) ** -0.5)

    def forward(self, tokens, targets=None, loss=None):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        hidden = self.norm(self.blocks(x))
        return hidden if loss is None else loss(hidden, self.head.weight, targets)


def plain_loss(hidden, weight, target):
    return F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), target.flatten())


LOSSES = {"fused": linear_cross_entropy, "plain": plain_loss}


# -------------------------------------------------------------------------------------------------- training


class Run(NamedTuple):
    """One model with its optimizer, and what was seen on the way, in lists that a checkpoint can hold."""

    model: GPT
    call: nn.Module  # what is called: the model, or what distributes it
    optimizer: torch.optim.Optimizer
    history: dict[str, list]


def make_optimizer(name, model, args):
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=args.lr)
    options = {"lr": args.lr, "init": args.init, "beta": args.beta, "anneal_steps": args.anneal_steps or args.steps}
    options["scale_lr"] = PAPER_SCALE_LR if args.scale_lr == "paper" else None
    if args.curved == "modules":
        return SELAdam(param_groups(model), **options)
    return SELAdam(model.named_parameters(), curved=args.curved, **options)


def names(args):
    return ("adam", "sel") if args.optimizer == "both" else (args.optimizer,)


def make_runs(args, vocabulary):
    torch.manual_seed(args.seed)

    def make():
        return GPT(vocabulary, args.width, args.depth, args.heads, args.context)

    first = make().to(dtype=getattr(torch, args.dtype))
    if args.parallel != "fsdp":
        first.to(args.device)
    runs = {}
    for name in names(args):
        model, call = parallel.distribute(copy.deepcopy(first), make, args)
        history = {"train": [], "seconds": [], "optimizer_seconds": [], "val": []}
        runs[name] = Run(model, call, make_optimizer(name, model, args), history)
    return runs


def learning_rate(step, args):
    """Linear warm-up, then half a cosine down to a tenth."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / args.steps))
    return args.lr * min(1.0, (step + 1) / max(args.warmup, 1)) * (FINAL_LR + (1 - FINAL_LR) * cosine)


def clock(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def loss_of(run, inputs, targets, args):
    bf16 = args.autocast and args.parallel != "fsdp"  # fully_shard casts by itself
    with torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=bf16):
        return run.call(inputs, targets, LOSSES[args.loss])


def train_step(run, batches, lr, args):
    """One step over all micro-batches."""
    started = clock(args.device)
    run.optimizer.zero_grad()
    total = 0.0
    for k, (inputs, targets) in enumerate(batches):
        with parallel.micro_batch(run.call, last=k + 1 == len(batches)):
            loss = loss_of(run, inputs, targets, args) / len(batches)
            loss.backward()
        total += loss.item()
    if args.clip:
        nn.utils.clip_grad_norm_(run.model.parameters(), args.clip)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    before = clock(args.device)
    run.optimizer.step()
    after = clock(args.device)
    run.history["train"].append(*parallel.mean(total))
    run.history["seconds"].append(after - started)
    run.history["optimizer_seconds"].append(after - before)


@torch.no_grad()
def validate(runs, batches, step, args):
    for run in runs.values():
        total = 0.0
        for inputs, targets in batches:
            total += loss_of(run, inputs, targets, args).item() * len(inputs)
        run.history["val"].append([step, *parallel.mean(total / sum(len(inputs) for inputs, _ in batches))])


def train(runs, text, generator, step, args):
    """Trains from step `step` on and returns the step reached: less than args.steps after a Ctrl-C."""
    interrupted = catch_ctrl_c(again=args.parallel is None)
    val_batches = validation_batches(text.val, args)
    writers = make_writers(runs, args, step)
    bar = (
        tqdm(total=args.steps, initial=step, unit="step", dynamic_ncols=True) if tqdm and parallel.rank() == 0 else None
    )
    if not any(run.history["val"] for run in runs.values()):
        validate(runs, val_batches, step, args)
    while step < args.steps and not parallel.anywhere(interrupted):
        batches = [draw(text.train, generator, args) for _ in range(args.accumulate)]
        lr = learning_rate(step, args)
        step += 1
        for run in runs.values():
            train_step(run, batches, lr, args)
        if step % args.eval_every == 0 or step == args.steps:
            validate(runs, val_batches, step, args)
        log(runs, writers, step)
        if bar is not None:
            bar.set_postfix({name: f"{run.history['train'][-1]:.4f}" for name, run in runs.items()}, refresh=False)
            bar.update()
        if args.save and step % args.save_every == 0:
            save(args.save, runs, text, generator, step, args)
    if bar is not None:
        bar.close()
    for writer in writers.values():
        writer.close()
    return step


def draw(tokens, generator, args):
    """This process's share of the next batch."""
    starts = torch.randint(len(tokens) - args.context, (args.batch,), generator=generator)
    return windows(tokens, starts[parallel.rank() :: parallel.ranks()], args.context, args.device)


def validation_batches(tokens, args):
    """The same few sequences at every validation, evenly spread over the text."""
    ranks = parallel.ranks()
    count = math.ceil(EVAL_SEQUENCES / ranks) * ranks  # as many for each
    starts = torch.linspace(0, len(tokens) - args.context - 1, count, dtype=torch.float64).long()[
        parallel.rank() :: ranks
    ]
    return [windows(tokens, part, args.context, args.device) for part in starts.split(args.batch // ranks)]


def catch_ctrl_c(again):
    """A list that the first Ctrl-C fills, so that no step is left half done. A second one stops at once, if it may come `again`:
    torchrun hands on what its processes have already seen."""
    seen = []

    def handler(number, frame):
        seen.append(number)
        if again:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, handler)
    return seen


# ---------------------------------------------------------------------------------------------- checkpoints


def save(path, runs, text, generator, step, args):
    """All that resuming needs, as tensors and plain values: torch.load(weights_only=True) reads it."""
    state = {
        "format": CHECKPOINT,
        "flags": {key: value for key, value in vars(args).items() if key not in NOT_SAVED},
        "text": text.sizes(),
        "step": step,
        "generator": generator.get_state(),
        "runs": {
            name: {
                "model": parallel.whole(r.model.state_dict()),
                "optimizer": parallel.whole(r.optimizer.state_dict()),
                "history": r.history,
            }
            for name, r in runs.items()
        },
    }
    if parallel.rank():
        return
    unfinished = f"{path}.tmp"
    torch.save(state, unfinished)
    os.replace(unfinished, path)  # in one go: a crash while saving keeps the checkpoint before


def read_checkpoint(path):
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        fail(f"--resume {path}: {error.strerror}")
    except Exception:  # torch.load raises a different one for each way a file can be broken
        fail(f"--resume {path}: this is no checkpoint, or a damaged one")
    if not isinstance(state, dict) or state.get("format") != CHECKPOINT:
        fail(f"--resume {path}: this is a checkpoint, but not one of this script")
    return state


def restore(runs, state, generator, args):
    for name, run in runs.items():
        saved = state["runs"][name]
        if args.parallel == "fsdp":
            parallel.set_whole_weights(run.model, saved["model"])
        else:
            run.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(parallel.part_of(run.optimizer, saved["optimizer"]))
        run.history.update(saved["history"])
    if "sel" in runs:
        for group in runs["sel"].optimizer.param_groups:
            group["anneal_steps"] = args.anneal_steps or args.steps  # --steps may have been raised
    generator.set_state(state["generator"])


# --------------------------------------------------------------------------------------------------- report


def print_results(runs):
    for name, run in runs.items():
        print(f"{name} val_loss {run.history['val'][0][1]:.4f} -> {run.history['val'][-1][1]:.4f}")


def print_table(runs, text, generator, args):
    batches = [draw(text.train, generator, args)] * args.accumulate
    columns = {name: figures(run, runs, batches, args) for name, run in runs.items()}
    if parallel.rank():
        return
    print("\n" + " " * 42 + "".join(f"{name:>12}" for name in columns))
    for row in next(iter(columns.values())):
        print(f"{row:42}" + "".join(f"{column[row]:>12}" for column in columns.values()))


def figures(run, runs, batches, args):
    """One column of the table. It spends one more training step on measuring memory: call it last."""
    history = run.history
    rows = {
        "train loss, mean of the last 10 steps": f"{statistics.fmean(history['train'][-10:]):.4f}",
        "val loss": f"{history['val'][-1][1]:.4f}",
    }
    for other in runs.values():
        if other is not run:
            goal = other.history["val"][-1][1]
            step = next((step for step, loss in history["val"] if loss <= goal), None)
            rows["steps to the other's final val loss"] = "never" if step is None else str(step)
            seconds = sum(history["seconds"][:step])
            rows["seconds to the other's final val loss"] = "never" if step is None else f"{seconds:.1f}"
    rows["whole step, median, ms"] = f"{1e3 * statistics.median(history['seconds']):.1f}"
    rows["optimizer's part of it, median, ms"] = f"{1e3 * statistics.median(history['optimizer_seconds']):.1f}"
    state = [parallel.local(t) for s in run.optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    weights = [parallel.local(p) for group in run.optimizer.param_groups for p in group["params"]]
    held = sum(t.nbytes for t in weights + state)
    rows["optimizer state, MiB"] = mib(sum(t.nbytes for t in state))
    run.optimizer.zero_grad()
    lr = learning_rate(args.steps - 1, args)
    rows["peak memory of training, MiB"] = mib(held + peak(lambda: train_step(run, batches, lr, args), args.device))
    inputs, targets = batches[0]
    hidden = run.model(inputs).detach().requires_grad_()
    weight = parallel.joined(run.model.head.weight).detach().to(hidden.dtype).requires_grad_()
    loss_peak = peak(lambda: LOSSES[args.loss](hidden, weight, targets).backward(), args.device)
    rows[f"peak memory of the {args.loss} loss, MiB"] = mib(loss_peak)
    return rows


def mib(size):
    return f"{size / 2**20:.1f}"


def peak(function, device):
    """The most memory that `function` holds at one time, in bytes, beyond what was held before."""
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_bytes())["traceEvents"] if e.get("name") == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    allocated = [event["args"]["Total Allocated"] for event in events]
    return max(allocated) - (allocated[0] - events[0]["args"]["Bytes"])


def plot(path, runs):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for (name, run), color in zip(runs.items(), ("tab:blue", "tab:orange"), strict=False):
        steps, losses = zip(*run.history["val"], strict=True)
        seconds = [sum(run.history["seconds"][:step]) for step in steps]
        by_step.plot(steps, losses, color=color, marker=".", label=f"{name}: {losses[0]:.4f} to {losses[-1]:.4f}")
        by_time.plot(seconds, losses, color=color, marker=".", label=name)
    val = [[loss for _, loss in run.history["val"]] for run in runs.values()]
    if all(len(losses) > 3 and all(map(math.isfinite, losses)) for losses in val):
        # The first fall is so deep that it would press the rest of the curves into one line.
        low, high = min(map(min, val)), max(losses[1] for losses in val)
        by_step.set_ylim(low - 0.1 * (high - low), high + 0.2 * (high - low))
    by_step.set(xlabel="step", ylabel="validation loss (nats per token)", title="by steps")
    by_time.set(xlabel="seconds of training", title="by time")
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=130)


def make_writers(runs, args, step):
    if not args.logdir or parallel.rank():
        return {}
    from torch.utils.tensorboard import SummaryWriter

    return {name: SummaryWriter(str(Path(args.logdir, name)), purge_step=step + 1) for name in runs}


def log(runs, writers, step):
    for name, writer in writers.items():
        history = runs[name].history
        writer.add_scalar("loss/train", history["train"][-1], step)
        if history["val"][-1][0] == step:
            writer.add_scalar("loss/val", history["val"][-1][1], step)
            if name == "sel":
                log_scales(writer, runs[name].optimizer, step)


# ---------------------------------------------------------------------------------------------------- flags

NOT_SAVED = ("device", "parallel", "save", "save_every", "resume", "plot", "logdir")
FIXED = ("width", "depth", "heads", "context", "dtype", "seed", "init", "beta", "curved")


def number(kind, least):
    def convert(text):
        value = kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {least} and finite, got {text}")
        return value

    convert.__name__ = kind.__name__  # argparse says "invalid int value" by it
    return convert


def beta(text):
    return text if text in ("auto", "width") else number(float, 1)(text)


def make_parser():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.error = fail  # one line instead of the whole usage
    add = parser.add_argument
    add("--data", help="any file, read as bytes; or a folder with train.bin and val.bin as nanoGPT prepares them")
    add(
        "--preset",
        choices=tuple(PRESETS),
        help="a size of the paper's, on OpenWebText in nanoGPT's folder; other flags win",
    )
    add(
        "--parallel", choices=("ddp", "fsdp"), help="under torchrun: copies of the model, or one cut over all processes"
    )
    add("--vocabulary", type=number(int, 1), help="of a folder with train.bin (default: its largest token + 1)")
    add("--optimizer", choices=("adam", "sel", "both"), default="both")
    add("--steps", type=number(int, 1), default=400)
    add("--width", type=number(int, 1), default=128)
    add("--depth", type=number(int, 1), default=4)
    add("--heads", type=number(int, 1), default=4)
    add("--context", type=number(int, 1), default=128)
    add(
        "--batch",
        type=number(int, 1),
        default=12,
        help="sequences in a batch (in a micro-batch with --accumulate), of all processes",
    )
    add("--accumulate", type=number(int, 1), default=1, help="micro-batches in a step")
    add("--lr", type=number(float, 1e-12), default=3e-3, help="the highest rate, of both optimizers")
    add("--warmup", type=number(int, 1), default=20, help="steps of linear warm-up; after it, cosine down to a tenth")
    add("--clip", type=number(float, 0), default=1.0, help="largest norm of the gradient; 0 for no clipping")
    add("--seed", type=number(int, 0), default=0)
    add("--loss", choices=tuple(LOSSES), default="fused")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    add("--autocast", action="store_true", help="compute in bfloat16, whatever the weights are")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--init", choices=("mismatched", "preserve"), default="mismatched", help="SELAdam's")
    add("--beta", type=beta, default="width", help='SELAdam\'s: a number, "auto" or "width"')
    add("--scale-lr", choices=("default", "paper"), default="default", help="SELAdam's: its own, or PAPER_SCALE_LR")
    add("--anneal-steps", type=number(int, 1), help="SELAdam's (default: as many as --steps)")
    curved = ("modules", "matrices", "all", "none")
    add("--curved", choices=curved, default="modules", help="SELAdam's; modules: chosen by type, with param_groups")
    add("--eval-every", type=number(int, 1), default=25, help="steps between two validations")
    add("--save", help="write checkpoints to this file (after a Ctrl-C also without it: train_gpt.pt)")
    add("--save-every", type=number(int, 1), default=100, help="steps between two checkpoints")
    add("--resume", help="go on from this checkpoint; its flags stand unless given anew")
    add("--plot", help="draw the curves to this PNG file")
    add("--logdir", help="write TensorBoard logs to this folder")
    return parser


def parse(arguments):
    """Returns the flags, and the checkpoint to resume from or None. A resumed run starts from the saved flags."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    state = read_checkpoint(args.resume) if args.resume else None
    if args.preset or state:
        parser.set_defaults(**(PRESETS[args.preset] if args.preset else {}))
        parser.set_defaults(**({**state["flags"], "save": args.resume} if state else {}))
        args = parser.parse_args(arguments)
    if state:
        check_resume(args, state)
    check(args)
    return args, state


def check_resume(args, state):
    for key in FIXED:
        old, new = state["flags"][key], getattr(args, key)
        if old != new:
            fail(f"--{key} {new}: the checkpoint was trained with {old}, and this cannot change on the way")
    missing = [name for name in names(args) if name not in state["runs"]]
    if missing:
        fail(f"--optimizer {args.optimizer}: the checkpoint has no {missing[0]}, only {', '.join(state['runs'])}")
    if args.steps < state["step"]:
        fail(f"--steps {args.steps}: the checkpoint is already at step {state['step']}")


def check(args):
    """Everything that can be known to fail is said before training, not after it."""
    if args.width % args.heads:
        fail(f"--width {args.width} is no multiple of --heads {args.heads}")
    if parallel.started_by_torchrun() != bool(args.parallel):
        fail(
            "--parallel ddp or fsdp goes with torchrun: torchrun --nproc-per-node=2 examples/train_gpt.py --parallel fsdp"
        )
    if args.batch % int(os.environ.get("WORLD_SIZE", 1)):
        fail(f"--batch {args.batch} is no multiple of the {os.environ['WORLD_SIZE']} processes that share it")
    for flag, module, extra in (("plot", "matplotlib", "examples"), ("logdir", "tensorboard", "tensorboard")):
        if getattr(args, flag) and importlib.util.find_spec(module) is None:
            fail(f"--{flag} needs {module}: pip install 'seloptim[{extra}]'")
    for flag in ("save", "plot"):
        path = getattr(args, flag)
        if path and (Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK)):
            fail(f"--{flag} {path}: cannot write a file there")
    if args.logdir and Path(args.logdir).is_file():
        fail(f"--logdir {args.logdir}: this is a file, not a folder")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        fail(f"--device {args.device}: {str(error).splitlines()[0]}")


def main(arguments=None):
    args, state = parse(arguments)
    if args.parallel:
        parallel.join(args)
    try:
        run_all(args, state)
    finally:
        parallel.leave()


def run_all(args, state):
    first = parallel.rank() == 0
    if args.preset and first:
        print_estimate(args, names(args), parallel.ranks())
    text = load_text(args.data, args.vocabulary)
    for part, tokens in (("train", text.train), ("validate", text.val)):
        if len(tokens) <= args.context:
            fail(f"--data: only {len(tokens)} tokens to {part} on, --context {args.context} needs one more than that")
    if state and state["text"] != text.sizes():
        fail(f"--data: {text.sizes()} tokens and vocabulary, but the checkpoint was trained on {state['text']}")
    runs = make_runs(args, text.vocabulary)
    generator = torch.Generator().manual_seed(args.seed)
    if state:
        restore(runs, state, generator, args)
    step = train(runs, text, generator, state["step"] if state else 0, args)
    if args.save or step < args.steps:
        args.save = args.save or "train_gpt.pt"
        save(args.save, runs, text, generator, step, args)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if step < args.steps:
        if not first:
            raise SystemExit(130)
        print(f"interrupted after step {step}: go on with --resume {args.save}", file=sys.stderr)
        raise SystemExit(130)
    if first:
        print_results(runs)
        if args.plot:
            plot(args.plot, runs)
    print_table(runs, text, generator, args)


if __name__ == "__main__":
    main()
