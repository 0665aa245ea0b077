"""What SELAdam and Curved share as optimizers: groups and their checks, the order of a step, saving and loading."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import _execute, _rule
from ._options import SEL_DEFAULTS, check_beta, check_group, near_names, scale_rates
from ._shadow import Shadow, differing
from .init import shrink

FORMAT = 1  # of the saved state; stored in every group as "sel_format"


class SELOptimizer(Shadow, torch.optim.Optimizer):
    """Groups, steps and saved states of an optimizer of raw weights; a subclass moves them."""

    _constructing = False  # True while torch's constructor adds the groups: weights wait until all have been checked

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        if isinstance(defaults["curved"], bool):
            raise ValueError(
                f'curved={defaults["curved"]!r} stands in a group; the constructor takes "matrices", "all", "none" or a callable'
            )
        defaults = {**defaults, "sel_format": FORMAT}
        check_group({**defaults, "params": []})
        self._seen = {}
        self._warned = set()
        self._constructing = True
        super().__init__(params, defaults)
        del self._constructing
        self._shrink(self.param_groups)

    # What a subclass adds to the shared step: its rule for curved and for plain parameters.

    def _step_curved(self, group: dict[str, Any], params: list[Tensor]) -> None:
        raise NotImplementedError

    def _step_plain(self, group: dict[str, Any], params: list[Tensor]) -> None:
        raise NotImplementedError

    def _items(self, group: dict[str, Any], params: list[Tensor]) -> list[_execute.Item]:
        """What the stages need of each curved parameter, as it is before the step."""
        rates: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}
        items = []
        for p in params:
            state = self.state[p]
            done = float(state["step"])
            key = (done, state["raw"].dtype, p.device)
            if key not in rates:
                rates[key] = torch.tensor(scale_rates(group, done), dtype=state["raw"].dtype, device=p.device)
            assert p.grad is not None
            slope = state["mean_slope"] if group["lr_space"] == "weight" else 1.0
            view, curve = self._views(p, group), self._curve(p, group)
            items.append(_execute.Item(p, p.grad, view, curve, done + 1, slope, rates[key]))
        return items

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
            check_group(group)
            if callable(group["curved"]):
                group["curved"] = [bool(group["curved"](name, p)) for _, p, name in members]
            if callable(group["beta"]):
                # Not asked about parameters that stay plain: it may count on a matrix.
                group["beta"] = [
                    check_beta(group["beta"](name, p), name) if self._choice(group, i, p) else "auto"
                    for i, p, name in members
                ]
            self._refuse(group, [(p, name) for i, p, name in members if self._choice(group, i, p)])
            if not self._constructing:
                self._shrink([group])
        except BaseException:
            self.param_groups.pop()
            raise

    def _refuse(self, group: dict[str, Any], candidates: list[tuple[Tensor, str]]) -> None:
        """Options that a curved parameter cannot honour; `candidates` are those that may become one."""
        if group["differentiable"]:
            raise ValueError(
                f"differentiable=True is not supported by {type(self).__name__}; "
                "seloptim.transform differentiates through steps, with torchopt"
            )
        for p, name in candidates:
            if group["fused"]:
                raise ValueError(
                    f"fused=True is not available for curved parameters ({name}); leave fused=None, or use foreach=True to batch"
                )
            if group["capturable"]:
                raise ValueError(
                    f"capturable=True is not available for curved parameters ({name}); leave capturable=False"
                )
            if p.dim() < group["batch_dims"]:
                raise ValueError(
                    f"batch_dims={group['batch_dims']} is more than the {p.dim()} dimensions of parameter {name}; "
                    "put it into a group with fewer batch_dims"
                )

    @torch.no_grad()
    def _shrink(self, groups: list[dict[str, Any]]) -> None:
        """The mismatched initialisation. What depends on the weights is decided before it, since it changes them."""
        groups = [group for group in groups if group["init"] == "mismatched"]
        shrunk: list[tuple[Tensor, Tensor]] = []
        decided: list[tuple[list[bool], list[float | str]]] = [([], []) for _ in groups]
        for group, (curved, betas) in zip(groups, decided, strict=True):
            for i, p, name in [(i, p, name) for g, i, p, name in self._members() if g is group]:
                curved.append(self._is_curved(group, i, p, name))
                betas.append("auto")
                if not curved[-1]:
                    continue
                if p.is_meta:
                    raise ValueError(
                        f"init='mismatched' needs the weights of parameter {name}, which is on the meta device; "
                        "materialise it before, or use init='preserve'"
                    )
                betas[-1] = beta = self._resolve_beta(group, i, p, name)
                try:
                    shrunk.append((p, shrink(p.detach(), *self._scale_init(group, beta).values(), beta=beta)))
                except ValueError as error:
                    raise ValueError(f"parameter {name}: {error}") from error
        # Everything that can fail comes before the first write.
        for p, weight in shrunk:
            p.copy_(weight)
        for group, (curved, betas) in zip(groups, decided, strict=True):
            group["curved"], group["beta"] = curved, betas

    @torch.no_grad()
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
        curved: list[tuple[dict[str, Any], list[Tensor]]] = []
        plain: list[tuple[dict[str, Any], list[Tensor]]] = []
        # Everything that can fail comes before the first write.
        with_grad = [member for member in self._members() if member[2].grad is not None]
        for _, _, p, name in with_grad:
            if p.grad is not None and p.grad.is_sparse:
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients (parameter {name}), please consider SparseAdam instead"
                )
        for group, i, p, name in with_grad:
            kind = plain
            if self._is_curved(group, i, p, name):
                kind = curved
                if not self._has_raw(p):
                    self._create(group, i, p, name)
                else:
                    self._check_edit(group, i, p, name)
            if not kind or kind[-1][0] is not group:
                kind.append((group, []))
            kind[-1][1].append(p)
        for group, params in curved:
            self._step_curved(group, params)
        for group, params in plain:
            self._step_plain(group, params)
        return loss

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state, as torch.optim.Optimizer.state_dict: tensors and plain numbers, under the names of docs/math.md.

        State that does not exist yet is created, for every curved parameter that requires grad and has values.

        Example:
            >>> from seloptim import SELAdam
            >>> optimizer = SELAdam(torch.nn.Linear(2, 2).parameters())
            >>> sorted(optimizer.state_dict()["state"][0])[:4]
            ['beta', 'exp_avg', 'exp_avg_sq', 'mean_slope']
        """
        self._ensure_all()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned, bit for bit, whatever the parameters' dtype.

        The raw weights are authoritative: a parameter that differs from their map is set to it, with a warning. Change
        weights after loading the optimizer, not before.

        Raises:
            ValueError: groups, shapes or keys that do not fit; nothing has changed then.

        Example:
            >>> from seloptim import SELAdam
            >>> model = torch.nn.Linear(2, 2)
            >>> optimizer, other = SELAdam(model.parameters()), SELAdam(model.parameters())
            >>> other.load_state_dict(optimizer.state_dict())
        """
        # Runs behind the user's pre-hooks, whose result is what must be loaded.
        handle = self.register_load_state_dict_pre_hook(_keep_incoming)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self.__dict__.pop("_incoming", None)

    def __getstate__(self) -> dict[str, Any]:
        # torch leaves the hooks out. All of __dict__ would be too much: schedulers put a patched step there.
        hooks = {key: value for key, value in self.__dict__.items() if key.endswith("_hooks")}
        return {**super().__getstate__(), **hooks, "_warned": self._warned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        incoming = self.__dict__.pop("_incoming", None)
        groups_before = self.__dict__.get("param_groups", [])
        super().__setstate__(state)
        self.__dict__.setdefault("_warned", set())
        self._seen = {}
        for k, group in enumerate(self.param_groups):
            live = groups_before[k] if incoming is not None else {}
            for key in (*self.defaults, *SEL_DEFAULTS):
                if key not in group:
                    group[key] = live.get(key, self.defaults.get(key, SEL_DEFAULTS.get(key)))
        if incoming is not None:
            self._reinstall(incoming)

    def _check_incoming(self, state_dict: dict[str, Any]) -> None:
        """Everything that can be wrong with a saved state, before anything changes."""
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError('not an optimizer state: expected the keys "state" and "param_groups" of a state_dict()')
        live = {id(group): [] for group in self.param_groups}
        for group, _, p, name in self._members():
            live[id(group)].append((p, name))
        for k, (group, saved) in enumerate(zip(self.param_groups, state_dict["param_groups"], strict=False)):
            members = live[id(group)]
            if len(members) != len(saved["params"]):
                return  # torch's own error says so
            version = saved.get("sel_format", FORMAT)
            if version > FORMAT:
                raise ValueError(
                    f"the state has format {version}, this seloptim reads up to {FORMAT}; upgrade seloptim to load it"
                )
            if "param_names" in group and "param_names" in saved:
                have = [_bare(name) for name in group["param_names"]]
                want = [_bare(name) for name in saved["param_names"]]
                if have != want and sorted(have) == sorted(want):
                    at = next(i for i, (a, b) in enumerate(zip(have, want, strict=True)) if a != b)
                    raise ValueError(
                        f"group {k} has the saved names in another order: position {at} is {have[at]!r} here and {want[at]!r} in the "
                        "state; loading is by position, build the optimizer with the parameters in the saved order"
                    )
            for (p, name), saved_id in zip(members, saved["params"], strict=True):
                for key in ("raw", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                    value = state_dict["state"].get(saved_id, {}).get(key)
                    if isinstance(value, Tensor) and value.shape != p.shape:
                        raise ValueError(
                            f"parameter {name} has shape {tuple(p.shape)}, its saved {key} {tuple(value.shape)}: "
                            "the state belongs to another model or another order of parameters"
                        )

    @torch.no_grad()
    def _reinstall(self, incoming: dict[str, Any]) -> None:
        """Put the saved tensors back in their own dtype (torch casts them to the parameter's), and p onto the map of raw."""
        saved_ids = [(k, "sel_format" in group) for group in incoming["param_groups"] for k in group["params"]]
        moved: list[tuple[str, float]] = []
        for (saved_id, ours), (group, _, p, name) in zip(saved_ids, self._members(), strict=True):
            saved = incoming["state"].get(saved_id)
            if not saved:
                continue
            if "raw" not in saved:
                if not ours and "exp_avg" in saved:
                    self._mark_adam(saved, group, p)
                continue
            dtype = _rule.state_dtype(p.dtype)
            for key, value in saved.items():
                if isinstance(value, Tensor) and key == "step":
                    self.state[p][key] = value.detach().clone()
                elif isinstance(value, Tensor):
                    self.state[p][key] = value.detach().to(p.device, dtype, copy=True).contiguous()
            self._remember(p)
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
        """p <- map(raw) where the two differ; the largest change."""
        if p.is_meta:
            return 0.0
        mapped = _rule.push(self._views(p, group), self._curve(p, group)).view(p.shape)
        differs = differing(p, mapped)
        if not bool(differs.any()):
            return 0.0
        change = float((p[differs].double() - mapped[differs].double()).abs().nan_to_num(math.inf).max())
        p.copy_(torch.where(differs, mapped.to(p.dtype), p))
        self._remember(p)
        return change

    def _mark_adam(self, saved: dict[str, Any], group: dict[str, Any], p: Tensor) -> None:
        """Keep a state that torch.optim.Adam saved, in its own dtype, until the parameter's curved state is needed.

        Its weights may be loaded after the optimizer, so that the slopes are not known yet.
        """
        for key, value in saved.items():
            if isinstance(value, Tensor):
                self.state[p][key] = value.detach().clone() if key == "step" else value.detach().to(p.device, copy=True)
        self.state[p]["from_adam"] = 1


def _bare(name: str) -> str:
    return name.replace("module.", "").replace("_orig_mod.", "")


def _keep_incoming(optimizer: Any, state_dict: dict[str, Any]) -> None:
    optimizer._check_incoming(state_dict)
    optimizer._incoming = state_dict
