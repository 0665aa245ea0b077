"""The curved step as pure functions, for TorchOpt: `sel` curves any GradientTransformation, `sel_adam` is SELAdam.

Needs torchopt (`pip install "seloptim[torchopt]"`), imported when a transformation is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import _rule
from ._options import CHOICES, DEFAULT_SCALE_LR, check_beta, check_scale_init, check_scale_lr, learned_kinds
from ._rule import KINDS, Curve, Hyper, Slot, Views
from .functional import sel_inverse
from .init import NO_VALUES, choose_beta
from .schedule import scale_lr_multiplier

if TYPE_CHECKING:
    from torchopt.base import GradientTransformation

Rate = float | Tensor | Callable[[Any], Any]


class Scales(NamedTuple):
    """The scale factors of one parameter with their Adam moments; None where the structure lacks a factor."""

    scale_row: Tensor | None  # (*batch, rows or 1, kinds)
    scale_row_exp_avg: Tensor | None
    scale_row_exp_avg_sq: Tensor | None
    scale_col: Tensor | None  # (*batch, cols, kinds)
    scale_col_exp_avg: Tensor | None
    scale_col_exp_avg_sq: Tensor | None
    beta: Tensor  # float64, on the host


class SELState(NamedTuple):
    """State of `sel`: trees of the parameters' structure, and the inner transformation's own state."""

    raw: Any  # the raw weights, in the parameters' shapes: they are authoritative
    scales: Any  # a Scales for each parameter
    count: Any  # updates that each parameter has taken, int64, on the host
    inner: Any


class AdamState(NamedTuple):
    """State of the Adam inside `sel_adam`: trees of the parameters' structure."""

    exp_avg: Any
    exp_avg_sq: Any
    count: Any


def sel(
    inner: GradientTransformation,
    *,
    lr: Rate = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    beta: float | str = "width",
    combine: str = "mismatched",
    structure: str = "row_col",
    batch_dims: int = 0,
    scale_init: Mapping[str, float | str] | None = None,
    scale_lr: Mapping[str, Any] | None = None,
    anneal_steps: int | None = None,
) -> GradientTransformation:
    """Run `inner` on the raw weights behind the parameters, and Adam on their scales.

    ::

        grad_raw, grad_scales = pullback(updates)
        raw    <- raw + inner(grad_raw), with raw as its parameters
        scales <- Adam(grad_scales) with lr times the multiplier of their kind
        return map(raw, scales) - params

    Every parameter is curved. The raw weights in the state are authoritative: the returned update lands on their map, so
    that an edit of the parameters between two updates is taken back, and `sel` comes last in a chain. Differentiable with
    inplace=False, through `init` too: what the raw weights start from is a function of the parameters. Where no gradient
    through the steps is wanted, use inplace=True or torch.no_grad(), or the graph grows with every step.

    Args:
        inner: the transformation that moves the raw weights, with a learning rate of its own. Decay in it acts on raw.
        lr: learning rate of the scale factors: a number, a 0-d tensor (differentiable), or a schedule from completed updates
            to one of them. Default 1e-3.
        b1, b2, eps: of the scale factors' Adam. Defaults 0.9, 0.999, 1e-8.
        beta, combine, structure, batch_dims, scale_init, anneal_steps: as for `SELAdam`; beta is no callable here.
        scale_lr: as for `SELAdam`; a multiplier may also be a 0-d tensor, which is then constant and differentiable.

    Returns:
        A torchopt.base.GradientTransformation, whose state is a SELState.

    Raises:
        ImportError: torchopt is missing. ValueError: bad options; a parameter that is not finite or has no inverse
        (from init, with its path); an update without `params`. TypeError: parameters that are not real and floating.

    Example:
        >>> import torchopt
        >>> from seloptim.transform import sel
        >>> params = {"w": torch.full((2, 2), 0.1)}
        >>> optimizer = torchopt.chain(torchopt.clip.clip_grad_norm(1.0), sel(torchopt.sgd(0.1, momentum=0.9), lr=1e-3))
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update({"w": torch.ones(2, 2)}, state, params=params, inplace=False)
        >>> bool((torchopt.apply_updates(params, updates, inplace=False)["w"] < 0.1).all())
        True

    Source: arXiv:2607.09967.
    """
    return _transformation(
        _Sel(
            inner,
            _check_rate("lr", lr),
            _check_adam(b1, b2, eps),
            _check_map(beta, combine, structure, batch_dims),
            scale_init,
            scale_lr,
            anneal_steps,
        )
    )


