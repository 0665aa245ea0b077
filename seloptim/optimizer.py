"""SELAdam and SELAdamW: torch.optim.Adam's interface over raw weights."""

import difflib
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import Adam, adam
from torch.utils.hooks import RemovableHandle

from . import _execute, _rule
from ._rule import KINDS, Hyper
from ._shadow import DEFAULT_SCALE_LR, Shadow, differing, learned_kinds
from ._stats import LastStep
from .convert import ADAM_OPTIONS, adam_fault, as_step, check_layout, from_adam
from .init import RULES, shrink
from .schedule import scale_lr_multiplier

FORMAT = 1  # of the saved state; stored in every group as "sel_format"

SEL_DEFAULTS: dict[str, Any] = {
    "curved": "matrices",
    "combine": "mismatched",
    "init": "preserve",
    "beta": "auto",
    "lr_space": "raw",
    "structure": "row_col",
    "batch_dims": 0,
    "scale_init": None,
    "scale_lr": None,
    "anneal_steps": None,
    "residual_rank": 0,
    "check_edits": "tracked",
}
EXECUTION = {"foreach", "capturable", "differentiable", "fused"}
CHOICES = {
    "combine": ("mismatched", "congruent"),
    "init": ("preserve", "mismatched"),
    "lr_space": ("raw", "weight"),
    "structure": _rule.STRUCTURES,
    "check_edits": ("tracked", "full"),
}


