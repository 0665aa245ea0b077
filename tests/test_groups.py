"""param_groups: the paper's choice by module type, named, and never an empty group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seloptim import SELAdam, SELAdamW, param_groups


class Model(nn.Module):
    """One of each kind; the head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.positions = nn.Parameter(torch.randn(5, 4) * 0.02)
        self.conv = nn.Conv1d(4, 4, 3)
        self.up = nn.ConvTranspose2d(4, 4, 3)
        self.norms = nn.ModuleList([nn.LayerNorm(4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4)])
        self.attention = nn.MultiheadAttention(4, 2)
        self.linear = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight
        self.alpha = nn.Parameter(torch.tensor(0.5))


CURVED = {
    "conv.weight", "conv.bias", "up.weight", "up.bias", "linear.weight", "linear.bias", "head.bias",
    "attention.out_proj.weight", "attention.out_proj.bias",
}  # fmt: skip


def names(groups: list[dict[str, Any]], curved: bool) -> set[str]:
    return {name for group in groups if group["curved"] is curved for name, _ in group["params"]}


def test_every_parameter_once_and_curved_by_the_type_of_its_module() -> None:
    model = Model()
    groups = param_groups(model)
    everything = {name for name, _ in model.named_parameters()}
    assert names(groups, True) == CURVED
    assert names(groups, False) == everything - CURVED
    assert sum(len(group["params"]) for group in groups) == len(everything)


@pytest.mark.parametrize("embedding_first", [False, True])
def test_a_weight_shared_with_an_embedding_counts_as_the_embedding(embedding_first: bool) -> None:
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    pair = [embedding, head]
    groups = param_groups(nn.Sequential(*(pair if embedding_first else pair[::-1])))
    assert [(group["curved"], len(group["params"])) for group in groups] == [(False, 1)]


def test_a_weight_shared_by_two_linears_stays_curved_and_comes_once() -> None:
    a, b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    b.weight = a.weight
    assert [(g["curved"], [n for n, _ in g["params"]]) for g in param_groups(nn.Sequential(a, b))] == [
        (True, ["0.weight"])
    ]


def test_subclasses_count_as_their_kind() -> None:
    class Special(nn.Linear): ...

    class Table(nn.Embedding): ...

    model = nn.Sequential(Special(2, 2), nn.LazyConv1d(2, 1), Table(2, 2))
    model[1](torch.zeros(1, 2, 3))
    assert names(param_groups(model), False) == {"2.weight"}


def test_a_parametrized_layer_is_not_curved() -> None:
    # The original weight belongs to the parametrization, which may be any function.
    model = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert names(param_groups(model), True) == {"bias"}


def test_says_so_where_it_finds_nothing_to_curve() -> None:
    """A module that multiplies by a matrix and is no nn.Linear: silence would leave the whole model to Adam."""

    class Conv1D(nn.Module):  # as GPT-2's in transformers
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 3))

    with pytest.warns(
        UserWarning, match=r"nothing to curve in Sequential, whose matrices belong to Conv1D; .*curved=lambda"
    ):
        groups = param_groups(nn.Sequential(nn.Embedding(4, 2), Conv1D(), nn.LayerNorm(3)))
    assert not any(group["curved"] for group in groups)
    assert [group["curved"] for group in param_groups(nn.Sequential(Conv1D(), nn.Linear(2, 2, bias=False)))] == [
        True,
        False,
    ]


@pytest.mark.parametrize("model", [nn.Linear(2, 2, bias=False), nn.LayerNorm(3), nn.Embedding(2, 2), Model()])
def test_no_group_is_empty(model: nn.Module) -> None:
    groups = param_groups(model)
    assert groups and all(group["params"] for group in groups)


def test_a_model_without_parameters_has_no_groups() -> None:
    assert param_groups(nn.Sequential(nn.ReLU())) == []


def test_frozen_parameters_come_along_so_that_unfreezing_needs_no_new_group() -> None:
    first, second = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2).requires_grad_(False)
    model = nn.Sequential(first, second)
    optimizer = SELAdam(param_groups(model))
    assert not optimizer.state_dict()["state"]
    second.requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    frozen, free = first.weight.detach().clone(), second.weight.detach().clone()
    optimizer.step()
    assert torch.equal(first.weight, frozen) and not torch.equal(second.weight, free)


@pytest.mark.parametrize("weight_decay", [None, 0.0, 0.3])
def test_decay_is_for_matrices(weight_decay: float | None) -> None:
    optimizer = SELAdamW(param_groups(Model(), weight_decay), weight_decay=0.1)
    for group in optimizer.param_groups:
        for p in group["params"]:
            wanted = 0.0 if p.dim() < 2 else 0.1 if weight_decay is None else weight_decay
            assert group["weight_decay"] == wanted


def test_options_reach_every_group_and_the_optimizer() -> None:
    optimizer = SELAdam(param_groups(Model(), lr=3e-4, beta=9.0, structure="row", betas=(0.8, 0.9)), lr=1.0)
    for group in optimizer.param_groups:
        assert (group["lr"], group["beta"], group["structure"], group["betas"]) == (3e-4, 9.0, "row", (0.8, 0.9))


def test_the_choice_is_the_optimizers() -> None:
    model = Model()
    optimizer = SELAdam(param_groups(model))
    curved: dict[str, Tensor] = dict(optimizer.named_curved())
    assert set(curved) == CURVED
    assert all(curved[name] is p for name, p in model.named_parameters() if name in CURVED)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: param_groups(Model().parameters()), "param_groups takes an nn.Module, got generator; pass other"),  # type: ignore[arg-type]
        (lambda: param_groups(Model(), curved="all"), r"decides \['curved'\] itself; build the groups by hand"),
        (lambda: param_groups(Model(), params=[]), r"decides \['params'\] itself"),
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_options_of_the_optimizer_are_checked_there() -> None:
    with pytest.raises(ValueError, match=r"no option beta_=2\.0; did you mean 'beta'"):
        SELAdam(param_groups(Model(), beta_=2.0))
