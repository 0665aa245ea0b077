"""python -m seloptim: what it prints and writes, and that bad files end in one line, exit code 2 and nothing written."""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from seloptim import SELAdam
from seloptim.__main__ import main
from seloptim.convert import to_adam

from .cases import losses, make_model


def train(**options: Any) -> tuple[nn.Module, SELAdam]:
    model = make_model("mlp", torch.float32)
    optimizer = SELAdam(model.named_parameters(), lr=1e-2, **options)
    batches = losses(model)
    for _ in range(3):
        optimizer.zero_grad()
        next(batches).backward()
        optimizer.step()
    return model, optimizer


def saved_in(folder: Path, value: Any, name: str = "run.pt", **options: Any) -> Path:
    path = folder / name
    torch.save(value, path, **options)
    return path


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line on stderr of a call that must fail; nothing may appear beside the files that were there."""
    folders = {Path(str(a)).parent for a in argv[1:] if Path(str(a)).parent.is_dir()}
    before = {folder: sorted(os.listdir(folder)) for folder in folders}
    assert main([str(a) for a in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("seloptim: ") and captured.err.endswith("\n") and captured.err.count("\n") == 1
    assert {folder: sorted(os.listdir(folder)) for folder in folders} == before
    return captured.err


# ------------------------------------------------------------------------------------------------------------ inspect


def test_inspect_prints_the_numbers_of_stats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, optimizer = train(init="mismatched", beta=lambda name, p: 5.0 + len(name))
    assert main(["inspect", str(saved_in(tmp_path, optimizer.state_dict()))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path / 'run.pt'}: 4 curved, 3 plain Adam"
    assert lines[-2] == "plain Adam: layers.0.bias, layers.2.bias, layers.6.bias"
    stats = optimizer.stats()
    for name, p in optimizer.named_curved():
        scales, weights = (line.split() for line in lines if line.startswith(f"  {name} "))
        assert scales[1:4] == ["x".join(map(str, p.shape)), "3", f"{optimizer.beta(p):g}"]
        shown = re.findall(r"[-\d.e]+", " ".join(scales[4:]))
        wanted = [stats[f"{name}/scale_{kind}_{what}"] for kind in "elm" for what in ("mean", "min", "max")]
        assert [float(number) for number in shown] == pytest.approx(wanted, rel=1e-3)
        shown = re.findall(r"[-\d.e]+", " ".join(weights[1:]))
        wanted = [f(tensor).item() for tensor in (optimizer.raw(p), p) for f in (torch.min, torch.max)]
        wanted += [stats[f"{name}/{what}"] for what in ("size_beta_rms", "slope_negative", "slope_positive")]
        wanted += [stats[f"{name}/tail_{what}"] for what in ("beyond_4_sigma", "kurtosis", "max_over_initial_rms")]
        assert [float(number) for number in shown] == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("zip_format", [True, False])
def test_inspect_finds_states_inside_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], zip_format: bool
) -> None:
    model, optimizer = train()
    checkpoint = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict(), {"other": {"opt": optimizer.state_dict()}}],
        "adam": torch.optim.Adam(model.parameters()).state_dict(),
        "step": 3,
    }
    path = saved_in(tmp_path, checkpoint, _use_new_zipfile_serialization=zip_format)
    assert main(["inspect", str(path)]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if "curved," in line]
    assert heads == [
        f"{path}{at}: 4 curved, 3 plain Adam" for at in ("['optimizers'][0]", "['optimizers'][1]['other']['opt']")
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"curved": "all", "structure": "col"},
        {"structure": "scalar", "combine": "congruent"},
        {"structure": "row", "amsgrad": True, "residual_rank": 2},
        {"scale_lr": {"n": 1.0}, "lr_space": "weight", "weight_decay": 0.1},
    ],
)
def test_inspect_reads_every_kind_of_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    _, optimizer = train(**options)
    assert main(["inspect", str(saved_in(tmp_path, optimizer.state_dict()))]) == 0
    text = capsys.readouterr().out
    assert all(text.count(f"  {name} ") == 2 for name, _ in optimizer.named_curved())
    assert (" n\n" in text) == ("scale_lr" in options)


def test_inspect_reads_a_state_by_name_and_one_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer = train()
    optimizer.zero_grad()
    assert main(["inspect", str(saved_in(tmp_path, get_optimizer_state_dict(model, optimizer)))]) == 0
    assert "  layers.0.weight " in capsys.readouterr().out
    fresh = SELAdam(make_model("mlp").parameters())
    assert main(["inspect", str(saved_in(tmp_path, fresh.state_dict()))]) == 0
    assert "  0.0 " in capsys.readouterr().out


def test_inspect_shows_names_without_their_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, optimizer = train()
    saved = optimizer.state_dict()
    saved["param_groups"][0]["param_names"][0] = "a\x1b[31m\nb"
    assert main(["inspect", str(saved_in(tmp_path, {"\x1b[2J": saved}))]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and "  a [31m b " in text


# ----------------------------------------------------------------------------------------------------- files that are bad


class Evil:
    """Its pickle writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_code_in_a_file_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    mark = tmp_path / "mark"
    _, optimizer = train()
    value = {"optimizer": optimizer.state_dict(), "evil": Evil(mark)}
    (folder / "plain.pt").write_bytes(pickle.dumps(value))
    for path in (
        saved_in(folder, value, "zip.pt"),
        saved_in(folder, value, "old.pt", _use_new_zipfile_serialization=False),
        folder / "plain.pt",
    ):
        assert str(path) in refused(capsys, command, path)
        assert not mark.exists()
    torch.load(folder / "zip.pt", weights_only=False)
    assert mark.exists(), "the files would have run it"


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_files_that_are_no_checkpoint_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    model, optimizer = train()
    whole = saved_in(tmp_path, optimizer.state_dict()).read_bytes()
    for k, length in enumerate((0, 1, 100, len(whole) // 2, len(whole) - 1)):
        (tmp_path / f"short{k}.pt").write_bytes(whole[:length])
        assert f"short{k}.pt" in refused(capsys, command, tmp_path / f"short{k}.pt")
    (tmp_path / "text.pt").write_text("no checkpoint\n" * 100)
    assert "text.pt" in refused(capsys, command, tmp_path / "text.pt")
    assert "No such file or directory" in refused(capsys, command, tmp_path / "missing.pt")
    assert "Is a directory" in refused(capsys, command, tmp_path)
    adam = torch.optim.Adam(model.parameters()).state_dict()
    for value, reason in (
        (model.state_dict(), "there is no state of SELAdam in it\n"),
        (torch.ones(3), "there is no state of SELAdam in it\n"),
        (adam, "only that of another optimizer\n"),
        ({"a": [adam]}, "only that of another optimizer at ['a'][0]\n"),
        ({"state": 1, "param_groups": 2}, "there is no state of SELAdam in it\n"),
        ({"state": {}, "param_groups": [{"params": [0]}]}, "only that of another optimizer\n"),
    ):
        assert reason in refused(capsys, command, saved_in(tmp_path, value))
    itself: dict[str, Any] = {}
    itself["again"] = [itself]
    assert "no state of SELAdam" in refused(capsys, command, saved_in(tmp_path, itself))


def _hollow(state: dict[str, Any]) -> None:
    """Tensors of up to 4 TB, with one number behind them."""
    for key in ("raw", "exp_avg", "exp_avg_sq"):
        state[key] = torch.zeros(1).expand(1 << 20, 1 << 20)
    for key in [key for key in state if key.startswith("scale_row")]:
        state[key] = torch.zeros(1).expand(1 << 20, 4)
    for key in [key for key in state if key.startswith("scale_col")]:
        state[key] = torch.zeros(1).expand(1 << 20, 4)


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no beta": lambda state: state.pop("beta"),
    "text for beta": lambda state: state.update(beta="auto"),
    "negative beta": lambda state: state.update(beta=-1.0),
    "no moments": lambda state: state.pop("exp_avg"),
    "no scales": lambda state: [state.pop("scale_row"), state.pop("scale_col")],
    "other rows": lambda state: state.update(scale_row=state["scale_row"][:-1].clone()),
    "raw is text": lambda state: state.update(raw="raw"),
    "raw is of integers": lambda state: state.update(raw=state["raw"].long()),
    "raw is sparse": lambda state: state.update(raw=state["raw"].to_sparse()),
    "no step": lambda state: state.pop("step"),
    "hollow": _hollow,
}


@pytest.mark.parametrize("command", ["inspect", "convert"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str, command: str
) -> None:
    _, optimizer = train()
    saved = copy.deepcopy(optimizer.state_dict())
    position = saved["param_groups"][0]["param_names"].index("layers.2.weight")
    DAMAGE[damage](saved["state"][position])
    line = refused(capsys, command, saved_in(tmp_path, {"optimizer": saved}))
    assert "['optimizer']" in line and "damaged" in line
    if command == "inspect":
        assert (f"parameter {position}" if damage == "hollow" else "parameter layers.2.weight") in line


# -------------------------------------------------------------------------------------------------------------- curve


def test_curve_draws_into_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    image = pytest.importorskip("matplotlib.image")
    monkeypatch.chdir(tmp_path)
    assert main(["curve"]) == 0
    assert capsys.readouterr().out == "wrote sel_curve.png\n"
    assert os.listdir(tmp_path) == ["sel_curve.png"]
    pixels = image.imread("sel_curve.png")
    assert pixels.shape == (780, 2250, 4)
    assert main(["curve", "--beta", "12.5", "--combine", "congruent", "--out", "other.png"]) == 0
    assert image.imread("other.png").shape == pixels.shape
    assert (image.imread("other.png") != pixels).any()


def test_curve_draws_map_slope_and_relative_step() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    from seloptim.__main__ import _draw
    from seloptim.functional import sel_forward

    _draw(figure, [12.5], "mismatched")
    by_map, by_slope, by_step = figure.axes
    raw, weight = (torch.as_tensor(values) for values in by_map.lines[1].get_data())
    torch.testing.assert_close(sel_forward(raw, beta=12.5), weight)
    at, slope = by_slope.lines[2].get_data()
    numeric = torch.gradient(weight[-300:], spacing=(raw[-300:],))[0]
    torch.testing.assert_close(torch.as_tensor(slope[-299:-1]), numeric[1:-1], rtol=2e-3, atol=0.0)
    size, relative = by_step.lines[1].get_data()
    torch.testing.assert_close(torch.as_tensor(relative), torch.as_tensor(1e-3 * slope / at))
    assert (size > 0).all() and len(by_step.lines) >= 3


def test_curve_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "c.png"
    assert "the least beta that would do is 1" in refused(capsys, "curve", "--beta", "0.5", "--out", out)
    out.write_text("as before")
    assert "'xyz' is not supported" in refused(capsys, "curve", "--out", tmp_path / "c.xyz")
    assert f"{tmp_path / 'no' / 'c.png'}: No such file" in refused(capsys, "curve", "--out", tmp_path / "no" / "c.png")
    for beta in ("-1", "nan", "inf", "x"):
        with pytest.raises(SystemExit) as stopped:
            main(["curve", "--beta", beta, "--out", str(out)])
        assert stopped.value.code == 2
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "seloptim[examples]" in refused(capsys, "curve", "--out", out)
    assert out.read_text() == "as before"


# ------------------------------------------------------------------------------------------------------------ convert


@pytest.mark.parametrize("inside", [False, True])
def test_convert_writes_what_adam_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str], inside: bool) -> None:
    model, optimizer = train(weight_decay=0.1)
    saved = optimizer.state_dict()
    path = saved_in(tmp_path, {"model": model.state_dict(), "opt": saved} if inside else saved, "run.7.pt")
    assert main(["convert", str(path)]) == 0
    assert sorted(os.listdir(tmp_path)) == ["run.7.adam.pt", "run.7.pt"]
    assert str(tmp_path / "run.7.adam.pt") in capsys.readouterr().out
    converted = torch.load(tmp_path / "run.7.adam.pt", weights_only=True)
    adam = torch.optim.Adam(model.named_parameters())
    adam.load_state_dict(converted)
    assert adam.param_groups[0]["weight_decay"] == 0.1
    wanted = to_adam(optimizer)
    for position, state in wanted["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(converted["state"][position][key], value, rtol=0, atol=0)
    adam.step()


def test_convert_writes_where_it_is_told_and_never_over_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, optimizer = train()
    path, out = saved_in(tmp_path, optimizer.state_dict()), tmp_path / "out.pt"
    assert main(["convert", str(path), "--out", str(out)]) == 0
    capsys.readouterr()
    assert "state" in torch.load(out, weights_only=True)
    bits = path.read_bytes()
    assert "the checkpoint itself" in refused(capsys, "convert", path, "--out", path)
    assert "no" in refused(capsys, "convert", path, "--out", tmp_path / "no" / "out.pt")
    two = saved_in(tmp_path, [optimizer.state_dict(), {"b": optimizer.state_dict()}], "two.pt")
    assert "at [0] and [1]['b']" in refused(capsys, "convert", two)

    def fails_halfway(value: object, file: Path) -> None:
        Path(file).write_bytes(b"half")
        raise OSError(28, "No space left on device", str(file))

    before = out.read_bytes()
    monkeypatch.setattr(torch, "save", fails_halfway)
    assert f"{out}: No space left on device" in refused(capsys, "convert", path, "--out", out)
    assert out.read_bytes() == before and path.read_bytes() == bits


# ---------------------------------------------------------------------------------------------------- the whole program


def test_it_runs_as_a_module(tmp_path: Path) -> None:
    _, optimizer = train()
    path = saved_in(tmp_path, optimizer.state_dict())

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", "-m", "seloptim", *argv]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run("inspect", str(path))
    assert (done.returncode, done.stderr) == (0, "") and "4 curved" in done.stdout
    done = run("inspect", str(tmp_path / "no.pt"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"seloptim: {tmp_path / 'no.pt'}: No such file or directory\n"
    done = run()
    assert done.returncode == 2 and "inspect" in run("--help").stdout


def test_a_reader_that_stops_early_is_no_error(tmp_path: Path) -> None:
    _, optimizer = train()
    path = saved_in(tmp_path, optimizer.state_dict())
    command = [sys.executable, "-m", "seloptim", "inspect", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0