class SELAdam(Shadow, torch.optim.Optimizer):
    r"""Adam in curved weight space (SymExpLin): a replacement for torch.optim.Adam that leaves the model as it is.

    Each curved parameter p is the map of a raw weight that lives in the optimizer's state:

    .. code-block:: python

        weight = sign(raw) * (e / beta) * exp(-n) * expm1(beta * m * |raw|) + (l / beta) * |raw|   # "mismatched"

    A step pulls p.grad back through the map, runs Adam on raw and on the row and column factors of the scales e, l, m, and
    writes the mapped result into p: the step of a weight grows with its size. All other parameters get torch's own Adam.

    Args:
        params: parameters, (name, parameter) pairs or groups, as for torch.optim.Adam; `seloptim.param_groups(model)` makes
            the paper's choice.
        lr, betas, eps, weight_decay, amsgrad, foreach, maximize, decoupled_weight_decay: as for torch.optim.Adam. With decay
            decoupled, raw is scaled by 1 - lr * weight_decay. foreach=True runs parameters of equal shape as one stack.
        fused: True uses the native CPU kernel, compiled at its first use (a C++ compiler is needed); None (default) uses it where
            it is already built (python -m seloptim build), else the eager path; False never. foreach=True or False with
            fused=None is the eager path.
        capturable, differentiable: refused where a parameter is curved.
        curved: "matrices" (default: real parameters with ndim >= 2), "all", "none", or a callable (name, p) -> bool; in a
            group also True or False.
        combine: "mismatched" (default, the paper's) or "congruent", whose linear path follows raw's sign.
        init: "preserve" (default) changes no weight. "mismatched" shrinks negative weights once, at construction, as the
            paper does for training from scratch.
        beta: curvature: a positive number, "auto" (default: from the tensor's rms), "width", or a callable (name, p) -> float.
        lr_space: "raw" (default: lr is the step in raw space) or "weight": lr is divided by the tensor's mean slope at the
            start, so that a typical weight moves as far as under Adam.
        structure: which factors a scale has: "row_col" (default), "row", "col", "scalar", "none" (scales frozen).
        batch_dims: leading dimensions that stack matrices, each with factors of its own (default 0).
        scale_init: None (default: e = l = m = 1, n = 0) or a mapping kind -> number, or "beta" for beta itself.
        scale_lr: learning rates of the scales as multiples of lr: None (default: e, l (8, 1.3); m (0.01, 0.5); n frozen),
            PAPER_SCALE_LR, or a mapping kind -> None | float | (start, end); a kind left out is frozen.
        anneal_steps: steps over which the multiples go from start to end; None (default): their geometric mean throughout.
        residual_rank: rank of an additive low-rank part B @ A of each curved weight (default 0).
        check_edits: how edits of p from outside are found before a step: "tracked" (default: version counter, storage,
            device) or "full" (by value).

    Raises:
        ValueError, TypeError: bad options, each with its value and what would do; as torch.optim.Adam for Adam's own.

    Example:
        >>> from seloptim import SELAdam, param_groups
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = SELAdam(param_groups(model), lr=1e-3)
        >>> model(torch.ones(3, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.raw(model.weight).shape
        torch.Size([2, 4])

    Source: arXiv:2607.09967.
    """

    _constructing = False  # True while torch's constructor adds the groups: weights wait until all have been checked

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        curved: Any = "matrices",
        combine: str = "mismatched",
        init: str = "preserve",
        beta: Any = "auto",
        lr_space: str = "raw",
        structure: str = "row_col",
        batch_dims: int = 0,
        scale_init: Mapping[str, float | str] | None = None,
        scale_lr: Mapping[str, Any] | None = None,
        anneal_steps: int | None = None,
        residual_rank: int = 0,
        check_edits: str = "tracked",
        **unknown: Any,
    ) -> None:
        for name, value in unknown.items():
            hint = _near(name, [*SEL_DEFAULTS, *ADAM_OPTIONS]) or f"; it has Adam's and {', '.join(SEL_DEFAULTS)}"
            raise TypeError(f"{type(self).__name__} has no option {name}={value!r}{hint}")
        _check_betas(betas)
        # torch's own constructor validates and normalises what is torch's own.
        adam_defaults = Adam(
            [torch.empty(0)],
            lr,
            (betas[0], betas[1]),
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        ).defaults
        sel_defaults = {
            "curved": curved,
            "combine": combine,
            "init": init,
            "beta": beta,
            "lr_space": lr_space,
            "structure": structure,
            "batch_dims": batch_dims,
            "scale_init": scale_init,
            "scale_lr": scale_lr,
            "anneal_steps": anneal_steps,
            "residual_rank": residual_rank,
            "check_edits": check_edits,
        }
        if isinstance(curved, bool):
            raise ValueError(
                f'curved={curved!r} stands in a group; the constructor takes "matrices", "all", "none" or a callable'
            )
        defaults = {**adam_defaults, **sel_defaults, "sel_format": FORMAT}
        _check_group({**defaults, "params": []})
        self._seen = {}
        self._warned = set()
        self._constructing = True
        super().__init__(params, defaults)
        del self._constructing
        self._shrink(self.param_groups)

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
                if hint := _near(key, self.defaults, cutoff=0.8):
                    raise ValueError(f"a parameter group has no option {key}={param_group[key]!r}{hint}")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            members = [(i, p, name) for g, i, p, name in self._members() if g is group]
            _check_group(group)
            if callable(group["curved"]):
                group["curved"] = [bool(group["curved"](name, p)) for _, p, name in members]
            if callable(group["beta"]):
                # Not asked about parameters that stay plain: it may count on a matrix.
                group["beta"] = [
                    _check_beta(group["beta"](name, p), name) if self._choice(group, i, p) else "auto"
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
                self._refuse_fused(group, p, name)
            if group["capturable"]:
                raise ValueError(
                    f"capturable=True is not available for curved parameters ({name}); leave capturable=False"
                )
            if p.dim() < group["batch_dims"]:
                raise ValueError(
                    f"batch_dims={group['batch_dims']} is more than the {p.dim()} dimensions of parameter {name}; "
                    "put it into a group with fewer batch_dims"
                )
        if group["fused"] and candidates:
            _execute.native_is_ready(compile=True)

    @staticmethod
    def _refuse_fused(group: dict[str, Any], p: Tensor, name: str) -> None:
        reason = _execute.native_refusal(p, group["residual_rank"] > 0)
        if reason:
            raise ValueError(
                f"fused=True has no kernel for parameter {name}: {reason}; leave fused=None, which takes the eager path where it must"
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

    # -------------------------------------------------------------------------------------------------------------- step

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
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.device.type == "cpu" and bool(found_inf):
            return loss
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
                if group["fused"]:
                    self._refuse_fused(group, p, name)
                self._settle(group, i, p, name)
            else:
                self._settle_plain(group, p)
            if not kind or kind[-1][0] is not group:
                kind.append((group, []))
            kind[-1][1].append(p)
        if self._only_creates(with_grad):
            return loss
        for group, params in curved:
            self._step_curved(group, params)
        for group, params in plain:
            self._step_plain(group, params)
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler leaves the unscaling and the skipping of a step to us: where every kernel is a fused one."""
        return all(group["fused"] for group in self.param_groups)

    def _step_curved(self, group: dict[str, Any], params: list[Tensor]) -> None:
        hyper = _hyper(group)
        rates: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}
        items = []
        for p in params:
            state = self.state[p]
            done = float(state["step"])
            key = (done, state["raw"].dtype, p.device)
            if key not in rates:
                rates[key] = torch.tensor(_rates(group, done), dtype=state["raw"].dtype, device=p.device)
            assert p.grad is not None
            slope = state["mean_slope"] if group["lr_space"] == "weight" else 1.0
            view, curve = self._views(p, group), self._curve(p, group)
            items.append(_execute.Item(p, p.grad, view, curve, done + 1, slope, rates[key]))
            # Until the step is through, only the values can tell where an interruption has left p and raw.
            self._seen[p] = self._seen[p]._replace(version=-1)
        batched = group["foreach"] if group["foreach"] is not None else params[0].device.type != "cpu"
        native = bool(group["fused"]) or (group["fused"] is None and group["foreach"] is None)
        native = native and params[0].device.type == "cpu" and _execute.native_is_ready(compile=bool(group["fused"]))
        with torch.autocast(params[0].device.type, enabled=False):
            _execute.run(items, hyper, batched=batched, native=native, grad_scale=getattr(self, "grad_scale", None))
        for p, item in zip(params, items, strict=True):
            self.state[p]["step"] += 1
            self._remember(p, item.curve.has_n)

    def _only_creates(self, members: list[tuple[dict[str, Any], int, Tensor, str]]) -> bool:
        """Whether this is a step that torch.distributed.checkpoint takes to have state created: at lr = 0, with zero gradients.

        Such a first step is not counted, since without a checkpoint it would not have been taken.
        """
        return all(
            not (isinstance(group["lr"], float) and group["lr"])
            and float(self.state[p]["step"]) == 0
            and float(group["lr"]) == 0
            for group, _, p, _ in members
        ) and not any(bool(p.grad.any()) for _, _, p, _ in members if p.grad is not None)

    def _settle_plain(self, group: dict[str, Any], p: Tensor) -> None:
        """State of a parameter that is not curved, as torch.optim.Adam makes it, where p lives now."""
        state = self.state[p]
        if state:
            state.pop("from_adam", None)
            self._follow(p)
            return
        on_device = group["capturable"] or group["fused"]
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu")
        for moment in _rule.MOMENTS if group["amsgrad"] else _rule.MOMENTS[:2]:
            state[moment] = torch.zeros_like(p, memory_format=torch.preserve_format)

    def _step_plain(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """torch.optim.Adam, by torch's own functions, for the parameters of a group that are not curved."""
        lists: list[list[Tensor]] = [[], [], [], [], [], []]
        has_complex = Adam._init_group(self, {**group, "params": params}, *lists)  # type: ignore[arg-type]
        adam(
            *lists,
            amsgrad=group["amsgrad"],
            has_complex=has_complex,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            foreach=group["foreach"],
            capturable=group["capturable"],
            differentiable=False,
            fused=group["fused"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )

    def _last_step(self, group: dict[str, Any], p: Tensor) -> LastStep | None:
        state = self.state[p]
        step = float(state["step"])
        if step == 0:
            return None
        slope = state["mean_slope"] if group["lr_space"] == "weight" else 1.0
        rates = torch.tensor(_rates(group, step - 1), dtype=state["raw"].dtype, device=p.device)
        return LastStep(_hyper(group), step, slope, rates)

    # -------------------------------------------------------------------------------------------------- saving, loading

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state, as torch.optim.Optimizer.state_dict: tensors and plain numbers, under the names of docs/math.md.

        State that does not exist yet is created, for every parameter that requires grad and has values, and edits that can be
        seen (`check_edits`) are taken into it: what is saved is the model as it is.

        Example:
            >>> from seloptim import SELAdam
            >>> optimizer = SELAdam(torch.nn.Linear(2, 2).parameters())
            >>> sorted(optimizer.state_dict()["state"][0])[:4]
            ['beta', 'exp_avg', 'exp_avg_sq', 'initial_rms']
        """
        for group, i, p, name in self._members():
            if p.is_meta or not (p.requires_grad or self._has_raw(p)):
                continue
            if self._is_curved(group, i, p, name):
                self._settle(group, i, p, name)
            else:
                self._settle_plain(group, p)
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
        if not isinstance(state_dict, Mapping):
            check_layout(state_dict)
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
        before = self.state, self.param_groups, self._seen
        super().__setstate__(state)
        self._seen = {}
        try:
            for live, group in zip(before[1], self.param_groups, strict=True):
                group.update(_merged(live, group))
            self._reinstall(incoming)
        except BaseException:
            self.state, self.param_groups, self._seen = before
            raise

    def _check_incoming(self, state_dict: dict[str, Any]) -> None:
        """Everything that can be wrong with a saved state, before anything changes."""
        check_layout(state_dict)
        groups = state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            return  # torch's own error says so
        _check_names(self.param_groups, groups)
        members = self._members()
        for live, saved in zip(self.param_groups, groups, strict=True):
            version = saved.get("sel_format", FORMAT)
            if not isinstance(version, int) or version > FORMAT:
                raise ValueError(
                    f"the state has format {version}, this seloptim reads up to {FORMAT}; upgrade seloptim to load it"
                )
            merged = _merged(live, saved)
            _check_group(merged)
            _check_adam_options(merged)
            for saved_id in saved["params"]:
                _, _, p, name = next(members)
                state = state_dict["state"].get(saved_id)
                if not state:
                    continue
                curved = "raw" in state
                reason = (
                    _rule.state_fault(state, p.shape, merged["batch_dims"]) if curved else adam_fault(state, p.shape)
                )
                if reason:
                    raise ValueError(
                        f"parameter {name} has shape {tuple(p.shape)}, but {reason}: "
                        "the state belongs to another model, another order of parameters or another optimizer"
                    )

    @torch.no_grad()
    def _reinstall(self, incoming: dict[str, Any]) -> None:
        """Copies of the saved tensors in their own dtype (torch casts them to the parameter's), and p onto the map of raw."""
        saved_ids = [(k, "sel_format" in group) for group in incoming["param_groups"] for k in group["params"]]
        moved: list[tuple[str, float]] = []
        for (saved_id, ours), (group, _, p, name) in zip(saved_ids, self._members(), strict=True):
            saved = incoming["state"].get(saved_id)
            if not saved:
                continue
            state = self.state[p]
            for key, value in saved.items():
                if isinstance(value, Tensor) and key != "step":
                    dtype = _rule.state_dtype(p.dtype) if "raw" in saved else value.dtype
                    state[key] = value.detach().to(p.device, dtype, copy=True)
            if "raw" not in saved:
                # torch has put the step where capturable and fused want it.
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).detach().clone()
                if not ours:
                    state["from_adam"] = 1  # slopes are known when the weights are: they may be loaded later
                continue
            state["step"] = as_step(saved["step"])
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
        mapped = _rule.push(self._views(p, group), curve).view(p.shape)
        differs = differing(p, mapped)
        change = 0.0
        if bool(differs.any()):
            change = float((p[differs].double() - mapped[differs].double()).abs().nan_to_num(math.inf).max())
            p.copy_(mapped)
        self._remember(p, curve.has_n)
        return change

    def _create(self, group: dict[str, Any], i: int, p: Tensor, name: str) -> None:
        adam_state = self.state.get(p)
        super()._create(group, i, p, name)
        if adam_state and "from_adam" in adam_state:
            from_adam(adam_state, self.state[p], self._slope(p, group))


class SELAdamW(SELAdam):
    """SELAdam with torch.optim.AdamW's defaults: decay 1e-2, decoupled.

    Args:
        params, lr, betas, eps, weight_decay (default 1e-2), amsgrad, maximize, foreach, capturable, differentiable, fused: as
            for torch.optim.AdamW.
        **options: SELAdam's options.

    Raises: as SELAdam.

    Example:
        >>> from seloptim import SELAdamW
        >>> SELAdamW(torch.nn.Linear(2, 2).parameters()).defaults["weight_decay"]
        0.01

    Source: arXiv:2607.09967; decay acts on raw weights.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Any,
    ) -> None:
        options.setdefault("decoupled_weight_decay", True)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            **options,
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
    own = {"params", "param_names"} | (set() if "sel_format" in saved else EXECUTION)
    kept = {key: value for key, value in live.items() if key in own or key not in saved}
    return {**saved, **kept, "sel_format": FORMAT}


def _keep_incoming(optimizer: Any, state_dict: dict[str, Any]) -> None:
    optimizer._check_incoming(state_dict)
    optimizer._incoming = state_dict


def _hyper(group: dict[str, Any]) -> Hyper:
    beta1, beta2 = (float(b) for b in group["betas"])
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.dim():
        lr = lr.reshape(())
    return Hyper(
        lr,
        beta1,
        beta2,
        group["eps"],
        group["weight_decay"],
        group["decoupled_weight_decay"],
        group["amsgrad"],
        group["maximize"],
    )


def _rates(group: dict[str, Any], done: float) -> list[float]:
    """Multiples of lr for each kind of scale after `done` steps, 0 where frozen."""
    given = DEFAULT_SCALE_LR if group["scale_lr"] is None else group["scale_lr"]
    learned = learned_kinds(group)
    rates = []
    for kind in KINDS:
        if kind not in learned:
            rates.append(0.0)
            continue
        pair = given[kind]
        start, end = pair if isinstance(pair, (tuple, list)) else (pair, pair)
        rates.append(float(scale_lr_multiplier(start, end, group["anneal_steps"], done)))
    return rates


# ------------------------------------------------------------------------------------------------------------- validation


def _near(name: str, options: Iterable[str], cutoff: float = 0.6) -> str:
    near = difflib.get_close_matches(name, options, 3, cutoff)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _check_betas(betas: Any) -> None:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(
            f"betas is Adam's pair of decay rates, got {betas!r}; did you mean beta={betas!r}, the curvature?"
        )


def _check_group(group: dict[str, Any]) -> None:
    """Every SEL option of a group; all become plain values, so that torch.load(weights_only=True) reads a saved group."""
    _check_betas(group["betas"])
    for name, allowed in CHOICES.items():
        if group[name] not in allowed:
            raise ValueError(f"Invalid {name}: {group[name]!r}; use one of {', '.join(map(repr, allowed))}")
    curved = group["curved"]
    if not (callable(curved) or isinstance(curved, (bool, list)) or curved in ("matrices", "all", "none")):
        raise ValueError(
            f"Invalid curved: {curved!r}; use 'matrices', 'all', 'none', a bool (in a group) or a callable (name, p) -> bool"
        )
    if isinstance(curved, list) and len(curved) != len(group["params"]):
        raise ValueError(f"Invalid curved: {len(curved)} entries for {len(group['params'])} parameters")
    beta = group["beta"]
    if isinstance(beta, list) and len(beta) == len(group["params"]):
        group["beta"] = [_check_beta(b, f"{i} of its group") for i, b in enumerate(beta)]
    elif not callable(beta):
        group["beta"] = _check_beta(beta)
    for name in ("batch_dims", "residual_rank"):
        if isinstance(group[name], bool) or not isinstance(group[name], int) or group[name] < 0:
            raise ValueError(f"Invalid {name}: {group[name]!r}; use an int >= 0")
    steps = group["anneal_steps"]
    if steps is not None and (
        isinstance(steps, bool) or not isinstance(steps, (int, float)) or not 0 < steps < math.inf
    ):
        raise ValueError(f"Invalid anneal_steps: {steps!r}; use a positive number of steps, or None")
    group["scale_init"] = _check_scale_init(group["scale_init"])
    group["scale_lr"] = _check_scale_lr(group["scale_lr"])


def _check_adam_options(group: Mapping[str, Any]) -> None:
    """torch's own checks of what a saved group holds of Adam's options."""
    if not isinstance(group["lr"], (int, float, Tensor)):
        raise ValueError(f"Invalid learning rate: {group['lr']!r}; use a number or a tensor")
    try:
        Adam([torch.empty(0)], 1e-3, tuple(group["betas"]), group["eps"], group["weight_decay"])
    except TypeError as error:
        raise ValueError(f"Invalid options in the saved group: {error}") from error


def _check_beta(beta: Any, name: str | None = None) -> float | str:
    where = "" if name is None else f" for parameter {name}"
    if isinstance(beta, (tuple, list)):
        raise ValueError(f"beta is the curvature, one number, got {beta!r}{where}; did you mean betas={tuple(beta)!r}?")
    if isinstance(beta, str) and beta in RULES:
        return beta
    try:
        number = float(beta)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(beta, (bool, str)) or not 0 < number < math.inf:
        raise ValueError(
            f"Invalid beta: {beta!r}{where}; use a positive number, 'auto', 'width' or a callable (name, p) -> float"
        )
    return number


def _check_kinds(name: str, mapping: Any) -> None:
    if not isinstance(mapping, Mapping):
        raise ValueError(f"Invalid {name}: {mapping!r}; use None or a mapping from {', '.join(KINDS)}")
    for kind in mapping:
        if kind not in KINDS:
            raise ValueError(f"Invalid {name}: unknown kind {kind!r}; the kinds are {', '.join(KINDS)}")


def _check_scale_init(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    _check_kinds("scale_init", given)
    for kind, value in given.items():
        fine = value == "beta" or (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        )
        if not fine:
            raise ValueError(f"Invalid scale_init for {kind}: {value!r}; use a finite number or 'beta'")
    return {kind: value if value == "beta" else float(value) for kind, value in given.items()}


def _check_scale_lr(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    _check_kinds("scale_lr", given)
    checked: dict[str, Any] = {}
    for kind, value in given.items():
        numbers = value if isinstance(value, (tuple, list)) else (value, value)
        fine = value is None or (
            len(numbers) == 2
            and all(isinstance(v, (int, float)) and not isinstance(v, bool) and 0 < v < math.inf for v in numbers)
        )
        if not fine:
            raise ValueError(
                f"Invalid scale_lr for {kind}: {value!r}; use None (frozen), a positive number or a pair (start, end) of them"
            )
        checked[kind] = None if value is None else [float(v) for v in numbers]
    return checked
