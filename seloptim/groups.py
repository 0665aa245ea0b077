"""Which parameters of a model are curved."""

import warnings
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd


def param_groups(model: nn.Module, weight_decay: float | None = None, **options: Any) -> list[dict[str, Any]]:
    """Parameter groups that curve what the paper curves, by the type of the module that owns each parameter.

    Weights and biases of `nn.Linear` and of convolution layers (their subclasses too) are curved; embeddings, normalisation
    layers and all other parameters are not. A weight that an embedding shares with a Linear counts as the embedding.

    Args:
        model: the module whose parameters are to be optimized, frozen ones (requires_grad=False) included, so that unfreezing
            one later needs no new group.
        weight_decay: decay of the parameters with two or more dimensions; None (default) leaves it to the optimizer's
            argument. Parameters with fewer dimensions (biases, norms) get 0.0 either way.
        **options: any other option of a parameter group, put into every group returned (`lr=3e-4`, `beta=12.5`).

    Returns:
        Up to four groups, never an empty one, each `{"params": [(name, parameter), ...], "curved": bool, ...}`: names come with
        them, as from `model.named_parameters()`.

    Warns where nothing is curved although there are matrices outside embeddings: in modules that are linear and no nn.Linear,
    as transformers.pytorch_utils.Conv1D of GPT-2.

    Raises:
        TypeError: `model` is not a module, or an option is one that this function decides (`params`, `curved`).

    Example:
        >>> from seloptim import SELAdam, param_groups
        >>> model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4), nn.LayerNorm(4))
        >>> [(g["curved"], [name for name, _ in g["params"]]) for g in param_groups(model)]
        [(True, ['1.weight']), (True, ['1.bias']), (False, ['0.weight']), (False, ['2.weight', '2.bias'])]
        >>> optimizer = SELAdam(param_groups(model), lr=1e-3)

    Source: arXiv:2607.09967, which curves the linear layers of a GPT and leaves embeddings and norms to Adam.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"param_groups takes an nn.Module, got {type(model).__name__}; pass other iterables to the optimizer"
        )
    decided = {"params", "curved"} & options.keys()
    if decided:
        raise TypeError(
            f"param_groups decides {sorted(decided)} itself; build the groups by hand to choose differently"
        )
    curved: set[int] = set()
    plain: set[int] = set()
    for module in model.modules():
        kind = curved if isinstance(module, (nn.Linear, _ConvNd)) else plain
        kind.update(id(p) for p in module.parameters(recurse=False))
    others = {
        type(module).__name__
        for module in model.modules()
        if not isinstance(module, (nn.Linear, nn.Embedding, nn.EmbeddingBag))
        and any(p.dim() >= 2 for p in module.parameters(recurse=False))
    }
    if others and not curved - plain:
        warnings.warn(
            f"param_groups knows nn.Linear and convolutions, and found nothing to curve in {type(model).__name__}, whose matrices "
            f"belong to {', '.join(sorted(others))}; to choose by name, give the optimizer model.named_parameters() and "
            "curved=lambda name, p: ...",
            stacklevel=2,
        )
    groups: list[dict[str, Any]] = []
    for is_curved in (True, False):
        for is_matrix in (True, False):
            members = [
                (name, p)
                for name, p in model.named_parameters()
                if (id(p) in curved - plain) == is_curved and (p.dim() >= 2) == is_matrix
            ]
            if not members:
                continue
            group: dict[str, Any] = {"params": members, "curved": is_curved, **options}
            if not is_matrix:
                group["weight_decay"] = 0.0
            elif weight_decay is not None:
                group["weight_decay"] = weight_decay
            groups.append(group)
    return groups
