"""`python -m seloptim`: look into a saved state, draw the map, turn a saved state into Adam's, build the native kernel."""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import SELAdam, kernels
from .convert import check_layout, read_checkpoint, to_adam_state
from .functional import sel_inverse, sel_pullback


class Refusal(Exception):
    """What the user is told in one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; None (default) takes sys.argv's.

    Returns:
        The exit code: 0, or 2 after one line on stderr that says what was wrong.

    Raises:
        SystemExit: from argparse: help (0) and arguments that do not parse (2).

    Example:
        >>> main(["inspect", "no such file.pt"])
        2
    """
    args = _parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch says about odd files is said here, in one line
            text = args.run(args)
        print(text, flush=True)
    except (Refusal, ValueError, OSError, ImportError) as error:
        if isinstance(error, BrokenPipeError):
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  `| head` has read enough
            return 0
        if isinstance(error, OSError) and error.strerror:
            message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        else:
            message = str(error)
        print(f"seloptim: {_printable(message)}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m seloptim",
        description="Look into a saved state, draw the map, convert a saved state to torch.optim.Adam's.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    inspect = commands.add_parser(
        "inspect", help="print what a saved SELAdam state holds", description="Print what a saved SELAdam state holds."
    )
    inspect.add_argument(
        "checkpoint", type=Path, help="file of torch.save: a state_dict, or a larger dict with one in it"
    )
    inspect.set_defaults(run=_inspect)

    curve = commands.add_parser(
        "curve",
        help="draw map, slope and relative step to a PNG",
        description="Draw the map, its slope, and the relative size of a step, with all scales at their start.",
    )
    curve.add_argument(
        "--beta", type=_positive, nargs="+", default=[4.0, 12.5, 40.0], help="curvatures (default: 4 12.5 40)"
    )
    curve.add_argument(
        "--combine", choices=("mismatched", "congruent"), default="mismatched", help="(default: mismatched)"
    )
    curve.add_argument("--out", type=Path, default=Path("sel_curve.png"), help="image (default: sel_curve.png)")
    curve.set_defaults(run=_curve)

    convert = commands.add_parser(
        "convert",
        help="turn a saved SELAdam state into one that torch.optim.Adam loads",
        description="Turn a saved SELAdam state into one that torch.optim.Adam loads.",
    )
    convert.add_argument(
        "checkpoint", type=Path, help="file of torch.save: a state_dict, or a larger dict with one in it"
    )
    convert.add_argument("--out", type=Path, help="file to write (default: beside CHECKPOINT, as STEM.adam.pt)")
    convert.set_defaults(run=_convert)

    build = commands.add_parser(
        "build",
        help="compile the native CPU kernel",
        description="Compile the native CPU kernel for this machine, once; optimizers with fused=None use it from then on.",
    )
    build.set_defaults(run=_build)
    return parser


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _build(args: argparse.Namespace) -> str:
    try:
        return f"wrote {kernels.build()}"
    except RuntimeError as error:
        raise Refusal(str(error)) from error


# ------------------------------------------------------------------------------------------------------------ inspect


def _inspect(args: argparse.Namespace) -> str:
    lines: list[str] = []
    for where, saved in _states(args.checkpoint):
        lines += _inspect_state(f"{args.checkpoint}{where}", saved)
    return "\n".join(lines)


def _inspect_state(title: str, saved: Mapping[str, Any]) -> list[str]:
    scales: list[tuple[str, ...]] = [("name", "shape", "steps", "beta", "e", "l", "m", "n")]
    weights: list[tuple[str, ...]] = [
        ("name", "raw", "weight", "beta * rms", "slope -", "slope +", "> 4 sigma", "kurtosis", "max / initial rms")
    ]
    plain: list[str] = []
    for g, group in enumerate(saved["param_groups"]):
        names = group.get("param_names")
        for i, key in enumerate(group["params"]):
            name = names[i] if names and len(names) > i else key if isinstance(key, str) else f"{g}.{i}"
            name = _printable(str(name))
            state = saved["state"].get(key)
            if not state or "raw" not in state:
                plain.append(name)
                continue
            try:
                of_scales, of_weights = _inspect_parameter(name, group, state)
            except Exception as error:  # what a damaged state makes torch raise has no common class
                reason = (str(error) or type(error).__name__).splitlines()[0]
                raise Refusal(f"{title}: the state of parameter {name} is damaged: {reason}") from error
            scales.append((name, *of_scales))
            weights.append((name, *of_weights))
    if all(row[-1] == "0" for row in scales[1:]):
        scales = [row[:-1] for row in scales]
    lines = [f"{_printable(title)}: {len(scales) - 1} curved, {len(plain)} plain Adam", ""]
    if len(scales) > 1:
        lines += ["scales, mean [least, greatest] of row * col", *_table(scales, 2), ""]
        lines += ["weights", *_table(weights, 1), ""]
    if plain:
        lines += ["plain Adam: " + ", ".join(plain), ""]
    return lines


