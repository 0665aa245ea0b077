"""What SELAdam and Curved share as optimizers: groups and their checks, the order of a step, saving and loading."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from . import _execute, _rule, _shards
from ._options import EXECUTION, SEL_DEFAULTS, check_group, device_scale_rates, near_names, scale_rates
from ._shadow import FIXED, Method, Ready, Shadow, differing, fixed_options, unrecorded
from .convert import as_step, check_layout
from .init import shrink

NUMBERS = ("beta", "mean_slope", "initial_rms")  # in a state

FORMAT = 1  # of the saved state; stored in every group as "sel_format"


def _not_traced(method: Method) -> Method:
    """torch.compiler.disable, whose own type loses the method's."""
    return cast(Method, torch.compiler.disable(method))


class SELOptimizer(Shadow, torch.optim.Optimizer):
    """Groups, steps and saved states of an optimizer of raw weights; a subclass moves them."""

    _shapes: set[tuple[int, ...]]  # of every parameter that was ever added
    _constructing = False  # True while torch's constructor adds the groups: weights wait until all have been checked

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        if isinstance(defaults["curved"], bool):
            raise ValueError(
                f'curved={defaults["curved"]!r} stands in a group; the constructor takes "matrices", "all", "none" or a callable'
            )
        defaults = {**defaults, "sel_format": FORMAT}
        check_group({**defaults, "params": []})
        self._seen, self._made = {}, {}
        self._warned = set()
        self._shapes = set()
        self._constructing = True
        super().__init__(params, defaults)
        del self._constructing
        self._shrink(self.param_groups)

    # What a subclass adds: how it steps curved and plain parameters, and what a saved state of its kind looks like.

    def _step_curved(self, group: dict[str, Any], params: list[Tensor]) -> None:
        raise NotImplementedError

    def _step_plain(self, group: dict[str, Any], params: list[Tensor]) -> None:
        raise NotImplementedError

    def _settle_plain(self, group: dict[str, Any], p: Tensor) -> None:
        raise NotImplementedError

    def _refuse_step(self, group: dict[str, Any], p: Tensor, name: str) -> None:
        """What can be wrong with the options of a group that was changed since it was added."""

    def _only_creates(self, members: list[tuple[dict[str, Any], int, Tensor, str]]) -> bool:
        raise NotImplementedError

    def _check_saved_group(self, group: dict[str, Any]) -> None:
        """What can be wrong with the subclass's own options."""

    def _saved_fault(self, state: dict[str, Any], p: Tensor, batch_dims: int) -> str | None:
        raise NotImplementedError

    def _reinstall_plain(self, p: Tensor, saved: dict[str, Any], ours: bool) -> None:
        raise NotImplementedError

    def _counter_device(self, group: Mapping[str, Any], p: Tensor) -> torch.device:
        """Where p's count of steps lives. On another device than the host it is never read in a step."""
        return torch.device("cpu")

    def _items(self, group: dict[str, Any], params: list[Tensor]) -> list[_execute.Item]:
        """What the stages need of each curved parameter, as it is before the step."""
        counts = self._counts(group, params)
        items = []
        for p, (step, rates) in zip(params, counts, strict=True):
            assert p.grad is not None
            seen = self._seen[p]
            if seen.ready is not None:
                was = seen.ready.item
                own = was.sums, was.batch_dims, was.call, was.counter
                items.append(_execute.Item(p, p.grad, was.state, was.curve, step, was.slope, rates, *own))
                continue
            state = self.state[p]
            slope = self._lr_slope(group, state)
            slots, curve = self._slots(p, group), self._curve(p, group)
            seen.has_n = curve.has_n
            # The parameter itself where it is whole: what a CUDA graph reads again lives as long as it does.
            sharded = _shards.is_sharded(p)
            part, grad = (_shards.local(p), _shards.local_grad(p)) if sharded else (p, p.grad)
            sums = _shards.sums(p, state)
            item = _execute.Item(part, grad, slots, curve, step, slope, rates, sums, group["batch_dims"])
            item = item._replace(call=_execute.native_call(item), counter=state["step"])
            items.append(item)
            if not sharded and not group.get("capturable"):
                seen.ready = Ready(tuple(state.values()), item._replace(grad=p))
        self._moving = params
        return items

    def _counts(
        self, group: dict[str, Any], params: list[Tensor]
    ) -> list[tuple[float, Sequence[float]]] | list[tuple[Tensor, Tensor]]:
        """(count of steps with this one, multiples of lr for the scales) of each parameter."""
        rates: dict[float, list[float]] = {}
        found: dict[Tensor, Any] = {}
        counted: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for p in params:
            state = self.state[p]
            if self._counts_there(group, p):
                counted.setdefault((p.device, state["raw"].dtype), []).append(p)
                continue
            done = float(state["step"])
            if done not in rates:
                rates[done] = scale_rates(group, done)
            found[p] = done + 1, rates[done]
        for (_, dtype), members in counted.items():
            done = torch.stack([self.state[p]["step"] for p in members]).double()
            for p, step, rate in zip(members, done + 1, device_scale_rates(group, done).to(dtype), strict=True):
                found[p] = step, rate
        return [found[p] for p in params]

    def _counts_there(self, group: Mapping[str, Any], p: Tensor) -> bool:
        """Whether p's count of steps lives on its device."""
        return p.device.type != "cpu" and self._counter_device(group, p).type != "cpu"

    # ------------------------------------------------------------------------------------------------------------ groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch.optim.Optimizer.add_param_group; callables among its options are resolved here.

        Raises:
            ValueError, TypeError: as the constructor; nothing is added then.

        Example:
            >>> from seloptim import SELAdam
            >>> a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
            >>> optimizer = SELAdam(a.parameters())
            >>> optimizer.add_param_group({"params": b.parameters(), "curved": False, "lr": 1e-2})
        """
        if isinstance(param_group, dict):
            for key in sorted(param_group.keys() - self.defaults.keys() - {"params", "param_names"}):
                # Keys that mean nothing to us are allowed, as in torch: a user's own and schedulers'.
                if hint := near_names(key, self.defaults, cutoff=0.8):
                    raise ValueError(f"a parameter group has no option {key}={param_group[key]!r}{hint}")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            members = [(i, p, name) for g, i, p, name in self._members() if g is group]
            for _, p, name in members:
                _refuse_flattened(p, name)
            check_group(group)
            self._resolve_callables(group, members)
            self._refuse(group, [(p, name) for i, p, name in members if self._choice(group, i, p)])
            if not self._constructing:
                self._shrink([group])
            self._shapes.update(tuple(p.shape) for _, p, _ in members)
        except BaseException:
            self.param_groups.pop()
            raise

    def _refuse_flat_groups(self) -> None:
        """A wrapper may put one flat part of a group's parameters in the place of them all (DeepSpeed's ZeRO does).

        A vector that was popped, moved to another group or exchanged for its like has a shape that was added.
        """
        for group, _, p, name in self._members():
            curved = group["curved"]
            plain = not any(curved) if isinstance(curved, list) else curved in ("none", False)
            if p.dim() != 1 or plain or tuple(p.shape) in self._shapes:
                continue
            here = {tuple(q.shape) for _, _, q, _ in self._members()}
            if gone := [shape for shape in self._shapes - here if len(shape) > 1]:
                raise ValueError(
                    f"parameter {name} is a flat vector of {p.numel()} elements that was not added, and matrices that were are gone (of "
                    f"shape {gone[0]}), as DeepSpeed's ZeRO leaves a group: without rows and columns there are no scales; use "
                    "torch.distributed.fsdp.fully_shard or DistributedDataParallel, or curved='none' in its group for plain Adam"
                )

    @unrecorded
    def _shrink(self, groups: list[dict[str, Any]]) -> None:
        """The mismatched initialisation. What depends on the weights is decided before it, since it changes them."""
        groups = [group for group in groups if group["init"] == "mismatched"]
        shrunk: list[tuple[Tensor, Tensor]] = []
        decided: list[tuple[list[bool], list[float | str]]] = [([], []) for _ in groups]
        for group, (curved, betas) in zip(groups, decided, strict=True):
            for i, p, name in [(i, p, name) for g, i, p, name in self._members() if g is group]:
                curved.append(self._is_curved(group, i, p, name))
                betas.append(group["beta"][i] if isinstance(group["beta"], list) else group["beta"])
                if not curved[-1] or not p.requires_grad:
                    continue  # a frozen weight is somebody's trained one
                if p.is_meta:
                    raise ValueError(
                        f"init='mismatched' needs the weights of parameter {name}, which is on the meta device; "
                        "materialise it before, or use init='preserve'"
                    )
                betas[-1] = beta = self._resolve_beta(group, i, p, name)
                part, start = _shards.local(p), self._scale_init(group, beta).values()
                weight = self._on_every_rank(p, name, partial(shrink, part, *start, beta=beta))
                shrunk.append((part, weight))
        # Everything that can fail comes before the first write.
        for part, weight in shrunk:
            part.copy_(weight)
        for group, (curved, betas) in zip(groups, decided, strict=True):
            group["curved"], group["beta"] = curved, betas

    # Versions, storages and the native kernel are no graph: traced, edits are seen where there are none. A compiled caller calls it.
    @_not_traced
    @unrecorded
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One optimization step.

        Args:
            closure: reevaluates the model and returns the loss; called once, with gradients enabled, before any is read.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: sparse gradients. ValueError: a parameter whose weights are not finite or have no inverse, by name.
            No parameter has moved then.

        Example:
            >>> from seloptim import SELAdam
            >>> p = torch.nn.Parameter(torch.full((2, 2), 0.1))
            >>> p.grad = torch.ones(2, 2)
            >>> SELAdam([p], lr=1e-3).step()
            >>> bool((p < 0.1).all())
            True
        """
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        # On the host what is found must be read here; the kernels of a device look at it themselves.
        if (
            found_inf is not None
            and not all(self._counts_there(g, p) for g, _, p, _ in self._members())
            and bool(found_inf)
        ):
            return loss
        curved: list[tuple[dict[str, Any], list[Tensor]]] = []
        plain: list[tuple[dict[str, Any], list[Tensor]]] = []
        # Everything that can fail comes before the first write.
        with_grad = [member for member in self._members() if member[2].grad is not None]
        for _, _, p, name in with_grad:
            if p.grad.is_sparse:  # type: ignore[union-attr]
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients (parameter {name}), please consider SparseAdam instead"
                )
        ready = [self._is_ready(group, p) for group, _, p, _ in with_grad]
        for (_, _, p, name), is_ready in zip(with_grad, ready, strict=True):
            if not is_ready:
                _refuse_flattened(p, name)
        if not all(ready):
            self._refuse_flat_groups()
        if self._check_options():
            ready = [False] * len(with_grad)
        others = [member for member, is_ready in zip(with_grad, ready, strict=True) if not is_ready]
        for group, _, p, name in others:
            self._refuse_step(group, p, name)
        if others:
            self._agree_on_edits((group, p) for group, _, p, _ in others)
        known = len(self.state)
        for (group, i, p, name), is_ready in zip(with_grad, ready, strict=True):
            kind = plain
            if is_ready:
                kind = curved
            elif self._is_curved(group, i, p, name):
                kind = curved
                self._settle(group, i, p, name)
            else:
                self._settle_plain(group, p)
            if not kind or kind[-1][0] is not group:
                kind.append((group, []))
            kind[-1][1].append(p)
        if len(self.state) > known:
            self._forget_replaced()
        if self._only_creates(with_grad):
            return loss
        for group, params in curved:
            self._step_curved(group, params)
        for group, params in plain:
            self._step_plain(group, params)
        return loss

    @unrecorded
    def state_dict(self) -> dict[str, Any]:
        """The state, as torch.optim.Optimizer.state_dict: tensors and plain numbers, under the names of docs/math.md.

        State that does not exist yet is created, for every parameter that requires grad and has values, and edits that can be
        seen (`check_edits`) are taken into it: what is saved is the model as it is. A parameter without a gradient
        of which that cannot be (its weights are not finite, or have no inverse) is saved with the state that it has, if any, and
        the log names it.

        Raises:
            ValueError: the same of a parameter with a gradient, by name; options that changed in a group, as step().

        Example:
            >>> from seloptim import SELAdam
            >>> optimizer = SELAdam(torch.nn.Linear(2, 2).parameters())
            >>> sorted(optimizer.state_dict()["state"][0])[:4]
            ['beta', 'exp_avg', 'exp_avg_sq', 'initial_rms']
        """
        self._check_options()
        self._agree_on_edits((group, p) for group, _, p, _ in self._members())
        known = len(self.state)
        for group, i, p, name in self._members():
            if p.is_meta or not (p.requires_grad or self._has_raw(p)):
                continue
            try:
                if self._is_curved(group, i, p, name):
                    self._settle(group, i, p, name)
                else:
                    self._settle_plain(group, p)
            except ValueError as error:
                if p.grad is not None:
                    raise
                # No step asks for it, and what all others have learned must not be lost with it.
                self._log_once(f"{error}; it is saved {'as it was before' if self.state.get(p) else 'without a state'}")
        if len(self.state) > known:
            self._forget_replaced()
        here = {p for _, _, p, _ in self._members()}
        # torch's own would end in a KeyError at what no group holds. It may come back.
        aside = {p: self.state.pop(p) for p in list(self.state) if isinstance(p, Tensor) and p not in here}
        try:
            return super().state_dict()
        finally:
            self.state.update(aside)

    def _forget_replaced(self) -> None:
        """Drop the state of tensors that no group holds any more, as others begin: trainers exchange parameters when they shard or
        move a model. A group that was only taken out comes back to its state."""
        here = {p for _, _, p, _ in self._members()}
        trained = 0
        for p in [p for p in self.state if isinstance(p, Tensor) and p not in here]:
            trained += float(self.state.pop(p).get("step", 0)) > 0
            self._seen.pop(p, None)
            self._made.pop(p, None)
        if trained:
            warnings.warn(
                f"{trained} parameters that had been trained were replaced in the groups by other tensors; the new ones start with "
                "fresh state. Save state_dict() before the exchange and load it after, to go on",
                stacklevel=3,
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned, bit for bit, whatever the parameters' dtype.

        The raw weights are authoritative: a parameter that differs from their map is set to it, with a warning. Change
        weights after loading the optimizer, not before. As in torch the saved groups' options replace the live ones; the
        log says where a state was made under others than the optimizer was built with.

        Raises:
            ValueError: groups, shapes or keys that do not fit; nothing has changed then.

        Example:
            >>> from seloptim import SELAdam
            >>> model = torch.nn.Linear(2, 2)
            >>> optimizer, other = SELAdam(model.parameters()), SELAdam(model.parameters())
            >>> other.load_state_dict(optimizer.state_dict())
        """
        if not isinstance(state_dict, Mapping):
            check_layout(state_dict)
        # Runs behind the user's pre-hooks, whose result is what must be loaded.
        handle = self.register_load_state_dict_pre_hook(_keep_incoming)
        built = [{option: group[option] for option in FIXED if option != "init"} for group in self.param_groups]
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self.__dict__.pop("_incoming", None)
        for mine, group in zip(built, self.param_groups, strict=True):
            for option, was in mine.items():
                # Lists hold what callables and the mismatched initialisation made of the weights of then.
                if was != group[option] and not isinstance(was, list) and not isinstance(group[option], list):
                    self._log_once(
                        f"the loaded state goes on with the {option}={group[option]!r} that it was made under; this optimizer was built "
                        f"with {option}={was!r}"
                    )

    def __getstate__(self) -> dict[str, Any]:
        # torch leaves the hooks out. All of __dict__ would be too much: schedulers put a patched step there.
        hooks = {key: value for key, value in self.__dict__.items() if key.endswith("_hooks")}
        ours = {"_warned": self._warned, "_shapes": self._shapes, "_made": self._made}
        return {**super().__getstate__(), **hooks, **ours}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Both halves of torch's design meet here: a loaded state_dict, and an unpickled or copied optimizer."""
        incoming = self.__dict__.pop("_incoming", None)
        if incoming is None:
            super().__setstate__(state)
            self._seen = {}
            for hooks in (value for key, value in self.__dict__.items() if key.endswith("_hooks")):
                # Ids are counted in the process: the next hook must not replace an unpickled one.
                RemovableHandle.next_id = max(RemovableHandle.next_id, *(key + 1 for key in hooks), 0)
            for group in self.param_groups:
                group.update({**SEL_DEFAULTS, **self.defaults, **group})
            return
        held = self.state, self.param_groups, self._seen, self._made
        super().__setstate__(state)
        self._seen, self._made = {}, {}
        try:
            for live, group in zip(held[1], self.param_groups, strict=True):
                group.update(_merged(live, group))
            unrecorded(self._reinstall)(incoming)
        except BaseException:
            self.state, self.param_groups, self._seen, self._made = held
            raise
        # In place: a wrapper that holds a copy of our __dict__ must not go on with what was there before.
        loaded = self.state, self.param_groups, self._seen, self._made
        self.state, self.param_groups, self._seen, self._made = held
        self.param_groups[:] = loaded[1]
        for mine, new in zip((self.state, self._seen, self._made), (loaded[0], *loaded[2:]), strict=True):
            mine.clear()
            mine.update(new)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def _check_incoming(self, state_dict: dict[str, Any]) -> None:
        """Everything that can be wrong with a saved state, before anything changes."""
        check_layout(state_dict)
        groups = state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            return  # torch's own error says so
        _check_names(self.param_groups, groups)
        members = self._members()
        for number, (live, saved) in enumerate(zip(self.param_groups, groups, strict=True)):
            version = saved.get("sel_format", FORMAT)
            if not isinstance(version, int) or version > FORMAT:
                raise ValueError(
                    f"the state has format {version}, this seloptim reads up to {FORMAT}; upgrade seloptim to load it"
                )
            merged = _merged(live, saved)
            check_group(merged)
            self._check_saved_group(merged)
            candidates = []
            for saved_id in saved["params"]:
                _, i, p, name = next(members)
                state = state_dict["state"].get(saved_id)
                if self._choice(merged, i, p):
                    candidates.append((p, name))
                if not state:
                    continue
                if any(map(_shards.is_sharded, state.values())) and not _shards.is_sharded(p):
                    raise ValueError(
                        f"the saved state of parameter {name} is cut over ranks and the parameter is not; save it with "
                        "get_optimizer_state_dict(..., options=StateDictOptions(full_state_dict=True)) or torch.distributed.checkpoint"
                    )
                if "raw" in state:
                    self._refuse_shards(merged, p, name)
                reason = self._saved_fault(state, p, merged["batch_dims"])
                if reason:
                    raise ValueError(
                        f"parameter {name} has shape {tuple(p.shape)}, but {reason}: "
                        "the state belongs to another model, another order of parameters or another optimizer"
                    )
            try:
                self._refuse(merged, candidates)
            except (ValueError, RuntimeError, ImportError) as error:
                raise type(error)(f"{error} (in the saved group {number}: change it there before loading)") from error

    def _reinstall(self, incoming: dict[str, Any]) -> None:
        """Copies of the saved tensors in their own dtype (torch casts them to the parameter's), and p onto the map of raw."""
        saved_ids = [(k, "sel_format" in group) for group in incoming["param_groups"] for k in group["params"]]
        moved: list[tuple[str, float]] = []
        for (saved_id, ours), (group, i, p, name) in zip(saved_ids, self._members(), strict=True):
            saved = incoming["state"].get(saved_id)
            if not saved:
                continue
            if "raw" not in saved:
                self._reinstall_plain(p, saved, ours)
                continue
            state, dtype = self.state[p], _rule.state_dtype(p.dtype)
            for key, value in saved.items():
                if key in NUMBERS:
                    # A checkpoint that holds tensors alone made one of it, and torch cast that.
                    state[key] = float(value)
                elif isinstance(value, Tensor) and key != "step":
                    placed = _shards.placed(p, key, value.detach(), group["batch_dims"], group["structure"])
                    state[key] = placed.to(p.device, dtype, copy=True, memory_format=torch.contiguous_format)
            state["step"] = as_step(saved["step"]).to(self._counter_device(group, p))
            self._made[p] = fixed_options(group, i)
            change = self._restore(group, p)
            if change > 0:
                moved.append((name, change))
        if moved:
            names = ", ".join(name for name, _ in moved[:5]) + (f" and {len(moved) - 5} more" if len(moved) > 5 else "")
            warnings.warn(
                f"the loaded raw weights are authoritative: {names} differed from their map and were set to it, by at most "
                f"{max(change for _, change in moved):.3g}; change weights after loading the optimizer, not before",
                stacklevel=4,
            )

    def _restore(self, group: dict[str, Any], p: Tensor) -> float:
        """p <- map(raw), whole, where the two differ anywhere; the largest change."""
        if p.is_meta:
            return 0.0
        curve = self._curve(p, group)
        part = _shards.local(p)
        mapped = _rule.push(self._views(p, group), curve).view(part.shape)
        differs = differing(part, mapped)
        change = 0.0
        if bool(differs.any()):
            change = float((part[differs].double() - mapped[differs].double()).abs().nan_to_num(math.inf).max())
            part.copy_(mapped)
        self._remember(p, group, curve.has_n)
        return change


def _refuse_flattened(p: Tensor, name: str) -> None:
    # Not isinstance(p, FlatParameter): under use_orig_params the parts are ordinary parameters with this mark.
    if getattr(p, "_fsdp_flattened", False):
        raise ValueError(
            f"parameter {name} was flattened by FullyShardedDataParallel, which leaves it no rows and columns; use "
            "torch.distributed.fsdp.fully_shard (FSDP2) or DistributedDataParallel"
        )


def _check_names(live: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Loading is by position: a name that stands at another one would get another parameter's state."""
    here, there = _names(live), _names(saved)
    if here is None or there is None:
        return
    for at, (mine, theirs) in enumerate(zip(here, there, strict=True)):
        if mine != theirs and (mine in there or theirs in here):
            raise ValueError(
                f"the saved names stand in another order: position {at} is {mine!r} here and {theirs!r} in the state; loading is "
                "by position, build the optimizer with the parameters in the saved order"
            )


def _names(groups: list[dict[str, Any]]) -> list[str] | None:
    """The parameters' names without what wrappers put in front; None where not all are named."""
    names: list[str] = []
    for group in groups:
        # torch.distributed.checkpoint sorts `params`, which are names then, and not `param_names`.
        given = group["params"] if all(isinstance(p, str) for p in group["params"]) else group.get("param_names")
        if given is None or len(given) != len(group["params"]):
            return None
        names += (".".join(part for part in name.split(".") if part not in ("module", "_orig_mod")) for name in given)
    return names


def _merged(live: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved group's options over the live group's. What belongs to the live optimizer stays: parameters, their names,
    and, where another optimizer saved the group, how steps are executed."""
    own = {"params", "param_names"} | (set() if "sel_format" in saved else set(EXECUTION))
    kept = {key: value for key, value in live.items() if key in own or key not in saved}
    return {**saved, **kept, "sel_format": FORMAT}


def _keep_incoming(optimizer: Any, state_dict: dict[str, Any]) -> None:
    optimizer._check_incoming(state_dict)
    optimizer._incoming = state_dict