def sel_adam(
    lr: Rate = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    beta: float | str = "width",
    combine: str = "mismatched",
    structure: str = "row_col",
    batch_dims: int = 0,
    scale_init: Mapping[str, float | str] | None = None,
    scale_lr: Mapping[str, Any] | None = None,
    anneal_steps: int | None = None,
) -> GradientTransformation:
    """`SELAdam(curved="all", lr_space="raw")` as a pure transformation: one Adam for the raw weights and their scales.

    ::

        sel(adam(lr, (b1, b2), eps), lr=lr, b1=b1, b2=b2, eps=eps, ...)    # adam: torch.optim.Adam's arithmetic

    Args:
        lr: learning rate, as for `sel`. Default 1e-3.
        b1, b2, eps: as for torch.optim.Adam. Defaults 0.9, 0.999, 1e-8.
        weight_decay: decoupled: raw is scaled by 1 - lr * weight_decay. Default 0.
        beta, combine, structure, batch_dims, scale_init, scale_lr, anneal_steps: as for `sel`.

    Returns, raises: as `sel`.

    Example:
        >>> import torchopt
        >>> from seloptim.transform import sel_adam
        >>> net = torch.nn.Linear(3, 1)
        >>> rate = torch.tensor(1.0, requires_grad=True)
        >>> optimizer = torchopt.MetaOptimizer(net, sel_adam(1e-2, scale_lr={"e": rate}))
        >>> for _ in range(2):
        ...     optimizer.step(net(torch.ones(1, 3)).square().sum())
        >>> net(torch.ones(1, 3)).square().sum().backward()
        >>> bool(rate.grad != 0)
        True

    Source: arXiv:2607.09967.
    """
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"Invalid weight_decay: {weight_decay!r}; use a number >= 0")
    checked = _check_rate("lr", lr), _check_adam(b1, b2, eps)
    inner = _transformation(_Adam(*checked, weight_decay))
    curvature = _check_map(beta, combine, structure, batch_dims)
    return _transformation(_Sel(inner, *checked, curvature, scale_init, scale_lr, anneal_steps))


class _Map(NamedTuple):
    beta: float | str
    combine: str
    structure: str
    batch_dims: int


class _Adam:
    """torch.optim.Adam's arithmetic on plain tensors, by the stage that the classes use."""

    def __init__(self, lr: Rate, hyper: Hyper, weight_decay: float) -> None:
        self.lr, self.hyper, self.weight_decay = lr, hyper, weight_decay

    def init(self, params: Any) -> AdamState:
        leaves, spec = _flatten(params)
        zeros = [None if p is None else torch.zeros_like(p, requires_grad=False) for p in leaves]
        counts = [None if p is None else _zero_count() for p in leaves]
        moments = [None if zero is None else zero.clone() for zero in zeros]
        return AdamState(*(spec.unflatten(trees) for trees in (zeros, moments, counts)))

    def update(
        self, updates: Any, state: AdamState, *, params: Any = None, inplace: bool = True
    ) -> tuple[Any, AdamState]:
        leaves, spec = _flatten(params)
        found: list[Tensor | None] = []
        new: list[tuple[Tensor | None, ...]] = []
        for raw, grad, *moments, count in zip(
            leaves, *(spec.flatten_up_to(tree) for tree in (updates, *state)), strict=True
        ):
            exp_avg, exp_avg_sq = (_writable(tensor, inplace) for tensor in moments)
            found.append(None)
            if grad is not None:
                lr = _rate(self.lr, count)
                count = count + 1
                moved = raw.clone()
                slot = Slot(moved.view(-1), exp_avg.view(-1), exp_avg_sq.view(-1), None)
                hyper = self.hyper._replace(lr=lr)
                _rule.update(slot, grad.reshape(-1), hyper, int(count), lr, self.weight_decay)
                found[-1] = moved - raw
            new.append((exp_avg, exp_avg_sq, count))
        return spec.unflatten(found), AdamState(*(spec.unflatten(trees) for trees in zip(*new, strict=True)))


