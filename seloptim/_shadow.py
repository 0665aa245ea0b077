"""The raw weights and scales behind ordinary parameters: their creation, what users read of them, edits from outside.

A mixin beside torch.optim.Optimizer. It owns the answer to one question: is p still the map of raw? `_seen` remembers, for
each parameter, the version, storage and device that the last write left; where they differ, or nothing is remembered, the
values decide.
"""

import copy
import functools
import logging
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import _rule, _shards, _stats
from ._execute import Item
from ._options import EXECUTION, SEL_DEFAULTS, check_beta, check_group, learned_kinds
from ._rule import KINDS, Curve, Views
from .init import LARGEST_CURVED_RMS, NO_VALUES, _rms, choose_beta

logger = logging.getLogger("seloptim")


# Options that count when a state is made, and may not change behind it.
FIXED = ("combine", "init", "beta", "structure", "batch_dims", "scale_init", "residual_rank")
_Made = TypeVar("_Made")
Method = TypeVar("Method", bound=Callable[..., Any])

CHECKED = (*SEL_DEFAULTS, *EXECUTION, "amsgrad")  # what a step counts on as long as it is the same

ULPS = 16  # sel.md, section 7: what "does not differ" means across paths


def unrecorded(method: Method) -> Method:
    """No graph, and no inference mode either: a step could not write to state that was made, or moved, in one."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return method(*args, **kwargs)
        with torch.no_grad():
            return method(*args, **kwargs)

    return cast(Method, run)


class Ready(NamedTuple):
    """What a step needs of a parameter, as an earlier one found it: true while the options, the parameter and these values of its
    state are the same."""

    values: tuple[Any, ...]
    item: Item  # with the parameter in the gradient's place, which nothing here may keep alive


@dataclass(slots=True)
class _Seen:
    """What a parameter looked like after our last look at its values."""

    version: tuple[int, int]  # of the parameter and, where that is a DTensor, of this rank's part
    storage: StorageWeakRef  # weak, so that a freed storage's address cannot come back under another tensor
    layout: tuple[Any, ...]  # offset and strides
    device: torch.device
    dtype: torch.dtype
    has_n: bool
    ready: Ready | None = None


class Shadow:
    """Raw weights and scales behind parameters; mixed into an Optimizer."""

    param_groups: list[dict[str, Any]]
    state: Any
    _seen: dict[Tensor, _Seen]
    _made: dict[Tensor, dict[str, Any]]  # the FIXED options that a curved parameter's state was made under
    _checked: list[Any] | None = None  # the options of all groups when they were last found to be in order
    # What a step is writing to, or was when it was interrupted: only the values can tell where that left p and raw.
    _moving: Sequence[Tensor] = ()
    _warned: set[str]

    # ------------------------------------------------------------------------------------------------------- who is who

    def _members(self) -> Iterator[tuple[dict[str, Any], int, Tensor, str]]:
        """(group, position in it, parameter, name) for every parameter."""
        for g, group in enumerate(self.param_groups):
            names = group.get("param_names") or ()
            named = len(names) == len(group["params"])  # else it was changed from outside
            for i, p in enumerate(group["params"]):
                yield group, i, p, names[i] if named else f"{g}.{i}"

    def _find(self, p: Tensor) -> tuple[dict[str, Any], int, str]:
        for group, i, member, name in self._members():
            if member is p:
                return group, i, name
        raise KeyError(
            "this tensor is not a parameter of the optimizer; pass one of its parameters itself, not a view or a copy"
        )

    def _is_curved(self, group: dict[str, Any], i: int, p: Tensor, name: str) -> bool:
        """Whether p is curved; once its state exists, the state is the answer."""
        state = self.state.get(p)
        if state and "from_adam" not in state:
            return "raw" in state
        choice = self._choice(group, i, p)
        if choice != "matrices" or p.is_meta:
            return bool(choice)
        rms = _rms(p)
        if LARGEST_CURVED_RMS < rms < math.inf:  # one that is not finite is refused by name when its state is made
            self._log_once(
                f"{name}: not curved, its rms {rms:.3g} is above {LARGEST_CURVED_RMS}; curved=True in its group curves it"
            )
            return False
        return True

    @staticmethod
    def _choice(group: dict[str, Any], i: int, p: Tensor) -> bool | str:
        """What the group says of a parameter: False, True, or "matrices" where its values will decide."""
        choice = _own(group, "curved", i)
        if choice in ("none", False) or not p.is_floating_point():
            return False
        if choice != "matrices":
            return True
        return choice if p.dim() >= 2 else False

    def _log_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)

    # -------------------------------------------------------------------------------------------------------- the state

    def _resolve_beta(self, group: dict[str, Any], i: int, p: Tensor, name: str) -> float:
        choice = _own(group, "beta", i)
        if isinstance(choice, str):
            try:
                return choose_beta(p.detach(), choice, group["batch_dims"])
            except ValueError as error:
                raise ValueError(f"parameter {name}: {error}") from error
        return float(choice)

    def _scale_init(self, group: dict[str, Any], beta: float) -> dict[str, float]:
        given = {"e": 1.0, "l": 1.0, "m": 1.0, "n": 0.0, **(group["scale_init"] or {})}
        return {kind: beta if given[kind] == "beta" else float(given[kind]) for kind in KINDS}

    def _create(self, group: dict[str, Any], i: int, p: Tensor, name: str) -> None:
        """State for a curved parameter from its present value; ValueError with its name where that cannot be."""
        self._refuse_shards(group, p, name)
        if p.is_meta:
            raise ValueError(f"parameter {name}: weights {NO_VALUES}")
        beta = self._resolve_beta(group, i, p, name)
        state: dict[str, Any] = self._on_every_rank(
            p,
            name,
            lambda: _rule.create_state(
                _shards.local(p),
                beta=beta,
                combine=group["combine"],
                structure=group["structure"],
                batch_dims=group["batch_dims"],
                scale_init=self._scale_init(group, beta),
                residual_rank=group["residual_rank"],
                amsgrad=group.get("amsgrad", False),
                seed=next(k for k, (_, _, q, _) in enumerate(self._members()) if q is p),
            ),
        )
        if _shards.is_sharded(p) and p.numel():
            weighted = state["mean_slope"] * state["raw"].numel()
            state["mean_slope"] = _shards.total(p, weighted)[0] / p.numel()
        state["initial_rms"] = _rms(p)
        self.state[p] = _shards.assembled(p, state, group["batch_dims"], group["structure"])
        self._made[p] = fixed_options(group, i)
        self._remember(p, group, self._any_n(state))
        self._check_pace(float(group["lr"]) / self._lr_slope(group, state), beta, name)

    @staticmethod
    def _lr_slope(group: dict[str, Any], state: dict[str, Any]) -> float:
        """What lr is divided by for raw."""
        return state["mean_slope"] if group["lr_space"] == "weight" else 1.0

    @staticmethod
    def _refuse_shards(group: dict[str, Any], p: Tensor, name: str) -> None:
        reason = _shards.fault(p, group["batch_dims"], group["structure"])
        if reason is None and _shards.is_sharded(p) and group["residual_rank"]:
            reason = "residual_rank is not available for a DTensor; use residual_rank=0"
        if reason is None and _shards.is_sharded(p) and group.get("capturable"):
            reason = (
                "capturable=True is not available for a DTensor, whose ranks agree on each step; use capturable=False"
            )
        if reason:
            raise ValueError(f"parameter {name}: {reason}")

    @staticmethod
    def _on_every_rank(p: Tensor, name: str, make: Callable[[], _Made]) -> _Made:
        """make(), whose ValueError on one rank is one on all that hold a part of p: none goes on alone."""
        made, fault = None, None
        try:
            made = make()
        except ValueError as error:
            fault = error
        if any(_shards.anywhere([p], [fault is not None])):
            raise ValueError(f"parameter {name}: {fault or 'its part on another rank has the fault'}") from fault
        return made  # type: ignore[return-value]

    def _check_pace(self, lr: float, beta: float, name: str) -> None:
        if lr * beta > 0.5:
            warnings.warn(
                f"lr * beta = {lr:g} * {beta:g} = {lr * beta:.3g} for parameter {name}: one step could multiply a weight by more "
                f"than e^0.5; lower lr below {0.5 / beta:.3g} (lr as the step of raw: divided by the mean slope under lr_space='weight')",
                stacklevel=3,
            )

    def _ensure(self, p: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        """(group, state) of a curved parameter, for the accessors."""
        self._check_options()
        group, i, name = self._find(p)
        self._refuse_alone(group, i, p, name)
        if not self._is_curved(group, i, p, name):
            raise KeyError(f"parameter {name} is not curved; named_curved() lists those that are")
        if p.is_meta:
            raise ValueError(
                f"parameter {name} is on the meta device and has no values yet; materialise it before (to_empty)"
            )
        if not _shards.is_sharded(p):  # its ranks take edits in together, in step() and state_dict()
            self._settle(group, i, p, name)
        return group, self.state[p]

    def _refuse_alone(self, group: dict[str, Any], i: int, p: Tensor, name: str) -> None:
        """RuntimeError where an answer would take all ranks: one that asks alone would wait for ever."""
        if self._waits(group, i, p):
            raise RuntimeError(
                f"parameter {name} is a DTensor and has no state yet; all ranks make it together, in step() or state_dict(): call "
                "one of them on every rank first"
            )

    def _waits(self, group: dict[str, Any], i: int, p: Tensor) -> bool:
        return _shards.is_sharded(p) and not p.is_meta and not self.state.get(p) and bool(self._choice(group, i, p))

    def _has_raw(self, p: Tensor) -> bool:
        return "raw" in self.state.get(p, {})

    def _settle(self, group: dict[str, Any], i: int, p: Tensor, name: str) -> None:
        """State of a curved parameter that is true now: made where there is none, p's edits taken into it."""
        if self._has_raw(p):
            self._check_edit(group, i, p, name)
        else:
            self._create(group, i, p, name)

    def _follow(self, p: Tensor) -> None:
        """Move the state to where p lives, in the dtype that belongs to p's: after model.to(...), or a load from another."""
        state = self.state[p]
        main, dtype = ("raw", _rule.state_dtype(p.dtype)) if "raw" in state else ("exp_avg", p.dtype)
        if state[main].dtype != dtype or state[main].device != p.device:
            for key, value in state.items():
                if isinstance(value, Tensor) and not key.endswith("step"):
                    state[key] = value.to(device=p.device, dtype=dtype)

    def _views(self, p: Tensor, group: dict[str, Any]) -> Views:
        shape = _rule.matrix_shape(_shards.local(p).shape, group["batch_dims"])
        return _rule.in_batches(self._slots(p, group), shape)

    def _slots(self, p: Tensor, group: dict[str, Any]) -> Views:
        state = self.state[p]
        amsgrad = group.get("amsgrad", False)
        if amsgrad:
            for name in _rule.VALUES:
                # amsgrad may be switched on in a group during training
                if _rule.moment_key(name, "exp_avg_sq") in state:
                    key = _rule.moment_key(name, "max_exp_avg_sq")
                    if key not in state:
                        state[key] = torch.zeros_like(state[name])
        return _rule.slots(_shards.local_state(state), amsgrad)

    def _curve(self, p: Tensor, group: dict[str, Any]) -> Curve:
        learned = learned_kinds(group)
        seen = self._seen.get(p)  # None in a copy or an unpickled optimizer that has taken no step yet
        has_n = "n" in learned or (seen.has_n if seen else self._any_n(self.state[p]))
        return Curve(self.state[p]["beta"], group["combine"], learned, has_n)

    def _remember(self, p: Tensor, group: dict[str, Any], has_n: bool) -> None:
        """p is the map of its raw now."""
        known, part = self._seen.get(p), _part(p)
        storage = known.storage if known and _same_storage(known, part) else StorageWeakRef(part.untyped_storage())
        self._seen[p] = _Seen(_versions(p, part), storage, _layout(part), p.device, p.dtype, has_n)

    @staticmethod
    def _any_n(state: dict[str, Any]) -> bool:
        first = state["scale_row"] if "scale_row" in state else state["scale_col"]
        return bool((_shards.local(first)[..., KINDS.index("n")] != 0).any())

    # ------------------------------------------------------------------------------------------------ edits from outside

    def _check_edit(self, group: dict[str, Any], i: int, p: Tensor, name: str) -> None:
        """Take an edit of p from outside into raw before the step reads it."""
        if self._may_be_edited(group, p):
            self._take(group, i, p, name)

    def _may_be_edited(self, group: dict[str, Any], p: Tensor) -> bool:
        if self._moving:
            for moving in self._moving:
                self._forget(moving)
            self._moving = ()
        seen, part = self._seen.get(p), _part(p)
        return not (
            seen is not None
            and group["check_edits"] == "tracked"
            and seen.version == _versions(p, part)
            and seen.device == p.device
            and seen.dtype == p.dtype
            and _same_storage(seen, part)
        )

    def _agree_on_edits(self, members: Iterable[tuple[dict[str, Any], Tensor]]) -> None:
        """What one rank would look at, all look at: an edit may touch one rank's part alone, and FSDP moves storages of some."""
        sharded = [(group, p) for group, p in members if _shards.is_sharded(p) and p in self._seen]
        flags = [self._may_be_edited(group, p) for group, p in sharded]
        for (_, p), flag in zip(sharded, _shards.anywhere([p for _, p in sharded], flags), strict=True):
            if flag:
                self._forget(p)

    def _forget(self, p: Tensor) -> None:
        """The next look at p is at its values."""
        if p in self._seen:
            self._seen[p].version = (-1, -1)

    def _is_ready(self, group: dict[str, Any], p: Tensor) -> bool:
        """Whether p and its state are as the last step left them, and need no look at more than that."""
        seen = self._seen.get(p)
        if seen is None or seen.ready is None:
            return False
        values, now = seen.ready.values, self.state[p]
        same = len(values) == len(now) and all(map(operator.is_, values, now.values()))
        if not same or self._may_be_edited(group, p):
            seen.ready = None
        return seen.ready is not None

    def _stepped(self, params: Sequence[Tensor]) -> None:
        """A step that wrote to these is through: they are the maps of their raw."""
        for p in params:
            self._seen[p].version = _versions(p, _part(p))
        self._moving = ()

    def _take(self, group: dict[str, Any], i: int, p: Tensor, name: str) -> None:
        """raw <- inverse(p) at the elements where p differs from map(raw); the other elements keep their bits."""
        self._follow(p)
        state = self.state[p]
        view, curve, part = self._views(p, group), self._curve(p, group), _shards.local(p)
        differs = differing(part, _rule.push(view, curve).view(part.shape))
        if any(_shards.anywhere([p], [bool(differs.any())])):
            if float(state["step"]) == 0:
                self._create(group, i, p, name)
                return
            if any(_shards.anywhere([p], [not bool(torch.isfinite(part[differs]).all())])):
                raise ValueError(
                    f"parameter {name} was edited and has non-finite weights; repair it before the next step"
                )
            self._invert_at(differs, p, state, view, curve, name)
        self._remember(p, group, self._any_n(state))

    def _check_options(self) -> bool:
        """Refuse what a group has been given since it was added and what cannot be, or cannot change any more; whether options
        changed since the last call.

        A look at values that are the same is all that it costs in a step.
        """
        for group in self.param_groups:
            if callable(group["curved"]) or callable(group["beta"]):
                self._resolve_callables(group, [(i, p, name) for g, i, p, name in self._members() if g is group])
        now = [([group.get(key) for key in CHECKED], list(map(id, group["params"]))) for group in self.param_groups]
        if now == self._checked:
            return False
        self._checked = None
        for seen in self._seen.values():
            seen.ready = None
        members = list(self._members())
        for group in self.param_groups:
            check_group(group)
        for group, i, p, name in members:
            state = self.state.get(p)
            if not state or "from_adam" in state:
                continue
            curved, choice = "raw" in state, self._choice(group, i, p)
            if choice != "matrices" and choice != curved:
                was = "curved" if curved else "not curved"
                raise ValueError(
                    f"curved={_own(group, 'curved', i)!r} in the group of parameter {name}, whose state was made {was} and cannot change; "
                    "set it back, or build a new optimizer (it starts from the weights as they are)"
                )
            if not curved:
                continue
            fixed = fixed_options(group, i)
            for option, then in self._made.setdefault(p, fixed).items():
                if fixed[option] != then:
                    raise ValueError(
                        f"{option}={fixed[option]!r} in the group of parameter {name}, whose state was made with {option}={then!r} and "
                        f"cannot change; set it back, or build a new optimizer (it starts from the weights as they are)"
                    )
        for group in self.param_groups:
            self._refuse(group, [(p, name) for g, i, p, name in members if g is group and self._choice(group, i, p)])
        self._checked = copy.deepcopy(now)
        return True

    def _refuse(self, group: dict[str, Any], candidates: list[tuple[Tensor, str]]) -> None:
        """Options that a curved parameter cannot honour; `candidates` are those that may become one."""
        if group["differentiable"]:
            raise ValueError(
                f"differentiable=True is not supported by {type(self).__name__}; "
                "seloptim.transform differentiates through steps, with torchopt"
            )
        for p, name in candidates:
            self._refuse_shards(group, p, name)
            if p.dim() < group["batch_dims"]:
                raise ValueError(
                    f"batch_dims={group['batch_dims']} is more than the {p.dim()} dimensions of parameter {name}; "
                    "put it into a group with fewer batch_dims"
                )

    def _resolve_callables(self, group: dict[str, Any], members: list[tuple[int, Tensor, str]]) -> None:
        """Groups hold plain values, also where somebody puts a callable into one later."""
        if callable(group["curved"]):
            group["curved"] = [bool(group["curved"](name, p)) for _, p, name in members]
        if callable(group["beta"]):
            # Not asked about parameters that stay plain: it may count on a matrix.
            group["beta"] = [
                check_beta(group["beta"](name, p), name) if self._choice(group, i, p) else "auto"
                for i, p, name in members
            ]

    def _invert_at(self, mask: Tensor, p: Tensor, state: dict[str, Any], view: Views, curve: Curve, name: str) -> None:
        shape = view.raw.value.shape
        target = _shards.local(p).to(torch.float64).reshape(shape)
        if (low_rank := _rule.residual(view)) is not None:
            target = target - low_rank.double()
        scales = [
            torch.as_tensor(scale, device=p.device).double().expand(shape)
            for scale in _rule.patterns(_rule.unpack(*_rule.factors(view), curve), curve)
        ]
        mask = mask.reshape(shape)
        raw, exists = _rule.nearest_inverse(
            target[mask],
            *(s[mask] for s in scales),
            combine=curve.combine,
            previous=view.raw.value[mask],
        )
        lost = int((~exists).sum())
        if 2 * _shards.total(p, lost)[0] > p.numel():
            self._restart_scales(p, state, target, curve, name)
            return
        view.raw.value[mask] = raw.to(view.raw.value.dtype)
        if lost:
            warnings.warn(
                f"parameter {name}: {lost} edited weights are out of reach of its map and got the nearest weight within reach; "
                f"reset it with fresh state, or use combine='congruent' with positive scales, if they must be exact",
                stacklevel=3,
            )

    def _restart_scales(self, p: Tensor, state: dict[str, Any], target: Tensor, curve: Curve, name: str) -> None:
        warnings.warn(
            f"parameter {name}: most of its edited weights are out of reach of its trained scales; the scales and their moments "
            f"went back to their start",
            stacklevel=4,
        )
        group, _, _ = self._find(p)
        start = self._scale_init(group, float(curve.beta))
        raw = self._on_every_rank(
            p, name, lambda: _rule.inverse(target, start, beta=float(curve.beta), combine=curve.combine)
        )
        state = dict(_shards.local_state(state))
        first = "scale_row" if "scale_row" in state else "scale_col"
        for factor in ("scale_row", "scale_col"):
            if factor in state:
                state[factor].fill_(1.0)
                for moment in _rule.MOMENTS:
                    if (key := _rule.moment_key(factor, moment)) in state:
                        state[key].zero_()
        state[first].copy_(state[first].new_tensor([start[kind] for kind in KINDS]))
        state["raw"].copy_(raw.view_as(state["raw"]))

    @unrecorded
    def resync(self, params: Iterable[Tensor] | None = None) -> None:
        """Take parameters as they are now: raw is recomputed where p differs from map(raw).

        Called by itself when an edit is seen (`check_edits`); call it after edits that cannot be seen, such as
        `p.data.mul_(0.5)`. Moments are kept; while a parameter has taken no step its state is made anew, beta included. With
        DTensors every rank must call it, with the same parameters.

        Args:
            params: parameters to look at; None (default) means every curved one that has state.

        Raises:
            KeyError: a tensor that is no curved parameter of this optimizer. ValueError: non-finite weights, by name.

        Example:
            >>> from seloptim import SELAdam
            >>> p = torch.nn.Parameter(torch.full((2, 2), 0.1))
            >>> optimizer = SELAdam([p])
            >>> raw = optimizer.raw(p).clone()
            >>> _ = p.data.mul_(2)
            >>> optimizer.resync()
            >>> bool((optimizer.raw(p) > raw).all())
            True
        """
        self._check_options()
        if params is None:
            chosen = {id(p) for p in self.state if isinstance(p, Tensor) and "raw" in self.state[p]}
        else:
            chosen = set()
            for p in [params] if isinstance(params, Tensor) else params:
                self._ensure(p)
                chosen.add(id(p))
        for group, i, p, name in self._members():
            if id(p) in chosen:
                self._take(group, i, p, name)

    # -------------------------------------------------------------------------------------------------- what users read

    @unrecorded
    def raw(self, p: Tensor) -> Tensor:
        """The raw weights behind `p`, of p's shape, in the state's dtype: the live state, not a copy.

        Raises:
            KeyError: p is not a curved parameter of this optimizer. ValueError: p has no values, or none with an inverse.
            RuntimeError: p is a DTensor and has no state yet, which its ranks make together in step() or state_dict().

        Example:
            >>> from seloptim import SELAdam
            >>> p = torch.nn.Parameter(torch.tensor([[0.0, 0.1]]))
            >>> SELAdam([p], beta=12.5, combine="congruent").raw(p)
            tensor([[0.0000, 0.0626]])
        """
        return self._ensure(p)[1]["raw"]

    @unrecorded
    def scales(self, p: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """kind -> (row, col), each shaped to broadcast to `p`: scale = row * col. A factor that the structure lacks is one.

        Raises: as raw().

        Example:
            >>> from seloptim import SELAdam
            >>> p = torch.nn.Parameter(torch.full((3, 2), 0.1))
            >>> row, col = SELAdam([p]).scales(p)["e"]
            >>> row.shape, col.shape
            (torch.Size([3, 1]), torch.Size([1, 2]))
        """
        group, state = self._ensure(p)
        part = _shards.local(p).shape
        lead, inner = tuple(part[: group["batch_dims"]]), tuple(part[group["batch_dims"] :])
        ones = torch.ones((), dtype=state["raw"].dtype, device=state["raw"].device)

        def factor(key: str, k: int, is_row: bool) -> Tensor:
            if key not in state:
                return ones.expand((1,) * p.dim())
            values = _shards.local(state[key])[..., k]
            if not inner:
                return values.reshape(lead)
            if is_row:
                return values.reshape(*lead, values.shape[-1], *(1,) * (len(inner) - 1))
            return values.reshape(*lead, 1, *inner[1:])

        def whole(key: str, k: int, is_row: bool) -> Tensor:
            return _shards.broadcasting(p, factor(key, k, is_row), state.get(key), group["batch_dims"], is_row)

        return {kind: (whole("scale_row", k, True), whole("scale_col", k, False)) for k, kind in enumerate(KINDS)}

    @unrecorded
    def beta(self, p: Tensor) -> float:
        """The curvature of `p`, fixed when its state was created. Raises: as raw().

        Example:
            >>> from seloptim import SELAdam
            >>> p = torch.nn.Parameter(torch.full((3, 2), 0.01))
            >>> round(SELAdam([p], beta="auto").beta(p), 3)
            28.0
        """
        return self._ensure(p)[1]["beta"]

    def named_curved(self) -> Iterator[tuple[str, Tensor]]:
        """(name, p) of every curved parameter: names from `named_parameters`, else "group.index".

        Example:
            >>> from seloptim import SELAdam
            >>> model = torch.nn.Linear(3, 2)
            >>> [name for name, _ in SELAdam(model.named_parameters()).named_curved()]
            ['weight']
        """
        for group, i, p, name in self._members():
            if self._waits(group, i, p) and not p.requires_grad:
                continue  # it gets no state, and to ask what it would be takes all ranks
            self._refuse_alone(group, i, p, name)
            if self._is_curved(group, i, p, name):
                yield name, p

    @unrecorded
    def describe(self) -> str:
        """A table of every parameter: shape, curved or why not, beta, mean slope, bytes of state. Print it before training.

        Of a DTensor it shows the mean slope when its state was made and the bytes on this rank, and asks no other rank.

        Example:
            >>> from seloptim import SELAdam
            >>> model = torch.nn.Linear(3, 2)
            >>> print(SELAdam(model.named_parameters(), beta=12.5).describe().splitlines()[0])
            name    shape  curved      beta  mean slope  state bytes
        """
        self._check_options()
        rows = [("name", "shape", "curved", "beta", "mean slope", "state bytes")]
        for group, i, p, name in self._members():
            shape = "x".join(map(str, p.shape)) or "scalar"
            if self._waits(group, i, p):
                rows.append((name, shape, "decided in step()" if p.requires_grad else "no: frozen", "-", "-", "-"))
                continue
            curved = self._is_curved(group, i, p, name)
            if not curved or p.is_meta or not p.requires_grad:
                rows.append((name, shape, self._why(group, i, p, curved), "-", "-", self._bytes(group, p, curved)))
                continue
            _, state = self._ensure(p)
            slope = state["mean_slope"] if p.numel() else math.nan
            if p.numel() and not _shards.is_sharded(p):
                slope = float(self._slope(p, group).mean(dtype=torch.float64))
            rows.append(
                (name, shape, group["combine"], f"{state['beta']:.4g}", f"{slope:.4g}", self._bytes(group, p, curved))
            )
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines = []
        for row in rows:
            cells = [c.ljust(w) if k < 3 else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True))]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    @unrecorded
    def stats(self) -> dict[str, float]:
        """What the curvature does to each curved parameter, as numbers for any logger; the values are read in one device sync.

        Under "name/...", for the parameter called name (as in `named_curved`):

        - scale_e_mean, scale_e_min, scale_e_max, and likewise l, m (n only where it trains or is not 0): of row * col, over
          every weight.
        - size_beta_rms: beta times the rms of the weights; near 0 the map is a line, above 1 it is deep in its exponential.
        - slope_negative, slope_positive: mean d weight / d raw over the negative and over the positive weights.
        - step_smallest_decile, step_largest_decile: relative size of the last step, mean |change| over mean |weight|, among
          the tenth of the weights with the smallest and with the largest |weight|; step_ratio: the first over the second,
          about 33 under Adam with normal weights and more with a heavier tail; less where steps grow with their weights.
        - tail_beyond_4_sigma: share of weights more than 4 standard deviations from their mean (6.3e-5 in a normal
          distribution). tail_kurtosis: fourth standardised moment (3 in a normal distribution). tail_max_over_initial_rms:
          largest |weight| over the rms that the weights had when their state was created.

        No copy of the weights is kept for the steps: the step is run backwards from the moments it left, for raw and for
        the factors, and the two maps are subtracted. That is exact to rounding as long as the group's lr and betas are those of
        the step and no edit, load or conversion came in between; a scheduler that has already moved lr on changes both sizes in
        proportion, and hardly their ratio. Above 16,384 weights a fixed sample of that many, spread evenly over the tensor,
        stands for all (an error of about 2 %); the other numbers are over all weights. Of a DTensor they are over this rank's part: nothing
        is sent, and one rank may call alone.

        Cost: 1.3 steps of the optimizer at 1024 x 1024, 1.9 at 1024 x 256, 2.3 at 64 x 64 (eager steps, one thread of a shared
        CPU, torch 2.13): about 2 % of the optimizer's time when called every 100 steps. Measured by
        `python examples/benchmarks/stats_cost.py`.

        Returns:
            {"name/what": number}, in the order of the parameters. What cannot be measured is left out: steps before the first
            one and where a tenth of the weights is 0, slope_negative where no weight is negative, tail_kurtosis where all are
            equal, tail_max_over_initial_rms where they started at 0, everything for a frozen or empty parameter.
            NaN means that weights are not finite.

        Raises:
            ValueError: state does not exist yet and a weight is not finite or has no inverse, by name. RuntimeError: as raw().

        Example:
            >>> from seloptim import SELAdam
            >>> model = torch.nn.Linear(3, 2)
            >>> optimizer = SELAdam(model.named_parameters())
            >>> stats = optimizer.stats()
            >>> stats["weight/scale_e_mean"], "weight/step_largest_decile" in stats
            (1.0, False)
            >>> model(torch.ones(1, 3)).sum().backward()
            >>> optimizer.step()
            >>> "weight/step_largest_decile" in optimizer.stats()
            True

        Source: arXiv:2607.09967, whose motivation is the heavy tail of trained weights and the relative size of their steps.
        """
        self._check_options()
        found: list[tuple[str, dict[str, Tensor]]] = []
        for group, i, p, name in self._members():
            part = _shards.local(p)
            if p.is_meta or not part.numel() or not (p.requires_grad or self._has_raw(p)):
                continue
            self._refuse_alone(group, i, p, name)
            if self._is_curved(group, i, p, name):
                if not self._has_raw(p):
                    self._create(group, i, p, name)
                rms, last = self.state[p].get("initial_rms", 0.0), self._last_step(group, p)
                found.append((name, _stats.measure(part, self._views(p, group), self._curve(p, group), rms, last)))
        return _stats.gather(found)

    def _last_step(self, group: dict[str, Any], p: Tensor) -> _stats.LastStep | None:
        """What the last step of p was made with; None where there was none, or where its update cannot be run backwards."""
        return None

    def _bytes(self, group: dict[str, Any], p: Tensor, curved: bool) -> str:
        """The state that p has, or will have once it is made."""
        if state := self.state.get(p):
            parts = [_shards.local(v) for v in state.values() if isinstance(v, Tensor)]
            return str(sum(v.numel() * v.element_size() for v in parts))
        if not p.requires_grad:
            return "0"
        plain = None if curved else self._plain_bytes(group, p)
        return "-" if plain is None else str(plain)

    def _plain_bytes(self, group: dict[str, Any], p: Tensor) -> int | None:
        """What the state of a parameter that is not curved will have; None where that is not known before it is made."""
        return None

    def _why(self, group: dict[str, Any], i: int, p: Tensor, curved: bool) -> str:
        if curved:
            return "frozen" if not p.requires_grad else "on meta"
        if not p.is_floating_point():
            return f"no: {p.dtype}".replace("torch.", "")
        choice = _own(group, "curved", i)
        if choice == "matrices":
            return f"no: rms > {LARGEST_CURVED_RMS}" if p.dim() >= 2 else f"no: {p.dim()}-D"
        return "no: group" if choice in ("none", False) else "no: plain state"

    def _slope(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """d weight / d raw, elementwise, in p's shape."""
        return _rule.slope(self._views(p, group), self._curve(p, group)).view(p.shape)


def _part(p: Tensor) -> Tensor:
    """What this rank has of p; p itself where it is whole."""
    return _shards.local(p) if _shards.is_sharded(p) else p


def _versions(p: Tensor, part: Tensor) -> tuple[int, int]:
    return p._version, 0 if part is p else part._version


def differing(weight: Tensor, mapped: Tensor) -> Tensor:
    """Where a weight is another than the map gives, beyond what another path's rounding explains (sel.md, section 7)."""
    slack = ULPS * torch.finfo(mapped.dtype).eps * mapped.abs()
    if weight.dtype == mapped.dtype:
        near = (weight - mapped).abs() <= slack
    else:
        near = (weight >= (mapped - slack).to(weight.dtype)) & (weight <= (mapped + slack).to(weight.dtype))
    # Weights that diverged were not edited: what is not finite on both sides agrees too.
    same = (weight == mapped.to(weight.dtype)) | (weight.isnan() & mapped.isnan())
    return ~(same | (near & mapped.isfinite()))


def _own(group: dict[str, Any], option: str, i: int) -> Any:
    """An option's value for one parameter: curved and beta may hold one a parameter."""
    return group[option][i] if isinstance(group[option], list) else group[option]


def fixed_options(group: dict[str, Any], i: int) -> dict[str, Any]:
    """The options of one parameter that its state is made under."""
    return {option: copy.copy(_own(group, option, i)) for option in FIXED}


def _layout(p: Tensor) -> tuple[Any, ...]:
    return p.storage_offset(), p.stride()


def _same_storage(seen: _Seen, p: Tensor) -> bool:
    return seen.storage.cdata == p.untyped_storage()._cdata and seen.layout == _layout(p)
