"""SELAdam and SELAdamW: torch.optim.Adam's interface over raw weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import Adam, adam
from torch.optim.optimizer import _device_dtype_check_for_fused, _get_capturable_supported_devices

from . import _execute, _rule, _shards
from ._base import SELOptimizer
from ._options import SEL_DEFAULTS, check_betas, near_names, scale_rates
from ._rule import Hyper
from ._stats import LastStep
from .convert import ADAM_OPTIONS, adam_fault, as_step, from_adam


class SELAdam(SELOptimizer):
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
        fused: True uses the native kernel: on a CPU compiled at its first use (a C++ compiler is needed), on a CUDA device by triton.
            None (default) uses it where it is at hand (python -m seloptim build; triton installed), else the eager path;
            False never. foreach=True or False with fused=None is the eager path.
        capturable: whether a step may be captured in a CUDA graph, once a first one has been taken.
        differentiable: refused.
        curved: "matrices" (default: real parameters with ndim >= 2), "all", "none", or a callable (name, p) -> bool; in a
            group also True or False.
        combine: "mismatched" (default, the paper's) or "congruent", whose linear path follows raw's sign.
        init: "preserve" (default) changes no weight. "mismatched" shrinks negative weights once, at construction, as the
            paper does for training from scratch; frozen parameters (requires_grad=False) are left as they are.
        beta: curvature: a positive number, "width" (default: from the shape, beta * rms at most 1.1), "auto" (from the
            tensor's rms), or a callable (name, p) -> float.
        lr_space: "weight" (default: lr is divided by the tensor's mean slope at the start, so that a typical weight moves as
            far as under Adam) or "raw": lr is the step in raw space, as in the paper.
        structure: which factors a scale has: "row_col" (default), "row", "col", "scalar", "none" (scales frozen).
        batch_dims: leading dimensions that stack matrices, each with factors of its own (default 0).
        scale_init: None (default: e = l = m = 1, n = 0) or a mapping kind -> number, or "beta" for beta itself.
        scale_lr: learning rates of the scales as multiples of lr: None (default: e, l (2, 0.3); m (0.01, 0.5); n frozen),
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
        beta: Any = "width",
        lr_space: str = "weight",
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
            hint = near_names(name, [*SEL_DEFAULTS, *ADAM_OPTIONS]) or f"; it has Adam's and {', '.join(SEL_DEFAULTS)}"
            raise TypeError(f"{type(self).__name__} has no option {name}={value!r}{hint}")
        check_betas(betas)
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
        super().__init__(params, {**adam_defaults, **sel_defaults})

    def _refuse(self, group: dict[str, Any], candidates: list[tuple[Tensor, str]]) -> None:
        super()._refuse(group, candidates)
        for _, name in candidates:
            self._refuse_capturable(group, name)
        if group["fused"]:
            for p, name in candidates:
                self._refuse_fused(group, p, name)
            for device in {p.device.type for p, _ in candidates} & _execute.NATIVE.keys():
                _execute.native_is_ready(device, compile=True)

    @staticmethod
    def _refuse_capturable(group: dict[str, Any], name: str) -> None:
        """What the host would have to read from a device in every step."""
        if not group["capturable"]:
            return
        if group["check_edits"] == "full":
            raise ValueError(
                f"capturable=True cannot have check_edits='full' (parameter {name}): the values are looked at on the host in every "
                "step; use check_edits='tracked'"
            )
        if any(isinstance(b, Tensor) and b.device.type != "cpu" for b in group["betas"]):
            raise ValueError(
                f"capturable=True cannot have betas on a device (parameter {name}): they are read on the host; use numbers"
            )

    def _refuse_step(self, group: dict[str, Any], p: Tensor, name: str) -> None:
        if group["curved"] not in ("none", False):
            self._refuse_capturable(group, name)
        if group["fused"]:
            _device_dtype_check_for_fused(p)  # torch's own asks when it makes the state, behind other groups' steps
        if group["capturable"] and not group["fused"]:
            supported = _get_capturable_supported_devices()
            if p.device.type not in supported:
                # torch.optim.Adam's own words, before anything has moved
                raise AssertionError(
                    f"If capturable=True, params and state_steps must be on supported devices: {supported}."
                )

    @staticmethod
    def _refuse_fused(group: dict[str, Any], p: Tensor, name: str) -> None:
        reason = _execute.native_refusal(p, group["residual_rank"] > 0)
        if reason:
            raise ValueError(
                f"fused=True has no kernel for parameter {name}: {reason}; leave fused=None, which takes the eager path where it must"
            )

    def _settle(self, group: dict[str, Any], i: int, p: Tensor, name: str) -> None:
        if group["fused"]:
            self._refuse_fused(group, p, name)
        super()._settle(group, i, p, name)
        self._place_counter(group, p)

    def _counter_device(self, group: Mapping[str, Any], p: Tensor) -> torch.device:
        on_device = (group["capturable"] or group["fused"]) and not p.is_meta
        return p.device if on_device else torch.device("cpu")

    def _place_counter(self, group: dict[str, Any], p: Tensor) -> None:
        """The count of steps where the group's options of now want it."""
        device = self._counter_device(group, p)
        if self.state[p]["step"].device != device:
            self.state[p]["step"] = self.state[p]["step"].to(device)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler leaves the unscaling and the skipping of a step to us: where every kernel is a fused one."""
        return all(group["fused"] for group in self.param_groups)

    def _step_curved(self, group: dict[str, Any], params: list[Tensor]) -> None:
        items = self._items(group, params)
        device = params[0].device.type
        batched = group["foreach"] if group["foreach"] is not None else device != "cpu"
        wanted = bool(group["fused"]) or (group["fused"] is None and group["foreach"] is None)
        native = {
            device
            for device in ({p.device.type for p in params} if wanted else ())
            if _execute.native_is_ready(device, compile=bool(group["fused"]))
        }
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        _execute.run(items, _hyper(group), batched=batched, native=native, grad_scale=grad_scale, found_inf=found_inf)
        if found_inf is not None:
            # Not 0 only where a device skips the step by itself.
            counts = [self.state[p]["step"] for p in params]
            skipped = [found_inf.to(count.device, non_blocking=True).view(()) for count in counts]
            torch._foreach_sub_(counts, skipped)  # pyright: ignore[reportPrivateImportUsage]
        self._stepped(params)

    def _only_creates(self, members: list[tuple[dict[str, Any], int, Tensor, str]]) -> bool:
        """Whether this is a step that torch.distributed.checkpoint takes to have state created: at lr = 0, with zero gradients.

        Such a first step is not counted, since without a checkpoint it would not have been taken.
        """
        only = all(_rule.is_zero(_lr(group)) and float(self.state[p]["step"]) == 0 for group, _, p, _ in members)
        if not only:
            return False
        params = [p for _, _, p, _ in members]
        return not any(_shards.anywhere(params, [bool(_shards.local_grad(p).any()) for p in params]))

    def _settle_plain(self, group: dict[str, Any], p: Tensor) -> None:
        """State of a parameter that is not curved, as torch.optim.Adam makes it, where p lives now."""
        state = self.state[p]
        if state:
            state.pop("from_adam", None)
            self._follow(p)
            self._place_counter(group, p)
            if group["amsgrad"] and "max_exp_avg_sq" not in state:  # switched on during training, as in _slots
                state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
            return
        state["step"] = torch.zeros((), dtype=torch.float32, device=self._counter_device(group, p))
        for moment in _rule.MOMENTS if group["amsgrad"] else _rule.MOMENTS[:2]:
            state[moment] = torch.zeros_like(p, memory_format=torch.preserve_format)

    def _plain_bytes(self, group: dict[str, Any], p: Tensor) -> int | None:
        moments = 3 if group["amsgrad"] else 2
        return moments * _shards.local(p).numel() * p.element_size() + torch.float32.itemsize  # and the count of steps

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
        slope = self._lr_slope(group, state)
        rates = torch.tensor(scale_rates(group, step - 1), dtype=state["raw"].dtype, device=p.device)
        return LastStep(_hyper(group), step, slope, rates)

    def _check_saved_group(self, group: dict[str, Any]) -> None:
        _check_adam_options(group)

    def _saved_fault(self, state: dict[str, Any], p: Tensor, batch_dims: int) -> str | None:
        return _rule.state_fault(state, p.shape, batch_dims) if "raw" in state else adam_fault(state, p.shape)

    def _reinstall_plain(self, p: Tensor, saved: dict[str, Any], ours: bool) -> None:
        state, (group, _, _) = self.state[p], self._find(p)
        for key, value in saved.items():
            if isinstance(value, Tensor) and key != "step":
                placed = _shards.placed(p, key, value.detach(), 0, "row_col")
                state[key] = placed.to(p.device, copy=True)
        # torch asks the saved group, whose capturable and fused may be another optimizer's.
        state["step"] = as_step(saved["step"]).to(self._counter_device(group, p))
        if not ours:
            state["from_adam"] = 1  # slopes are known when the weights are: they may be loaded later

    def _create(self, group: dict[str, Any], i: int, p: Tensor, name: str) -> None:
        adam_state = self.state.get(p)
        super()._create(group, i, p, name)
        if adam_state and "from_adam" in adam_state:
            view, curve, sums = self._views(p, group), self._curve(p, group), _shards.sums(p, self.state[p])
            from_adam(_shards.local_state(adam_state), self.state[p], view, curve, sums)


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


def _lr(group: Mapping[str, Any]) -> float | Tensor:
    lr = group["lr"]
    return lr.reshape(()) if isinstance(lr, Tensor) and lr.dim() else lr


def _hyper(group: dict[str, Any]) -> Hyper:
    beta1, beta2 = (float(b) for b in group["betas"])
    return Hyper(
        _lr(group),
        beta1,
        beta2,
        group["eps"],
        group["weight_decay"],
        group["decoupled_weight_decay"],
        group["amsgrad"],
        group["maximize"],
    )


def _check_adam_options(group: Mapping[str, Any]) -> None:
    """torch's own checks of what a saved group holds of Adam's options."""
    if not isinstance(group["lr"], (int, float, Tensor)):
        raise ValueError(f"Invalid learning rate: {group['lr']!r}; use a number or a tensor")
    try:
        Adam([torch.empty(0)], 1e-3, tuple(group["betas"]), group["eps"], group["weight_decay"])
    except TypeError as error:
        raise ValueError(f"Invalid options in the saved group: {error}") from error