class _Sel:
    def __init__(
        self,
        inner: GradientTransformation,
        lr: Rate,
        hyper: Hyper,
        curvature: _Map,
        scale_init: Mapping[str, float | str] | None,
        scale_lr: Mapping[str, Any] | None,
        anneal_steps: int | None,
    ) -> None:
        self.inner, self.lr, self.hyper, self.map = inner, lr, hyper, curvature
        self.scale_init = {"e": 1.0, "l": 1.0, "m": 1.0, "n": 0.0, **(check_scale_init(scale_init) or {})}
        given = DEFAULT_SCALE_LR if scale_lr is None else scale_lr
        tensors = {kind: value for kind, value in given.items() if isinstance(value, Tensor)}
        for kind, value in tensors.items():
            if value.numel() != 1:
                raise ValueError(f"Invalid scale_lr for {kind}: a tensor of shape {tuple(value.shape)}; use one number")
        numbers = check_scale_lr({kind: value for kind, value in given.items() if kind not in tensors})
        self.scale_lr: dict[str, Any] = {**(numbers or {}), **tensors}
        self.anneal_steps = anneal_steps
        self.learned = learned_kinds({"structure": curvature.structure, "scale_lr": self.scale_lr})
        self.has_n = "n" in self.learned or self.scale_init["n"] != 0
        self._multipliers(0)  # its errors belong to the call that gave the options

    def init(self, params: Any) -> SELState:
        leaves, spec = _flatten(params)
        raws, scales, counts = [], [], []
        for p, path in zip(leaves, spec.paths(), strict=True):
            if p is None:
                raw = own = count = None
            else:
                try:
                    raw, own = self._start(p)
                except (TypeError, ValueError) as error:
                    raise type(error)(f"parameter {'.'.join(map(str, path)) or '(the only one)'}: {error}") from error
                count = _zero_count()
            raws.append(raw)
            scales.append(own)
            counts.append(count)
        raw_tree = spec.unflatten(raws)
        return SELState(raw_tree, spec.unflatten(scales), spec.unflatten(counts), self.inner.init(raw_tree))

    def _start(self, p: Tensor) -> tuple[Tensor, Scales]:
        if p.dim() < self.map.batch_dims:
            raise ValueError(f"batch_dims={self.map.batch_dims} is more than its {p.dim()} dimensions")
        if p.is_meta:
            raise ValueError(f"weights {NO_VALUES}")
        beta = self.map.beta
        if isinstance(beta, str):
            beta = choose_beta(p.detach(), beta, self.map.batch_dims)
        start = {kind: beta if value == "beta" else float(value) for kind, value in self.scale_init.items()}
        state = _rule.create_state(
            p.detach(),
            beta=beta,
            combine=self.map.combine,
            structure=self.map.structure,
            batch_dims=self.map.batch_dims,
            scale_init=start,
            residual_rank=0,
            amsgrad=False,
            seed=0,
        )
        raw = state["raw"]
        if torch.is_grad_enabled() and p.requires_grad:
            wide = p.to(_rule.state_dtype(p.dtype))
            raw = sel_inverse(wide, *start.values(), beta=beta, combine=self.map.combine).contiguous()
        assert isinstance(raw, Tensor)
        factors = {key: state.get(key) for key in Scales._fields[:-1]}
        return raw, Scales(**factors, beta=torch.tensor(beta, dtype=torch.float64, device="cpu"))  # type: ignore[arg-type]

    def update(
        self, updates: Any, state: SELState, *, params: Any = None, inplace: bool = True
    ) -> tuple[Any, SELState]:
        if params is None:
            raise ValueError("sel moves raw weights behind the parameters: call update(updates, state, params=params)")
        leaves, spec = _flatten(params)
        grads = spec.flatten_up_to(updates)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inplace):
            raws, scales = list(spec.flatten_up_to(state.raw)), list(spec.flatten_up_to(state.scales))
            counts = list(spec.flatten_up_to(state.count))
            taken = [k for k, grad in enumerate(grads) if grad is not None and leaves[k] is not None]

            pulled, raw_grads = {}, [None] * len(leaves)
            for k in taken:
                view, curve = self._view(raws[k], scales[k])
                wide = grads[k].to(view.raw.value.dtype).reshape(view.raw.value.shape)
                pulled[k] = _rule.pull(wide, view, curve)
                raw_grads[k] = pulled[k].raw.reshape(leaves[k].shape)
            moves, inner = self.inner.update(
                spec.unflatten(raw_grads), state.inner, params=spec.unflatten(raws), inplace=inplace
            )
            moves = spec.flatten_up_to(moves)
            found: list[Tensor | None] = [None] * len(leaves)
            # Copied behind the pull, whose graph holds what it read.
            raws = [_writable(raw, inplace) for raw in raws]
            scales = [own and Scales(*(_writable(tensor, inplace) for tensor in own)) for own in scales]
            for k in taken:
                raws[k] = raws[k].add_(moves[k])
                view, curve = self._view(raws[k], scales[k])
                self._move_scales(view, pulled[k], counts[k])
                counts[k] = counts[k] + 1
                weight = _rule.push(view, curve).reshape(leaves[k].shape)
                found[k] = weight.to(leaves[k].dtype) - leaves[k]
        new = SELState(spec.unflatten(raws), spec.unflatten(scales), spec.unflatten(counts), inner)
        return spec.unflatten(found), new

    def _view(self, raw: Tensor, own: Scales) -> tuple[Views, Curve]:
        state = {key: value for key, value in own._asdict().items() if value is not None}
        view = _rule.views({**state, "raw": raw}, self.map.batch_dims, False)
        return view, Curve(float(own.beta), self.map.combine, self.learned, self.has_n)

    def _move_scales(self, view: Views, pulled: _rule.Pulled, count: Tensor) -> None:
        if not self.learned:
            return
        lr, like = _rate(self.lr, count), view.raw.value
        rates = torch.stack(
            [torch.as_tensor(r, dtype=like.dtype, device=like.device) for r in self._multipliers(int(count))]
        )
        for slot, grad in ((view.scale_row, pulled.scale_row), (view.scale_col, pulled.scale_col)):
            if slot is not None and grad is not None:
                _rule.update(slot, grad, self.hyper, int(count) + 1, lr * rates)

    def _multipliers(self, done: int) -> list[float | Tensor]:
        found: list[float | Tensor] = []
        for kind in KINDS:
            given = self.scale_lr[kind] if kind in self.learned else 0.0
            if isinstance(given, Tensor):
                found.append(given.reshape(()))
                continue
            start, end = given if isinstance(given, (tuple, list)) else (given, given)
            found.append(scale_lr_multiplier(start, end, self.anneal_steps, done))
        return found


