"""SELAdam and SELAdamW: torch.optim.Adam's interface over raw weights."""

import difflib
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import Adam, adam

from . import _execute, _rule
from ._options import (
    SEL_DEFAULTS,
    check_beta,
    check_group,
    scale_rates,
)
from ._rule import Hyper
from ._shadow import Shadow, differing
from .convert import from_adam
from .functional import sel_forward

FORMAT = 1  # of the saved state; stored in every group as "sel_format"


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
        capturable, differentiable, fused: refused where a parameter is curved.
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
        for name in unknown:
            near = difflib.get_close_matches(name, [*SEL_DEFAULTS, *_ADAM_OPTIONS], 1)
            raise TypeError(
                f"{type(self).__name__} has no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ValueError(
                f"betas is Adam's pair of decay rates, got {betas!r}; did you mean beta={betas!r}, the curvature?"
            )
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
        self._seen = {}
        self._warned = set()
        super().__init__(params, {**adam_defaults, **sel_defaults, "sel_format": FORMAT})

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
            for key in param_group.keys() - self.defaults.keys() - {"params", "param_names"}:
                near = difflib.get_close_matches(key, self.defaults, 1, cutoff=0.8)
                if near:
                    raise ValueError(f"a parameter group has the option {key!r}; did you mean {near[0]!r}?")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            members = [(i, p, name) for g, i, p, name in self._members() if g is group]
            check_group(group)
            if callable(group["curved"]):
                group["curved"] = [bool(group["curved"](name, p)) for _, p, name in members]
            if callable(group["beta"]):
                group["beta"] = [check_beta(group["beta"](name, p), name) for _, p, name in members]
            self._refuse(group, members)
            if group["init"] == "mismatched":
                self._shrink(group, members)
        except BaseException:
            self.param_groups.pop()
            raise

    def _refuse(self, group: dict[str, Any], members: list[tuple[int, Tensor, str]]) -> None:
        """Options that a curved parameter cannot honour."""
        if group["differentiable"]:
            raise ValueError(
                f"differentiable=True is not supported by {type(self).__name__}; "
                "seloptim.transform differentiates through steps, with torchopt"
            )
        if group["curved"] in ("none", False) or (isinstance(group["curved"], list) and not any(group["curved"])):
            return
        if group["fused"]:
            raise ValueError(
                "fused=True is not available for curved parameters; leave fused=None, or use foreach=True to batch"
            )
        if group["capturable"]:
            raise ValueError("capturable=True is not available for curved parameters; leave capturable=False")
        for _, p, name in members:
            candidate = p.is_floating_point() and (group["curved"] != "matrices" or p.dim() >= 2)
            if candidate and p.dim() < group["batch_dims"]:
                raise ValueError(
                    f"batch_dims={group['batch_dims']} needs more dimensions than parameter {name} has ({p.dim()})"
                )

    @torch.no_grad()
    def _shrink(self, group: dict[str, Any], members: list[tuple[int, Tensor, str]]) -> None:
        """The mismatched initialisation. What depends on the weights is decided before it, since it changes them."""
        chosen = [self._is_curved(group, i, p, name) for i, p, name in members]
        betas = [2.0] * len(members)
        shrunk: list[tuple[Tensor, Tensor]] = []
        for (i, p, name), is_curved in zip(members, chosen, strict=True):
            if not is_curved:
                continue
            if p.is_meta:
                raise ValueError(
                    f"init='mismatched' needs the weights of parameter {name}, which is on the meta device"
                )
            betas[i] = self._resolve_beta(group, i, p, name)
            scales = self._scale_init(group, betas[i])
            try:
                raw = _rule.inverse(p, scales, beta=betas[i], combine="congruent")
            except ValueError as error:
                raise ValueError(f"parameter {name}: {error}") from error
            shrunk.append((p, sel_forward(raw, *scales.values(), beta=betas[i], combine="mismatched")))
        for p, weight in shrunk:
            p.copy_(weight)
        group["curved"], group["beta"] = chosen, betas

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

    def _step_curved(self, group: dict[str, Any], params: list[Tensor]) -> None:
        hyper = _hyper(group)
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
        batched = group["foreach"] if group["foreach"] is not None else params[0].device.type != "cpu"
        with torch.autocast(params[0].device.type, enabled=False):
            _execute.run(items, hyper, batched=batched)
        for p in params:
            self.state[p]["step"] += 1
            self._remember(p)

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

    # -------------------------------------------------------------------------------------------------- saving, loading

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        incoming = self.__dict__.pop("_incoming", None)
        groups_before = self.__dict__.get("param_groups", [])
        super().__setstate__(state)
        self.__dict__.setdefault("_warned", set())
        self._seen = {}
        for k, group in enumerate(self.param_groups):
            live = groups_before[k] if incoming is not None else {}
            for key in (*_ADAM_OPTIONS, *SEL_DEFAULTS, "sel_format"):
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

    def _create(self, group: dict[str, Any], i: int, p: Tensor, name: str) -> None:
        adam_state = self.state.get(p)
        super()._create(group, i, p, name)
        if adam_state and "from_adam" in adam_state:
            from_adam(adam_state, self.state[p], self._slope(p, group))

    @torch.no_grad()
    def _slopes(self) -> list[tuple[Tensor, Tensor | None]]:
        """(p, slope in p's shape, or None where p is not curved) by position in the state_dict."""
        return [
            (p, self._slope(p, group) if "raw" in self.state.get(p, {}) else None) for group, _, p, _ in self._members()
        ]


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


_ADAM_OPTIONS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
)


def _bare(name: str) -> str:
    return name.replace("module.", "").replace("_orig_mod.", "")


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
