"""Faults: gradients that are not finite, steps that do not come to their end, files that are not what they say."""

from __future__ import annotations

import copy
import io
import math
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seloptim import Curved, SELAdam, _execute
from seloptim.convert import read_checkpoint, to_adam_state
from tests.cases import make_model, mixed
from tests.test_checkpoints import same, through_file, train
from tests.test_edits import agrees, matrices

# -------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("check", ["tracked", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_gradient_spoils_its_own_weight_alone(bad: float, dtype: torch.dtype, check: str) -> None:
    """Faults. Guard: _rule.pull leaves out of the factors what is not finite; differing() calls what it left no edit."""

    def run(value: float) -> tuple[nn.Parameter, SELAdam]:
        p = nn.Parameter(mixed(4, 5, size=0.1, dtype=dtype))
        optimizer = SELAdam([p], check_edits=check, lr=1e-2)
        for k in range(4):
            p.grad = mixed(4, 5, seed=k, dtype=dtype)
            p.grad[1, 2] = value if k == 1 else 0.0
            optimizer.step()
        return p, optimizer

    p, optimizer = run(bad)
    _, its = run(0.0)
    hit = torch.zeros(4, 5, dtype=torch.bool)
    hit[1, 2] = True
    assert torch.equal(p.isfinite(), ~hit)
    state, other = optimizer.state_dict()["state"][0], its.state_dict()["state"][0]
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == hit.shape:
            assert torch.equal(value[~hit], other[key][~hit]), key
        elif isinstance(value, Tensor) and key != "step":
            assert bool(value.isfinite().all()), key
    # An edit elsewhere is taken, and so is the repair of the weight itself; the run can be saved and resumed.
    with torch.no_grad():
        p[0].clamp_(-0.05, 0.05)
    optimizer.resync()
    assert torch.equal(p.isfinite(), ~hit)
    optimizer.load_state_dict(through_file(optimizer.state_dict()))
    with torch.no_grad():
        p.nan_to_num_(0.0)
    optimizer.resync()
    agrees(optimizer, p)


# --------------------------------------------------------------------------------------------------- interrupted steps