def _inspect_parameter(name: str, group: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """One parameter's cells, by an optimizer of it alone, so that one parameter's state is in memory at a time."""
    p = torch.nn.Parameter(torch.zeros(state["raw"].shape, dtype=state["raw"].dtype))
    own = {"curved": True, "beta": state["beta"]}
    optimizer = SELAdam([{"params": [(name, p)], **own}])
    saved_group = {**group, **own, "params": [0], "param_names": [name]}
    optimizer.load_state_dict({"state": {0: dict(state)}, "param_groups": [saved_group]})
    stats = {key.removeprefix(f"{name}/"): value for key, value in optimizer.stats().items()}

    def number(what: str) -> str:
        return _number(stats[what]) if what in stats else "-"

    def scale(kind: str) -> str:
        if f"scale_{kind}_mean" not in stats:
            return "0" if kind == "n" else "-"
        mean, least, greatest = (number(f"scale_{kind}_{what}") for what in ("mean", "min", "max"))
        return mean if least == greatest else f"{mean} [{least}, {greatest}]"

    def span(tensor: Tensor) -> str:
        if not tensor.numel():
            return "-"
        least, greatest = tensor.detach().aminmax()
        return f"[{_number(least.item())}, {_number(greatest.item())}]"

    shape = "x".join(map(str, p.shape)) or "scalar"
    steps = f"{float(state['step']):g}"
    of_scales = [shape, steps, _number(optimizer.beta(p)), *(scale(kind) for kind in ("e", "l", "m", "n"))]
    tail = ("tail_beyond_4_sigma", "tail_kurtosis", "tail_max_over_initial_rms")
    of_weights = [span(optimizer.raw(p)), span(p)]
    of_weights += [number(what) for what in ("size_beta_rms", "slope_negative", "slope_positive", *tail)]
    return of_scales, of_weights


def _states(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Where in a checkpoint the states of SELAdam are, as '["optimizer"]', and they themselves."""
    found, others = [], []
    try:
        checkpoint = read_checkpoint(path, mmap=True)
    except OSError as error:
        if error.filename:
            raise
        raise Refusal(f"{path}: cannot be read as a checkpoint, is it whole? ({error.strerror or error})") from error
    for where, value in _walk(checkpoint):
        try:
            check_layout(value)
        except ValueError:
            continue
        for key, state in value["state"].items():
            if any(isinstance(t, Tensor) and _is_hollow(t) for t in state.values()):
                name = _printable(str(key))
                raise Refusal(
                    f"{path}{where}: the state of parameter {name} is damaged: a tensor has less data than its shape"
                )
        ours = any("sel_format" in group for group in value["param_groups"])
        (found if ours else others).append((where, value))
    if not found:
        also = f", only that of another optimizer{' at ' + others[0][0] if others[0][0] else ''}" if others else ""
        raise Refusal(f"{path}: there is no state of SELAdam in it{also}")
    return found


def _is_hollow(tensor: Tensor) -> bool:
    """Whether a tensor claims more numbers than the file holds, by strides of 0: working on it could fill the memory."""
    if tensor.layout != torch.strided:
        return False
    return tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()


def _walk(checkpoint: Any) -> Iterator[tuple[str, Any]]:
    """Every mapping inside a checkpoint with its place; a file may hold mappings that contain themselves."""
    seen: set[int] = set()
    waiting = [("", checkpoint)]
    for where, value in waiting:
        if id(value) in seen or not isinstance(value, (Mapping, list, tuple)):
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            yield where, value
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        waiting += [(f"{where}[{key!r}]", inner) for key, inner in pairs]


def _table(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Lines of aligned columns, the first `left` of them to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(c.ljust(w) if k < left else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]


def _number(value: float) -> str:
    return f"{value:.4g}"


def _printable(text: str) -> str:
    """One line without control characters, whatever a file's names hold."""
    return "".join(c if c.isprintable() else " " for c in text)


# -------------------------------------------------------------------------------------------------------------- curve


def _curve(args: argparse.Namespace) -> str:
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise Refusal("curve needs matplotlib: pip install 'seloptim[examples]'") from error
    figure = Figure(figsize=(15, 5.2), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12))
    _draw(figure, args.beta, args.combine)
    kind = args.out.suffix.lstrip(".") or "png"
    _write(args.out, lambda part: figure.savefig(part, dpi=150, format=kind))
    return f"wrote {args.out}"


def _draw(figure: Any, betas: Sequence[float], combine: str) -> None:
    """Three panels over the weights that a network has: map, slope, relative step."""
    ink, quiet, largest, lr = "#22262e", "#8a909c", 0.3, 1e-3
    colours = ("#2a6fbb", "#e07b28", "#2c9c69", "#b8446f", "#7a5cc0", "#7d6a4f")
    size = torch.logspace(-3, torch.tensor(largest).log10().item(), 400, dtype=torch.float64)
    weight = torch.cat([-size.flip(0), torch.zeros(1, dtype=torch.float64), size])
    title = f"Curved weight space: {combine} map, e = l = m = 1, n = 0"
    figure.suptitle(title, x=0.01, ha="left", color=ink, fontsize=15, fontweight="bold")
    by_map, by_slope, by_step = panels = figure.subplots(1, 3)

    by_map.plot(weight, weight, color=quiet, lw=1.4, ls=(0, (1, 2)), label="Adam: weight = raw")
    by_slope.axhline(1.0, color=quiet, lw=1.4, ls=(0, (1, 2)), label="Adam")
    by_step.plot(size, lr / size, color=quiet, lw=1.4, ls=(0, (1, 2)), label="Adam")
    for k, beta in enumerate(betas):
        raw = sel_inverse(weight, beta=beta, combine=combine)
        slope = sel_pullback(torch.ones_like(raw), raw, beta=beta, combine=combine)[0]
        line = {"color": colours[k % len(colours)], "lw": 2.0}
        by_map.plot(raw, weight, label=f"β = {beta:g}", **line)
        negative, positive = slice(0, len(size)), slice(len(size) + 1, None)
        by_slope.plot(weight[negative], slope[negative], **line)
        by_slope.plot(weight[positive], slope[positive], label=f"β = {beta:g}", **line)
        by_step.plot(size, lr * slope[positive] / size, label=f"β = {beta:g}", **line)
        if combine == "mismatched":
            by_step.plot(size, lr * slope[negative].flip(0) / size, ls="--", alpha=0.75, **line)

    by_map.set(
        title="The map", xlabel="raw weight", ylabel="weight", xlim=(-largest, largest), ylim=(-largest, largest)
    )
    by_slope.set(title="Its slope: what a raw step is multiplied by", xlabel="weight", ylabel="d weight / d raw")
    by_slope.set(xlim=(-largest, largest), ylim=(0, None))
    by_step.set(title=f"One step at lr = {lr:g}, relative to its weight", xlabel="|weight|", ylabel="|step| / |weight|")
    by_step.set(xscale="log", yscale="log", xlim=(size[0].item(), largest))
    if combine == "mismatched":
        by_step.plot([], [], color=ink, lw=1.6, ls="--", alpha=0.75, label="negative weights")
    for panel in panels:
        panel.set_title(panel.get_title(), loc="left", color=ink, fontsize=12)
        panel.set_title("")
        panel.grid(color="#e6e8ec", lw=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(quiet)
        panel.tick_params(colors=ink, length=3)
        panel.legend(frameon=False, fontsize=10)


# ------------------------------------------------------------------------------------------------------------ convert


def _convert(args: argparse.Namespace) -> str:
    out = args.out or args.checkpoint.with_name(f"{args.checkpoint.stem}.adam.pt")
    states = _states(args.checkpoint)
    if len(states) > 1:
        places = " and ".join(where for where, _ in states)
        raise Refusal(f"{args.checkpoint}: it holds several states of SELAdam, at {places}; save one of them by itself")
    if out.exists() and out.samefile(args.checkpoint):
        raise Refusal(f"{out}: this is the checkpoint itself; give another file with --out")
    where, saved = states[0]
    try:
        converted = to_adam_state(saved)
    except Exception as error:  # what a damaged state makes torch raise has no common class
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise Refusal(f"{args.checkpoint}{where}: the state is damaged: {reason}") from error
    _write(out, lambda part: torch.save(converted, part))
    return f"wrote {out}, for torch.optim.Adam's load_state_dict"


def _write(path: Path, save: Callable[[Path], object]) -> None:
    """All of a file, or none of it: what stood at `path` stays until the new one is complete."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save(part)
        part.replace(path)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError where a folder does not exist
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise Refusal(f"{path}: {reason or 'cannot be written'}") from error
    finally:
        part.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
