"""The example scripts, each as a user starts it, in a short form."""

import importlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.flop_counter

EXAMPLES = Path(__file__).parent.parent / "examples"
TINY = [
    "--width",
    "16",
    "--depth",
    "1",
    "--heads",
    "2",
    "--context",
    "16",
    "--batch",
    "4",
    "--eval-every",
    "4",
    "--warmup",
    "2",
]


sys.path.insert(0, str(EXAMPLES))  # the script's own folder, as Python has it


def load_train_gpt() -> Any:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLES / "train_gpt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train_gpt = load_train_gpt()
gpt_presets: Any = importlib.import_module("gpt_presets")


def start(script: str, *flags: str, launcher: Sequence[str] = ()) -> subprocess.Popen[str]:
    # One thread: tiny matrices gain nothing from two, and on a busy machine two wait for each other.
    root = str(EXAMPLES.parent)
    path = os.pathsep.join([root, os.environ["PYTHONPATH"]]) if "PYTHONPATH" in os.environ else root
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, *launcher, str(EXAMPLES / script), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def run(script: str, *flags: str, launcher: Sequence[str] = ()) -> str:
    process = start(script, *flags, launcher=launcher)
    out, err = process.communicate(timeout=80)
    assert process.returncode == 0, err
    return out


def main(*flags: str) -> None:
    """train_gpt.py in this process, with the tiny model."""
    train_gpt.main([*flags] if "--resume" in flags else [*TINY, *flags])


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog; " * 200)
    return str(path)