@pytest.mark.parametrize("check", ["tracked", "full"])
@pytest.mark.parametrize("at", ["between parameters", "within a parameter"])
@pytest.mark.parametrize("first", [False, True], ids=["later", "first step"])
def test_after_an_interrupted_step_training_goes_on(
    at: str, first: bool, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults. Guard: _step_curved calls parameters unseen until the step is through, so that values decide afterwards."""
    model = make_model("mlp", torch.float32)
    optimizer = SELAdam(model.named_parameters(), lr=1e-2, check_edits=check)
    if not first:
        train(model, optimizer, range(3))
    saved = through_file(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    run = _execute.run

    def interrupted(items: Sequence[_execute.Item], *args: Any, **kwargs: Any) -> None:
        run(items[:2], *args, **kwargs)
        if at == "within a parameter":
            items[2].state.raw.value.mul_(1.01)  # raw and moments have moved, p has not
            items[2].state.raw.exp_avg.mul_(1.1)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_execute, "run", interrupted)
        train(model, optimizer, range(3, 4))
    after = [p.detach().clone() for p in matrices(model)]
    assert [torch.equal(p, w) for p, w in zip(after, (w for w in weights.values() if w.dim() > 1), strict=True)] == [
        False,
        False,
        True,
        True,
    ]
    for p, w in zip(matrices(model), after, strict=True):
        agrees(optimizer, p) if not first else optimizer.raw(p)
        assert torch.equal(p, w)
    train(model, optimizer, range(4, 6))
    for p, w in zip(matrices(model), after, strict=True):
        agrees(optimizer, p)
        assert 0 < (p - w).abs().max() < 0.2
    with pytest.warns(UserWarning, match="authoritative"):
        optimizer.load_state_dict(saved)
    if not first:
        same(
            {k: v for k, v in model.state_dict().items() if v.dim() > 1},
            {k: v for k, v in weights.items() if v.dim() > 1},
        )


def test_an_error_before_the_first_write_leaves_everything() -> None:
    """Guard: step() settles every parameter before it writes the first."""
    model = make_model("mlp", torch.float32)
    optimizer = SELAdam(model.named_parameters())
    train(model, optimizer, range(2))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    last = matrices(model)[-1]
    last.grad = mixed(*last.shape, dtype=torch.float32).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    same(model.state_dict(), before[0])
    same(optimizer.state_dict(), before[1])


@pytest.mark.parametrize("fault", ["nan", "no inverse", "edited"])
def test_a_parameter_that_cannot_have_a_state_does_not_keep_the_others_from_being_saved(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No step asks for the unused one. Guard: SELOptimizer.state_dict saves what there is."""
    p = nn.Parameter(mixed(4, 4, size=0.1, dtype=torch.float32).abs())
    q = nn.Parameter(torch.full((4, 4), math.nan if fault == "nan" else -0.1))
    optimizer = SELAdam([("p", p), ("unused", q)], beta=0.5 if fault == "no inverse" else 3.0)
    p.grad = torch.ones_like(p)
    if fault == "edited":
        q.grad = torch.ones_like(q)
    optimizer.step()
    q.grad = None
    raw = optimizer.state[q]["raw"].clone() if fault == "edited" else None
    if fault == "edited":
        q.data = torch.full((4, 4), math.nan)
    saved = through_file(optimizer.state_dict())
    assert [record.message[:18] for record in caplog.records] == [
        "parameter unused: " if fault != "edited" else "parameter unused w"
    ]
    assert torch.equal(saved["state"][0]["raw"], optimizer.raw(p)) and float(saved["state"][0]["step"]) == 1
    assert 1 not in saved["state"] if raw is None else torch.equal(saved["state"][1]["raw"], raw)
    optimizer.step()
    q.grad = torch.ones_like(q)
    with pytest.raises(ValueError, match="parameter unused"):
        optimizer.step()


def test_a_complex_parameter_under_fused_is_refused_before_anything_moves() -> None:
    """In torch's words. Guard: SELAdam._refuse_step; torch's kernel fails behind the curved parameters' step."""
    p, spectrum = (nn.Parameter(torch.full((2, 2), 0.1, dtype=dtype)) for dtype in (torch.float32, torch.complex64))
    optimizer = SELAdam([p, spectrum], fused=True)
    for each in (p, spectrum):
        each.grad = torch.ones_like(each)
    with pytest.raises(RuntimeError, match="requires all the params to be floating point Tensors"):
        optimizer.step()
    assert bool((p == 0.1).all()) and not optimizer.state


@pytest.mark.parametrize("make", [SELAdam, lambda params: Curved(torch.optim.NAdam, params)], ids=["SELAdam", "Curved"])
@pytest.mark.parametrize("look", ["describe", "raw", "stats", "state_dict", "load_state_dict"])
def test_what_is_made_in_inference_mode_can_be_trained_on(look: str, make: Any) -> None:
    """A trainer saves, and a logger looks, while the model is evaluated. Guard: _shadow.unrecorded."""
    models = [make_model("mlp", torch.float32) for _ in range(2)]
    ours, theirs = (make(model.parameters()) for model in models)
    argument = {"raw": [matrices(models[0])[0]], "load_state_dict": [copy.deepcopy(theirs.state_dict())]}.get(look, [])
    for _ in range(2):  # where there is no state, and where the model was moved away from it
        with torch.inference_mode():
            getattr(ours, look)(*argument)
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            train(model, optimizer, range(2))
            if make is SELAdam:
                model.to(torch.float64)
        argument = [copy.deepcopy(theirs.state_dict())] if look == "load_state_dict" else argument
    same(models[0].state_dict(), models[1].state_dict())


# ---------------------------------------------------------------------------------------------------------- bad files


RAN: list[str] = []


def code(text: str) -> dict[str, Any]:
    RAN.append(text)
    return {}


class Hostile:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return code, ("ran",)


def files() -> dict[str, bytes]:
    def saved(value: Any) -> bytes:
        file = io.BytesIO()
        torch.save(value, file)
        return file.getvalue()

    model = make_model("mlp", torch.float32)
    good = saved(SELAdam(model.parameters()).state_dict())
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as out:
        out.writestr("data.pkl", pickle.dumps(Hostile()))
    flipped = bytearray(good)
    flipped[len(good) // 3] ^= 0xFF
    return {
        "empty": b"",
        "text": b"not a checkpoint\n" * 9,
        "half": good[: len(good) // 2],
        "without its end": good[:-30],
        "a pickle": pickle.dumps({"state": {}, "param_groups": []}),
        "a hostile pickle": pickle.dumps(Hostile()),
        "a hostile checkpoint": saved({"state": Hostile(), "param_groups": []}),
        "a hostile archive": archive.getvalue(),
        "a whole model": saved(model),
        "zeros": bytes(4096),
    }


@pytest.mark.parametrize("name", files())
def test_a_bad_file_is_refused_and_nothing_in_it_runs(name: str, tmp_path: Path) -> None:
    """Faults. Guard: convert.read_checkpoint reads with weights_only=True, and names the file."""
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(files()[name])
    RAN.clear()
    with pytest.raises(ValueError, match=r"checkpoint\.pt is no checkpoint|not an optimizer state|not a SELAdam state"):
        to_adam_state(read_checkpoint(path))
    assert not RAN


def test_a_file_that_is_missing_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_checkpoint(tmp_path / "none.pt")


def test_a_good_file_is_read(tmp_path: Path) -> None:
    model = make_model("mlp", torch.float32)
    optimizer = SELAdam(model.named_parameters(), scale_init={"e": 1.1})
    train(model, optimizer, range(2))
    torch.save(optimizer.state_dict(), tmp_path / "good.pt")
    same(read_checkpoint(tmp_path / "good.pt"), optimizer.state_dict())
