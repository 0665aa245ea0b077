"""Curved: any torch.optim class on the raw weights behind the parameters."""

import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import _execute, _rule, _shards
from ._base import SELOptimizer
from ._options import SEL_DEFAULTS, near_names, scale_rates
from ._rule import Hyper

INNER = "inner_"  # in front of the optimizer_class's own keys in the state of a curved parameter
OURS = {*SEL_DEFAULTS, "sel_format", "optimizer_class", "params", "param_names"}
DECOUPLED = (torch.optim.Muon, torch.optim.Adafactor)  # always; others say so in their groups
FASTEST_SCALE = 0.1  # a scale starts at 1: an Adam step beyond a tenth of that is no longer a correction


class Curved(SELOptimizer):
    """Run any torch.optim class in curved weight space: SGD, RMSprop, NAdam, Muon.

    ::

        raw.grad = p.grad * d weight / d raw              # pulled back
        optimizer_class([raw], **options).step()          # its own rule and its own state, on raw
        scales  <- Adam, with lr times their multipliers
        p       <- map(raw, scales)

    `Curved(torch.optim.Adam, params)` is `SELAdam(params)`, with decay 0 or decoupled. Parameters that are not curved are
    stepped by the same class as they are. Raw weights, accessors, edits, groups and saving work as in SELAdam.

    Args:
        optimizer_class: a torch.optim.Optimizer subclass that takes dense gradients and whose step needs no closure.
        params: parameters, (name, parameter) pairs or groups, as for any optimizer.
        **options: SELAdam's own (curved, combine, init, beta, lr_space, structure, batch_dims, scale_init, scale_lr,
            anneal_steps, residual_rank, check_edits) mean what they mean there; all others go to `optimizer_class`. Both may
            stand in groups. Scales are multiples of the class's lr: where that is large (SGD, Adadelta), give a small
            scale_lr. They take the group's betas, eps and amsgrad if it has them, else Adam's defaults. A coupled
            weight_decay acts on raw.

    Raises:
        TypeError: optimizer_class cannot run on raw weights (LBFGS, SparseAdam, ...), with the reason, or has no such option;
            from the first step, one that keeps state in its groups.
        ValueError: bad options, each with its value; whatever optimizer_class raises for its own.

    Example:
        >>> from seloptim import Curved
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = Curved(torch.optim.SGD, model.parameters(), lr=0.01, momentum=0.9, beta=12.5)
        >>> model(torch.ones(3, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> sorted(key for key in optimizer.state[model.weight] if key.startswith("inner"))
        ['inner_momentum_buffer']

    Source: arXiv:2607.09967, whose map this puts under other optimizers than its Adam.
    """

    _inner: torch.optim.Optimizer | None = None  # made when it is needed: a copy makes its own

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], params: Any, **options: Any) -> None:
        _check_class(optimizer_class)
        sel_options = {key: options.pop(key, default) for key, default in SEL_DEFAULTS.items()}
        _check_options(optimizer_class, options)
        self.optimizer_class, self._options = optimizer_class, options
        defaults = self._make([torch.zeros(1, 1)]).defaults
        if "lr" not in defaults:
            raise TypeError(f"{optimizer_class.__name__} has no lr, whose multiples are the rates of the scales")
        super().__init__(params, {**defaults, **sel_options, "optimizer_class": _full_name(optimizer_class)})

    def _make(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        return self.optimizer_class(params, **self._options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch.optim.Optimizer.add_param_group; callables among its options are resolved here.

        Raises:
            ValueError, TypeError: as the constructor; nothing is added then.

        Example:
            >>> from seloptim import Curved
            >>> a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
            >>> optimizer = Curved(torch.optim.RMSprop, a.parameters())
            >>> optimizer.add_param_group({"params": b.parameters(), "curved": False, "lr": 1e-2})
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        fastest = float(group["lr"]) * max(scale_rates(group, 0))
        if fastest > FASTEST_SCALE and group["curved"] not in ("none", False):
            warnings.warn(
                f"the scales of {self.optimizer_class.__name__}'s parameters would move by {fastest:.3g} a step, from 1: they "
                f"take Adam steps of lr * scale_lr with lr = {float(group['lr']):g}; pass a smaller scale_lr, or structure='none'",
                stacklevel=2,
            )

    @staticmethod
    def _refuse_shards(group: dict[str, Any], p: Tensor, name: str) -> None:
        if _shards.is_sharded(p):
            raise ValueError(
                f"parameter {name} is a DTensor, of which Curved would show the inner optimizer one rank's part; use SELAdam for "
                "sharded parameters, or DistributedDataParallel with Curved"
            )

    def _refuse(self, group: dict[str, Any], candidates: list[tuple[Tensor, str]]) -> None:
        super()._refuse({**group, "differentiable": group.get("differentiable")}, candidates)
        self._make([{**_inner_options(group), "params": list(group["params"])}])

    def _create(self, group: dict[str, Any], i: int, p: Tensor, name: str) -> None:
        super()._create(group, i, p, name)
        state = self.state[p]
        for moment in _rule.MOMENTS:
            state.pop(moment, None)
        # Some classes (Adagrad) make their state in the constructor.
        made = self._make([{**_inner_options(group), "params": [state["raw"]]}]).state
        state.update({INNER + key: value for key, value in made.get(state["raw"], {}).items()})

    def _check_pace(self, lr: float, beta: float, name: str) -> None:
        if "betas" in self.defaults:  # of the Adam family, whose step is bounded by lr
            super()._check_pace(lr, beta, name)

    # -------------------------------------------------------------------------------------------------------------- step

    def _step_curved(self, group: dict[str, Any], params: list[Tensor]) -> None:
        items, hyper = self._items(group, params), _hyper(group)
        still = _rule.is_zero(hyper.lr)
        with torch.autocast(params[0].device.type, enabled=False):
            pulled = []
            raws: dict[float, list[Tensor]] = {}
            states: dict[Tensor, dict[str, Any]] = {}
            kept: dict[Tensor, Tensor] = {}
            try:
                for p, item in zip(params, items, strict=True):
                    gradient, blocks = _execute.pull(item, hyper)
                    pulled.append(blocks)
                    raw = self.state[p]["raw"]
                    raw.grad = gradient.view(raw.shape)
                    raws.setdefault(item.slope, []).append(raw)
                    states[raw] = {
                        key[len(INNER) :]: value for key, value in self.state[p].items() if key.startswith(INNER)
                    }
                    if still:
                        kept[raw] = raw.clone()
                options = {**_inner_options(group), "maximize": False} if "maximize" in group else _inner_options(group)
                groups = [{**options, **self._at_slope(group, slope), "params": raws[slope]} for slope in raws]
                states = self._run(groups, states)
            finally:
                for p in params:
                    self.state[p]["raw"].grad = None
            for raw, before in kept.items():
                raw.copy_(before)  # there are classes that move at lr = 0 (Rprop, ASGD)
            for item, blocks in zip(items, pulled, strict=True):
                _execute.push(item, hyper, blocks)
        for p in params:
            state = self.state[p]
            state.update({INNER + key: value for key, value in states[state["raw"]].items()})
            state["step"] += 1
        self._stepped(params)

    def _at_slope(self, group: dict[str, Any], slope: float) -> dict[str, Any]:
        """lr by which raw moves, and a decay that stays what the group's lr makes of it."""
        if slope == 1:
            return {}
        changed = {"lr": group["lr"] / slope}
        if group.get("decoupled_weight_decay", issubclass(self.optimizer_class, DECOUPLED)) and group.get(
            "weight_decay"
        ):
            changed["weight_decay"] = group["weight_decay"] * slope
        return changed

    def _step_plain(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """optimizer_class as it is, for the parameters of a group that are not curved."""
        states = {p: self.state[p] for p in params}
        self.state.update(self._run([{**_inner_options(group), "params": params}], states))

    def _settle_plain(self, group: dict[str, Any], p: Tensor) -> None:
        if not self.state[p]:
            self.state[p].update(self._make([{**_inner_options(group), "params": [p]}]).state.get(p, {}))

    def _only_creates(self, members: list[tuple[dict[str, Any], int, Tensor, str]]) -> bool:
        return False  # a first step at lr = 0 makes and counts what optimizer_class makes and counts

    def _run(
        self, groups: list[dict[str, Any]], states: Mapping[Tensor, dict[str, Any]]
    ) -> dict[Tensor, dict[str, Any]]:
        """One step of optimizer_class over these groups; the states that it leaves."""
        if self._inner is None:
            self._inner = self._make([torch.zeros(1, 1)])
        inner = self._inner
        inner.param_groups, inner.state = [dict(group) for group in groups], defaultdict(dict, states)
        step: Any = self.optimizer_class.step
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # torch's own wrapper would fire hooks of all optimizers a second time
        try:
            step(inner)
            for given, left in zip(groups, inner.param_groups, strict=True):
                if kept := [key for key, value in left.items() if key not in given or value is not given[key]]:
                    raise TypeError(
                        f"{self.optimizer_class.__name__} keeps {', '.join(kept)} in its param groups, where Curved, which "
                        "hands it other groups at each step, would lose it; use a class that keeps its state for each parameter"
                    )
            return {tensor: inner.state[tensor] for tensor in states}
        finally:
            inner.param_groups, inner.state = [], defaultdict(dict)

    # -------------------------------------------------------------------------------------------------- saving, loading

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizer_class": self.optimizer_class, "_options": self._options}

    def _check_incoming(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict.get("param_groups", []) if isinstance(state_dict, Mapping) else []
        for saved in groups:
            name = saved.get("optimizer_class", "SELAdam" if "sel_format" in saved else "a plain optimizer")
            if name != _full_name(self.optimizer_class):
                raise ValueError(
                    f"the state was saved by {name}, this is Curved({_full_name(self.optimizer_class)}); "
                    "load it into an optimizer of its own kind"
                )
        super()._check_incoming(state_dict)

    def _saved_fault(self, state: dict[str, Any], p: Tensor, batch_dims: int) -> str | None:
        return _rule.state_fault(state, p.shape, batch_dims, raw_has_moments=False) if "raw" in state else None

    def _reinstall(self, incoming: dict[str, Any]) -> None:
        super()._reinstall(incoming)
        saved_ids = [k for group in incoming["param_groups"] for k in group["params"]]
        for saved_id, (_, _, p, _) in zip(saved_ids, self._members(), strict=True):
            saved = incoming["state"].get(saved_id, {})
            if "raw" in saved:
                self._reinstall_plain(p, {key: value for key, value in saved.items() if key.startswith(INNER)}, True)

    def _reinstall_plain(self, p: Tensor, saved: dict[str, Any], ours: bool) -> None:
        """As optimizer_class made it: in its own dtype, and a counter where torch.optim.Optimizer puts one."""
        group, _, _ = self._find(p)
        for key, value in saved.items():
            if isinstance(value, Tensor):
                counts = key.removeprefix(INNER) == "step" and not (group.get("capturable") or group.get("fused"))
                self.state[p][key] = value.detach().to(value.device if counts else p.device, copy=True)


def _inner_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in OURS}


def _hyper(group: Mapping[str, Any]) -> Hyper:
    """Adam's options of the scales. Decay is the inner optimizer's matter; maximize is met by the pull, for both."""
    betas, eps = group.get("betas"), group.get("eps")
    beta1, beta2 = (float(b) for b in betas) if isinstance(betas, (tuple, list)) and len(betas) == 2 else (0.9, 0.999)
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.dim():
        lr = lr.reshape(())
    return Hyper(
        lr,
        beta1,
        beta2,
        float(eps) if isinstance(eps, (int, float)) else 1e-8,
        0.0,
        True,
        bool(group.get("amsgrad", False)),
        bool(group.get("maximize", False)),
    )


# ------------------------------------------------------------------------------------------------------------- validation


def _full_name(optimizer_class: type) -> str:
    return f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"


def _check_class(optimizer_class: Any) -> None:
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, torch.optim.Optimizer):
        raise TypeError(
            f"Curved takes an optimizer class first, got {optimizer_class!r}; use Curved(torch.optim.SGD, params, lr=0.01)"
        )
    name = optimizer_class.__name__
    if issubclass(optimizer_class, SELOptimizer):
        raise TypeError(f"{name} curves weights by itself; give Curved a plain optimizer class")
    if issubclass(optimizer_class, torch.optim.SparseAdam):
        raise TypeError(f"{name} takes sparse gradients, which have no dense pull-back through the scales")
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{name}.step needs a closure that evaluates the model at trial weights, and raw weights reach the model only after a "
            "step"
        )


def _check_options(optimizer_class: type, options: Mapping[str, Any]) -> None:
    known = inspect.signature(optimizer_class).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name, value in options.items():
        if name not in known:
            hint = near_names(name, [*SEL_DEFAULTS, *known])
            raise TypeError(f"Curved({optimizer_class.__name__}) has no option {name}={value!r}{hint}")
