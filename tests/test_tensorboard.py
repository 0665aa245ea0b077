"""log_scales: what a real SummaryWriter wrote, read back as TensorBoard reads it."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from seloptim import SELAdam
from seloptim.tensorboard import log_scales

from .cases import losses, make_model

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    return events


def train(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, SELAdam]:
    model = make_model("mlp", dtype)
    optimizer = SELAdam(model.named_parameters(), lr=1e-2)
    next(losses(model)).backward()
    optimizer.step()
    return model, optimizer


def test_each_number_is_a_chart_in_the_section_of_its_parameter(tmp_path: Path) -> None:
    _, optimizer = train()
    with SummaryWriter(str(tmp_path)) as writer:
        for step in (10, 20):
            stats = optimizer.stats()
            log_scales(writer, optimizer, step)
            optimizer.step()
    events = read(tmp_path)
    assert set(events.Tags()["scalars"]) == stats.keys()
    assert events.Tags()["histograms"] == []
    assert {tag.split("/")[0] for tag in stats} == {name for name, _ in optimizer.named_curved()}
    for tag, value in stats.items():
        first, second = events.Scalars(tag)
        assert (first.step, second.step) == (10, 20)
        assert second.value == pytest.approx(value, rel=1e-6)
    moved = "layers.0.weight/scale_e_mean"
    assert events.Scalars(moved)[0].value != events.Scalars(moved)[1].value


def test_a_row_of_three_charts_holds_what_belongs_together(tmp_path: Path) -> None:
    """TensorBoard sorts charts by name and shows twelve a page: e, l, m, then size and slopes; then steps and tail."""
    _, optimizer = train()
    with SummaryWriter(str(tmp_path)) as writer:
        log_scales(writer, optimizer, 0, histograms=True)
    tags = [tag for kind in ("scalars", "histograms") for tag in read(tmp_path).Tags()[kind]]
    names = sorted(tag.split("/")[1] for tag in tags if tag.startswith("layers.0.weight/"))
    rows = [names[i : i + 3] for i in range(0, len(names), 3)]
    assert [{name.rsplit("_", 1)[0] for name in row} for row in rows[:3]] == [{"scale_e"}, {"scale_l"}, {"scale_m"}]
    assert rows[3] == ["size_beta_rms", "slope_negative", "slope_positive"]
    assert [{name.split("_")[0] for name in row} for row in rows[4:]] == [{"step"}, {"tail"}, {"weight"}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_histograms_of_weights_and_raw_weights_on_demand(tmp_path: Path, dtype: torch.dtype) -> None:
    _, optimizer = train(dtype)
    with SummaryWriter(str(tmp_path)) as writer:
        log_scales(writer, optimizer, 3, histograms=True)
    events = read(tmp_path)
    curved = dict(optimizer.named_curved())
    assert set(events.Tags()["histograms"]) == {
        f"{name}/{kind}" for name in curved for kind in ("weight", "weight_raw")
    }
    for name, p in curved.items():
        for kind, values in (("weight", p.detach()), ("weight_raw", optimizer.raw(p))):
            (event,) = events.Histograms(f"{name}/{kind}")
            assert event.step == 3
            histogram = event.histogram_value
            assert histogram.num == p.numel()
            assert histogram.min == pytest.approx(values.min().item(), rel=1e-6)
            assert histogram.max == pytest.approx(values.max().item(), rel=1e-6)


def test_histograms_leave_out_what_is_not_finite_and_what_is_frozen(tmp_path: Path) -> None:
    model, optimizer = train()
    weights = dict(model.named_parameters())
    for name, spoilt in (("layers.0.weight", 2), ("layers.2.weight", 36)):
        weights[name].grad = torch.zeros(6, 6)
        weights[name].grad.view(-1)[:spoilt] = torch.nan  # type: ignore[union-attr]
    optimizer.step()
    weights["layers.4.weight"].requires_grad_(False)
    with SummaryWriter(str(tmp_path)) as writer:
        log_scales(writer, optimizer, 0, histograms=True)
    events = read(tmp_path)
    assert events.Histograms("layers.0.weight/weight")[0].histogram_value.num == 34
    assert "layers.2.weight/weight" not in events.Tags()["histograms"]
    assert not [tag for tag in events.Tags()["histograms"] if tag.startswith("layers.4")]


def test_no_writer_is_refused() -> None:
    _, optimizer = train()
    with pytest.raises(TypeError, match=r"SummaryWriter of torch.utils.tensorboard, got str: 'runs'"):
        log_scales("runs", optimizer, 0)  # type: ignore[arg-type]


def test_without_tensorboard_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = train()
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if "tensorboard" in name:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"seloptim\[tensorboard\]"):
        log_scales(None, optimizer, 0)  # type: ignore[arg-type]