# ------------------------------------------------------------------------------------------------------------------ trees


def _torchopt() -> Any:
    try:
        import torchopt
    except ImportError as error:
        raise ImportError('seloptim.transform needs torchopt: pip install "seloptim[torchopt]"') from error
    return torchopt


def _transformation(rule: _Adam | _Sel) -> GradientTransformation:
    return _torchopt().base.GradientTransformation(rule.init, rule.update)


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    return _torchopt().pytree.tree_flatten(tree, none_is_leaf=True)


def _zero_count() -> Tensor:
    return torch.zeros((), dtype=torch.int64, device="cpu")


def _writable(tensor: Any, inplace: bool) -> Any:
    """What the stages may write to: the tensor itself, or a copy where it has to stay, or belongs to a graph."""
    if tensor is None or (inplace and not tensor.requires_grad):
        return tensor
    return tensor.clone()


def _rate(lr: Rate, count: Tensor) -> float | Tensor:
    """The rate of this update. One that is differentiated has a dimension: without, a stage may read it as a number."""
    now = lr(count) if callable(lr) else lr
    return now.reshape(1) if isinstance(now, Tensor) and now.requires_grad else float(now)


# ------------------------------------------------------------------------------------------------------------- validation


def _check_rate(name: str, lr: Any) -> Rate:
    if callable(lr) or isinstance(lr, Tensor):
        return lr
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 <= lr < math.inf:
        raise ValueError(f"Invalid {name}: {lr!r}; use a number >= 0, a 0-d tensor or a schedule (count) -> number")
    return float(lr)


def _check_adam(b1: float, b2: float, eps: float) -> Hyper:
    for name, value in (("b1", b1), ("b2", b2)):
        if not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise ValueError(f"Invalid {name}: {value!r}; use a number in [0, 1)")
    if not isinstance(eps, (int, float)) or not 0 <= eps < math.inf:
        raise ValueError(f"Invalid eps: {eps!r}; use a number >= 0")
    return Hyper(0.0, b1, b2, eps, 0.0, True, False, False)


def _check_map(beta: Any, combine: str, structure: str, batch_dims: int) -> _Map:
    for name, value in (("combine", combine), ("structure", structure)):
        if value not in CHOICES[name]:
            raise ValueError(f"Invalid {name}: {value!r}; use one of {', '.join(map(repr, CHOICES[name]))}")
    if isinstance(batch_dims, bool) or not isinstance(batch_dims, int) or batch_dims < 0:
        raise ValueError(f"Invalid batch_dims: {batch_dims!r}; use an int >= 0")
    return _Map(check_beta(beta, None), combine, structure, batch_dims)
