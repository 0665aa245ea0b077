"""Small models, data and option sets that the tests of every execution path share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

STRUCTURES = ("row_col", "row", "col", "scalar", "none")


def mixed(*shape: int, seed: int = 0, size: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers of both signs, every seventh one exactly zero."""
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * size
    values.view(-1)[::7] = 0.0
    return values.to(dtype)


class MLP(nn.Module):
    """Two hidden layers of equal shape, so that a batched path has something to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 6),
            nn.Tanh(),
            nn.Linear(6, 6),
            nn.Tanh(),
            nn.Linear(6, 6, bias=False),
            nn.Tanh(),
            nn.Linear(6, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ZeroHead(nn.Module):
    """The last layer starts at zero, bias and all."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP()
        self.head = nn.Linear(4, 3)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class ConvNet(nn.Module):
    """Two convolutions of equal shape, one of another, a normalisation layer, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.second = nn.Conv2d(3, 3, 3, padding=1)
        self.third = nn.Conv2d(3, 4, (1, 2))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        images = x.view(len(x), 3, 1, 2).expand(len(x), 3, 2, 2)
        hidden = torch.tanh(self.second(torch.tanh(self.first(images))))
        return self.head(self.norm(torch.tanh(self.third(hidden)).mean((2, 3))))


class Experts(nn.Module):
    """Stacked matrices (experts, out, in), two of equal shape."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 5, 6) * 0.2)
        self.other = nn.Parameter(torch.randn(3, 5, 6) * 0.05)
        self.down = nn.Parameter(torch.randn(3, 2, 5) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(torch.einsum("eoi,bi->ebo", self.up, x)) + torch.einsum("eoi,bi->ebo", self.other, x)
        return torch.einsum("eoi,ebi->bo", self.down, hidden)


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": MLP, "zero": ZeroHead, "conv": ConvNet, "experts": Experts}


def make_model(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same weights at every call, of mixed sign and with exact zeros; a layer at zero stays at zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name]()
    with torch.no_grad():
        for p in model.parameters():
            p.view(-1)[::7] = 0.0
    return model.to(dtype)


def losses(model: nn.Module) -> Iterator[Tensor]:
    """The model's loss on one batch after another: inputs of mixed sign with exact zeros."""
    seed = 1
    while True:
        p = next(model.parameters())
        x = mixed(8, 6, seed=seed, dtype=p.dtype).to(p.device)
        output = model(x)
        target = mixed(*output.shape, seed=seed + 1, dtype=p.dtype).to(p.device)
        yield (output - target).square().mean()
        seed += 2


class Case(NamedTuple):
    """A model and what SELAdam, and the oracle, are constructed with."""

    name: str
    model: str
    options: dict[str, Any]


def _cases() -> Iterator[Case]:
    for combine, init, structure in product(("mismatched", "congruent"), ("preserve", "mismatched"), STRUCTURES):
        options = {"combine": combine, "init": init, "structure": structure}
        yield Case("-".join(options.values()), "mlp", options)
    for combine in ("mismatched", "congruent"):
        for name, model, options in (
            ("coupled_decay", "mlp", {"weight_decay": 0.1}),
            ("decoupled_decay", "mlp", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
            ("amsgrad", "mlp", {"amsgrad": True, "betas": (0.5, 0.6)}),
            ("maximize", "mlp", {"maximize": True, "weight_decay": 0.1}),
            (
                "learned_n",
                "mlp",
                {"scale_lr": {"e": 2.0, "l": (4.0, 2.0), "m": 0.5, "n": (1.0, 3.0)}, "anneal_steps": 20},
            ),
            ("only_n", "mlp", {"scale_lr": {"n": 1.0}, "scale_init": {"n": 0.2}}),
            ("scale_init", "mlp", {"scale_init": {"e": 1.5, "l": 0.5, "m": 0.8, "n": -0.1}}),
            ("scale_init_beta", "mlp", {"beta": 3.0, "scale_init": {"e": 4.0, "l": "beta"}}),
            ("scale_init_shrunk", "mlp", {"init": "mismatched", "scale_init": {"e": 1.2, "l": 0.5, "m": 0.9}}),
            ("frozen_kinds", "mlp", {"scale_lr": {"l": 1.0}}),
            ("annealed", "mlp", {"anneal_steps": 10}),
            ("beta_width", "mlp", {"beta": "width"}),
            ("eps", "mlp", {"eps": 1e-3, "beta": 5.0}),
            ("lr_space", "mlp", {"lr_space": "weight", "weight_decay": 0.1, "decoupled_weight_decay": True}),
            ("residual", "mlp", {"residual_rank": 2}),
            ("residual_decay", "mlp", {"residual_rank": 1, "weight_decay": 0.1, "maximize": True}),
            ("all", "mlp", {"curved": "all", "weight_decay": 0.1}),
            ("zero", "zero", {"curved": "all"}),
            ("zero_shrunk", "zero", {"init": "mismatched", "structure": "row"}),
            ("conv", "conv", {"scale_lr": {"e": 1.0, "l": 1.0, "m": 0.5, "n": 0.5}}),
            ("conv_all", "conv", {"curved": "all", "structure": "col"}),
            ("stacked", "experts", {}),
            *((f"batch_dims_{s}", "experts", {"batch_dims": 1, "structure": s}) for s in STRUCTURES),
            ("batch_dims_width", "experts", {"batch_dims": 1, "beta": "width", "lr_space": "weight"}),
        ):
            yield Case(f"{name}-{combine}", model, {"combine": combine, **options})


CASES = tuple(_cases())
