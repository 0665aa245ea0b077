"""Scales, slopes and the heavy tail of a SELAdam in TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from ._shadow import Shadow


def log_scales(writer: SummaryWriter, optimizer: Shadow, step: int, *, histograms: bool = False) -> None:
    """Write `optimizer.stats()` to TensorBoard: one section a parameter, one chart a number.

    ::

        for name, value in optimizer.stats().items():
            writer.add_scalar(name, value, step)

    Call it every 100 steps or so; a call costs about as much as two steps of the optimizer (see `SELAdam.stats`), and
    histograms cost more.

    Args:
        writer: a torch.utils.tensorboard.SummaryWriter, or anything with its add_scalar and add_histogram.
        optimizer: a SELAdam.
        step: the training step, the charts' x axis.
        histograms: also write each parameter's weights (name/weight) and raw weights (name/weight_raw) as histograms; they are
            copied to the host for it. Values that are not finite are left out. Default False.

    Raises:
        ImportError: no writer, and no TensorBoard to make one: install seloptim[tensorboard].
        TypeError: `writer` is no writer.
        ValueError: as `SELAdam.stats` and, with histograms, `SELAdam.raw`.

    Example:
        >>> import tempfile
        >>> from seloptim import SELAdam
        >>> from torch.utils.tensorboard import SummaryWriter
        >>> optimizer = SELAdam(torch.nn.Linear(3, 2).named_parameters())
        >>> with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        ...     log_scales(writer, optimizer, step=0)

    Source: arXiv:2607.09967, whose scales these are.
    """
    if not (hasattr(writer, "add_scalar") and hasattr(writer, "add_histogram")):
        _explain(writer)
    for name, value in optimizer.stats().items():
        writer.add_scalar(name, value, step)
    if histograms:
        for name, p in optimizer.named_curved():
            if p.requires_grad and not p.is_meta:
                _add_histogram(writer, f"{name}/weight", p, step)
                _add_histogram(writer, f"{name}/weight_raw", optimizer.raw(p), step)


def _add_histogram(writer: SummaryWriter, name: str, values: Tensor, step: int) -> None:
    if hasattr(values, "to_local"):  # a DTensor's other parts would take the other ranks
        values = values.to_local()  # type: ignore[attr-defined]
    values = values.detach().flatten().float()  # numpy has no bfloat16
    values = values[torch.isfinite(values)]
    if values.numel():
        writer.add_histogram(name, values, step)


def _explain(writer: object) -> None:
    """Say what is missing to a caller whose writer is none."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "log_scales needs a SummaryWriter, and TensorBoard is not installed: pip install 'seloptim[tensorboard]'"
        ) from error
    raise TypeError(
        f"log_scales writes to a SummaryWriter of torch.utils.tensorboard, got {type(writer).__name__}: {writer!r}"
    )