def interrupt_in_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Sends SIGINT while the batch of the given step (from 1 on) is drawn: the step must still be completed."""
    draw, calls = train_gpt.draw, []

    def interrupting_draw(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == step:
            signal.raise_signal(signal.SIGINT)
        return draw(*args)

    monkeypatch.setattr(train_gpt, "draw", interrupting_draw)


def read(path: Path | str) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Equal bit for bit, all the way down, but for the times that a run took."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            if key not in ("seconds", "optimizer_seconds"):
                assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    else:
        assert a == b, where


def val_losses(out: str, name: str) -> tuple[float, float]:
    match = re.search(rf"^{name} val_loss (\d+\.\d{{4}}) -> (\d+\.\d{{4}})$", out, re.MULTILINE)
    assert match, out
    return float(match[1]), float(match[2])


def test_minimal() -> None:
    out = run("minimal.py")
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss (\S+)$", out, re.MULTILINE)]
    assert len(losses) == 3 and losses[-1] < 0.02 * losses[0]
    weight, raw = map(float, re.findall(r"[+-]\d\.\d{5}", out))
    assert weight != raw
    assert re.findall(r"^scale (\w):", out, re.MULTILINE)[:3] == ["e", "l", "m"]


def test_finetune_starts_from_the_very_loss_it_was_given() -> None:
    out = run("finetune.py")
    before, after, end = re.findall(r": +(\d+\.\d+)$", out, re.MULTILINE)
    assert before == after
    assert float(end) < float(after) - 0.3


def test_train_gpt_on_the_standard_library(tmp_path: Path) -> None:
    picture, logs = tmp_path / "curves.png", tmp_path / "logs"
    out = run("train_gpt.py", *TINY, "--steps", "30", "--lr", "3e-3", "--plot", str(picture), "--logdir", str(logs))
    lines = out.splitlines()
    assert lines[0].startswith("adam val_loss ") and lines[1].startswith("sel val_loss ")
    for name in ("adam", "sel"):
        first, last = val_losses(out, name)
        assert last < first - 0.2
    assert "nan" not in out
    for row in ("steps to the other", "seconds to the other", "optimizer's part", "peak memory of the fused loss"):
        assert re.search(rf"^{row}.*\s(\d[\d.]*|never)\s+(\d[\d.]*|never)$", out, re.MULTILINE), out
    assert picture.read_bytes().startswith(b"\x89PNG")

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name in ("adam", "sel"):
        events = EventAccumulator(str(logs / name)).Reload()
        assert [e.step for e in events.Scalars("loss/train")] == list(range(1, 31))
        assert len(events.Tags()["scalars"]) > 2 or name == "adam"  # the scales
        assert events.Scalars("loss/val")[-1].value == pytest.approx(val_losses(out, name)[1], abs=1e-4)


def test_ctrl_c_leaves_a_checkpoint_from_which_the_run_ends_as_if_never_stopped(tmp_path: Path, text: str) -> None:
    stopped, whole, resumed = (str(tmp_path / name) for name in ("stopped.pt", "whole.pt", "resumed.pt"))
    flags = [*TINY, "--data", text, "--steps", "60", "--save-every", "5"]
    process = start("train_gpt.py", *flags, "--save", stopped)
    while not Path(stopped).exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == ""
    step = read(stopped)["step"]
    assert 5 <= step < 60
    assert f"interrupted after step {step}: go on with --resume {stopped}" in err
    assert run("train_gpt.py", "--resume", stopped, "--save", resumed)
    assert run("train_gpt.py", *flags, "--save", whole)
    assert_same(read(resumed), read(whole))


@pytest.mark.parametrize(
    "flags",
    [
        ["--optimizer", "adam"],
        ["--optimizer", "sel"],
        ["--optimizer", "both", "--accumulate", "2"],
        ["--optimizer", "both", "--dtype", "bfloat16", "--loss", "plain"],
        ["--optimizer", "sel", "--curved", "matrices", "--init", "preserve", "--beta", "20", "--anneal-steps", "5"],
    ],
    ids=" ".join,
)
def test_resume_is_bit_exact(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    whole, stopped, resumed = (str(tmp_path / name) for name in ("whole.pt", "stopped.pt", "resumed.pt"))
    flags = [*flags, "--data", text, "--steps", "9"]
    main(*flags, "--save", whole)
    with monkeypatch.context() as patch:
        interrupt_in_step(patch, 6)
        with pytest.raises(SystemExit, match="130"):
            main(*flags, "--save", stopped)
    accumulate = 2 if "--accumulate" in flags else 1
    assert read(stopped)["step"] == 6 // accumulate
    main("--resume", stopped, "--save", resumed)
    assert_same(read(resumed), read(whole))
    for saved in read(whole)["runs"].values():
        assert saved["history"]["val"][-1][1] < saved["history"]["val"][0][1]


def test_one_optimizer_goes_on_alone_from_a_checkpoint_of_both(tmp_path: Path, text: str) -> None:
    both, half, alone = (str(tmp_path / name) for name in ("both.pt", "half.pt", "alone.pt"))
    main("--data", text, "--steps", "6", "--save", both, "--save-every", "4")
    with pytest.MonkeyPatch.context() as patch:
        interrupt_in_step(patch, 3)
        with pytest.raises(SystemExit, match="130"):
            main("--data", text, "--steps", "6", "--save", half)
    main("--resume", half, "--optimizer", "sel", "--save", alone)
    assert read(alone)["runs"].keys() == {"sel"}
    assert_same(read(alone)["runs"]["sel"], read(both)["runs"]["sel"])


def test_a_second_ctrl_c_stops_at_once(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(*args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(train_gpt, "draw", draw)
    with pytest.raises(KeyboardInterrupt):
        main("--data", text, "--steps", "5")


def test_accumulation_and_either_loss_give_the_same_training(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    histories = []
    for flags in ("--batch 4", "--batch 2 --accumulate 2", "--batch 4 --loss plain"):
        path = tmp_path / "run.pt"
        main("--data", text, "--steps", "8", "--optimizer", "sel", "--save", str(path), *flags.split())
        histories.append(read(path)["runs"]["sel"]["history"]["train"])
    assert histories[1] == pytest.approx(histories[0], rel=1e-4)
    assert histories[2] == pytest.approx(histories[0], rel=1e-4)
    assert "peak memory of the plain loss" in capsys.readouterr().out


def test_the_rate_warms_up_and_falls_to_a_tenth() -> None:
    args = train_gpt.make_parser().parse_args(["--steps", "100", "--warmup", "10", "--lr", "2"])
    rates = [train_gpt.learning_rate(step, args) for step in range(101)]
    assert rates[0] == pytest.approx(0.2, rel=1e-2)
    assert max(rates) == rates[9] and rates[9] == pytest.approx(2, rel=0.03)
    assert rates[50] == pytest.approx(2 * (0.1 + 0.9 * 0.5))
    assert rates[100] == pytest.approx(0.2)


def test_clipping_bounds_what_the_optimizer_sees(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = []

    def step(self: torch.optim.Adam) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norms.append(torch.nn.utils.get_total_norm([g for g in grads if g is not None]).item())

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    main("--data", text, "--steps", "1", "--optimizer", "adam", "--clip", "0")
    main("--data", text, "--steps", "1", "--optimizer", "adam", "--clip", "0.01")
    assert norms[0] > 0.1
    assert norms[-1] == pytest.approx(0.01, rel=1e-3)


def test_a_folder_of_nanogpt_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = array("H", [0, 7, 40_000] * 200)  # above 2**15: the tokens are unsigned
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes(tokens.tobytes())
    text = train_gpt.load_text(str(tmp_path))
    assert text.vocabulary == 40_001
    inputs, targets = train_gpt.windows(text.train, torch.tensor([0, 1]), 3, "cpu")
    assert inputs.tolist() == [[0, 7, 40_000], [7, 40_000, 0]]
    assert targets.tolist() == [[7, 40_000, 0], [40_000, 0, 7]]
    main("--data", str(tmp_path), "--steps", "6")
    out = capsys.readouterr().out
    for name in ("adam", "sel"):
        first, last = val_losses(out, name)
        assert last < first


def test_the_standard_library_is_split_by_file_and_has_no_tests() -> None:
    files = train_gpt.standard_library()
    text = train_gpt.load_text(None)
    assert len(files) > 200
    assert text.train[:200].numpy().tobytes() == b"".join(files)[:200]
    assert text.val.numpy().tobytes() == b"".join(files[len(files) * 9 // 10 :])
    assert text.sizes() == train_gpt.load_text(None).sizes()


def test_nan_is_said_when_the_loss_is_nan(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    main("--data", text, "--steps", "4", "--optimizer", "adam", "--lr", "1e30")
    assert re.search(r"^adam val_loss \d+\.\d{4} -> nan$", capsys.readouterr().out, re.MULTILINE)


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"^2$"):
        main(*flags)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("train_gpt.py: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps 0", "--steps: must be at least 1"),
        ("--steps x", "--steps: invalid int value: 'x'"),
        ("--lr -1", "--lr: must be at least 1e-12"),
        ("--lr nan", "--lr: must be at least 1e-12 and finite, got nan"),
        ("--beta 0.5", "--beta: must be at least 1"),
        ("--beta wide", "--beta: invalid beta value"),
        ("--optimizer sgd", "--optimizer: invalid choice: 'sgd'"),
        ("--preset 512x12", "--preset: invalid choice: '512x12'"),
        ("--parallel ddp", "--parallel ddp or fsdp goes with torchrun: torchrun --nproc-per-node=2"),
        ("--stepz 3", "unrecognized arguments: --stepz 3"),
        ("--width 30 --heads 4", "--width 30 is no multiple of --heads 4"),
        ("--device nowhere", "--device nowhere: "),
        ("--data {tmp}/missing", "--data .*missing: No such file"),
        ("--data {tmp}/empty", "--data .*empty: the text is empty"),
        ("--data {tmp}/short", r"--data: only 2 tokens to validate on, --context 16 needs one more"),
        ("--data {tmp}", "--data .*: train.bin is missing"),
        ("--data {tmp}/odd", "--data .*: val.bin is missing, empty or no list of uint16"),
        ("--save {tmp}/missing/a.pt", "--save .*a.pt: cannot write a file there"),
        ("--plot {tmp}", "--plot .*: cannot write a file there"),
        ("--logdir {tmp}/short", "--logdir .*short: this is a file"),
        ("--resume {tmp}/missing", "--resume .*missing: No such file"),
        ("--resume {tmp}/short", "--resume .*short: this is no checkpoint, or a damaged one"),
        ("--resume {tmp}/foreign", "--resume .*foreign: this is a checkpoint, but not one of this script"),
    ],
)
def test_bad_flags_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "short").write_bytes(b"twenty bytes of text")
    torch.save({"model": {}}, tmp_path / "foreign")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "train.bin").write_bytes(b"0123")
    (tmp_path / "odd" / "val.bin").write_bytes(b"012")
    assert re.search(message, refusal(capsys, *flags.format(tmp=tmp_path).split()))


def test_what_a_resumed_run_cannot_change(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "adam.pt"
    main("--data", text, "--steps", "4", "--optimizer", "adam", "--save", str(path))
    resume = ["--resume", str(path)]
    assert "--width 32: the checkpoint was trained with 16" in refusal(capsys, *resume, "--width", "32")
    assert "--depth 2: the checkpoint was trained with 1" in refusal(capsys, *resume, "--depth", "2")
    assert "the checkpoint has no sel, only adam" in refusal(capsys, *resume, "--optimizer", "both")
    assert "--steps 3: the checkpoint is already at step 4" in refusal(capsys, *resume, "--steps", "3")
    Path(text).write_bytes(b"another text " * 100)
    assert "but the checkpoint was trained on" in refusal(capsys, *resume)
    path.write_bytes(path.read_bytes()[:1000])
    assert "this is no checkpoint, or a damaged one" in refusal(capsys, *resume)


def test_a_finished_run_goes_on_with_more_steps(tmp_path: Path, text: str) -> None:
    path = str(tmp_path / "run.pt")
    main("--data", text, "--steps", "4", "--save", path)
    main("--resume", path, "--steps", "6")
    saved = read(path)
    assert saved["step"] == 6 and saved["flags"]["steps"] == 6
    assert len(saved["runs"]["sel"]["history"]["train"]) == 6
    curved = [g for g in saved["runs"]["sel"]["optimizer"]["param_groups"] if g["curved"]]
    assert curved and all(group["anneal_steps"] == 6 for group in curved)


@pytest.mark.parametrize(("flag", "module"), [("--plot", "matplotlib"), ("--logdir", "tensorboard")])
def test_a_missing_extra_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
    module: str,
) -> None:
    monkeypatch.setattr(train_gpt.importlib.util, "find_spec", lambda name: None if name == module else object())
    assert f"{flag} needs {module}: pip install" in refusal(capsys, flag, str(tmp_path / "out"))


def test_without_tqdm_there_is_no_bar_and_all_else_works(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_gpt, "tqdm", None)
    main("--data", text, "--steps", "2")
    assert "sel val_loss" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- many processes


def torchrun(*flags: str) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return run("train_gpt.py", *flags, launcher=launcher)


def assert_near(a: Any, b: Any, where: str = "") -> None:
    """Equal to rounding, all the way down, but for the times that a run took."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a.keys() - {"seconds", "optimizer_seconds"}:
            assert_near(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_near(x, y, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda text: f"{where}: {text}")
    else:
        assert a == (pytest.approx(b, rel=1e-5) if isinstance(b, float) else b), where


def test_two_processes_train_as_one_and_go_on_from_each_other(tmp_path: Path, text: str) -> None:
    """ddp, then fsdp from its checkpoint, are one process's training with the same flags; the checkpoints are of one kind."""
    whole, ddp, fsdp = (str(tmp_path / name) for name in ("whole.pt", "ddp.pt", "fsdp.pt"))
    flags = ["--data", text, "--lr", "1e-3", "--accumulate", "2", "--anneal-steps", "8"]
    out = torchrun(*TINY, *flags, "--steps", "4", "--parallel", "ddp", "--save", ddp)
    assert out.count("val_loss") == 2, "the first process alone speaks"
    main(*flags, "--steps", "4", "--save", whole)
    assert_near(read(ddp)["runs"], read(whole)["runs"])
    out = torchrun("--resume", ddp, "--steps", "8", "--parallel", "fsdp", "--save", fsdp)
    main("--resume", whole, "--steps", "8", "--save", whole)
    assert_near(read(fsdp)["runs"], read(whole)["runs"])
    assert val_losses(out, "sel")[1] == pytest.approx(read(whole)["runs"]["sel"]["history"]["val"][-1][1], abs=1e-3)
    assert out.count("optimizer state, MiB") == 1
    main("--resume", fsdp, "--steps", "9")


@pytest.mark.parametrize("name", [f"{width}x{depth}" for width in (1024, 2048, 3072) for depth in (12, 24, 36)])
def test_a_preset_builds_and_is_what_its_estimate_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        train_gpt.main(["--preset", name, "--data", "missing"])
    out, err = capsys.readouterr()
    assert "missing" in err, "the estimate stands before anything is read or built"
    args, _ = train_gpt.parse(["--preset", name, "--init", "preserve"])  # the other one needs weights
    assert f"{args.width}x{args.depth}" == name
    with torch.device("meta"):
        model = train_gpt.GPT(args.vocabulary, args.width, args.depth, args.heads, args.context)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = train_gpt.make_optimizer("sel", model, args)
    curved = sum(p.numel() for _, p in optimizer.named_curved())
    assert f"parameters   {parameters:,}, of which {curved:,} in matrix products" in out
    assert out.count("GiB on each of 1 processes") == 2 and "EFLOP for 150,000 steps" in out
    assert optimizer.defaults["beta"] == "width" and optimizer.param_groups[0]["scale_lr"]["e"] == [50.0, 8.0]


def test_the_estimates_are_what_is_held_and_done() -> None:
    """On a size that can be run: bytes of weights, gradients and state, and products counted by torch."""
    args = train_gpt.make_parser().parse_args([*TINY, "--vocabulary", "50"])
    model = train_gpt.GPT(50, args.width, args.depth, args.heads, args.context)
    inputs = torch.zeros(1, args.context, dtype=torch.long)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        model(inputs, inputs, train_gpt.plain_loss).backward()
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    found = gpt_presets.estimate(args, 1)
    products = sum(flops for op, flops in counts.items() if "attention" not in op)
    attention = 6 * args.depth * args.width * args.context
    assert products == (found.flops_per_token - attention) * args.context
    assert found.flops == found.flops_per_token * args.context * args.batch * args.accumulate * args.steps
    for name in ("adam", "sel"):
        optimizer = train_gpt.make_optimizer(name, model, args)
        optimizer.step()
        state = [t for s in optimizer.state.values() for key, t in s.items() if torch.is_tensor(t) and key != "step"]
        held = sum(
            t.nbytes for t in [*state, *model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
        )
        assert found.bytes_each[name] == held
    args.parallel = "fsdp"
    assert gpt_presets.estimate(args, 8).bytes_each["sel"] == found.bytes_each["sel"] // 8
