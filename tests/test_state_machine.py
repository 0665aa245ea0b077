"""Everything that happens to an optimizer in a long run, in any order, against the oracle and torch.optim.Adam.

The suite runs it small; `python -m tests.test_state_machine 10000` runs about that many rules.
"""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from seloptim import SELAdam, _rule
from tests.cases import mixed
from tests.oracle import KINDS, START, Curve, resolve_beta, sel_map, sel_unmap
from tests.test_checkpoints import same, through_file

PARAMETERS = {
    "a": ((3, 4), torch.float64),
    "b": ((2, 3, 2), torch.float32),
    "c": ((4, 3), torch.bfloat16),
    "bias": ((5,), torch.float64),
    "late": ((3, 3), torch.float32),
    "later": ((2, 5), torch.float64),
}
LATE = ("late", "later")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ORACLE_OPTIONS: dict[str, Any] = {
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
    "decoupled_weight_decay": False,
    "init": "preserve",
    "beta": 12.5,
    "lr_space": "raw",
    "structure": "row_col",
    "batch_dims": 0,
    "scale_init": None,
    "scale_lr": None,
    "anneal_steps": 7,
}
seeds = st.integers(0, 2**16)


def band(mapped: Tensor, dtype: torch.dtype, ulps: float) -> tuple[Tensor, Tensor]:
    """The weights of `dtype` that do not differ from the map: sel.md, section 7."""
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    slack = ulps * unit * mapped.abs()
    if dtype in (torch.float64, torch.float32):
        return mapped - slack, mapped + slack
    return (mapped - slack).to(dtype).double(), (mapped + slack).to(dtype).double()


def outside(p: Tensor, mapped: Tensor, ulps: float) -> Tensor:
    low, high = band(mapped, p.dtype, ulps)
    return (p.double() < low) | (p.double() > high)


class Machine(RuleBasedStateMachine):
    @initialize(
        combine=st.sampled_from(["mismatched", "congruent"]),
        check=st.sampled_from(["tracked", "full"]),
        foreach=st.booleans(),
    )
    def begin(self, combine: str, check: str, foreach: bool) -> None:
        warnings.simplefilter("error")
        self.options: dict[str, Any] = {
            "combine": combine,
            "check_edits": check,
            "foreach": foreach,
            "anneal_steps": ORACLE_OPTIONS["anneal_steps"],
        }
        self.model = nn.Module()
        for k, (name, (shape, dtype)) in enumerate(PARAMETERS.items()):
            setattr(self.model, name, nn.Parameter(mixed(*shape, seed=k, size=0.15, dtype=dtype)))
        self.groups = [[name for name in PARAMETERS if name not in LATE]]
        self.optimizer = self.make()
        self.steps = dict.fromkeys(PARAMETERS, 0)
        self.saves: list[dict[str, Any]] = []
        self.curves: dict[str, Curve] = {}

    # ---------------------------------------------------------------------------------------------------- helpers

    def make(self) -> SELAdam:
        groups = [{"params": [(name, self.parameter(name)) for name in names]} for names in self.groups]
        return SELAdam(groups, lr=1e-3, beta="auto", lr_space="raw", **self.options)

    def parameter(self, name: str) -> nn.Parameter:
        return self.model.get_parameter(name)

    def members(self) -> list[str]:
        return [name for names in self.groups for name in names]

    def state(self, name: str) -> dict[str, Any]:
        return self.optimizer.state.get(self.parameter(name), {})

    def mapped(self, name: str) -> Tensor:
        """map(raw) in float64 from the state as it lies there: the accessors would take edits first."""
        state = self.state(name)
        row, col = state["scale_row"].double(), state["scale_col"].double()
        e, l, m, n = (row[:, k, None] * col[None, :, k] for k in range(len(KINDS)))
        raw = state["raw"].double()
        return sel_map(raw.reshape(len(row), -1), e, l, m, n, state["beta"], self.options["combine"]).view_as(raw)

    def agree(self, names: list[str]) -> None:
        """The invariant: a curved parameter is the map of its raw; states are whole, finite, and counted."""
        for name in names:
            state, p = self.state(name), self.parameter(name).detach()
            if not state:
                continue
            assert float(state["step"]) == self.steps[name], name
            assert all(bool(v.isfinite().all()) for v in state.values() if isinstance(v, Tensor)), name
            if name == "bias":
                assert state["exp_avg"].dtype == p.dtype or not self.parameter(name).requires_grad
                continue
            assert state["raw"].dtype == (torch.float64 if p.dtype == torch.float64 else torch.float32)
            assert not bool(outside(p, self.mapped(name), 16).any()), name

    def expect(self, name: str) -> tuple[Curve, Tensor]:
        """The oracle where the optimizer has to stand before its step, and the elements that it cannot be sure of."""
        p, state = self.parameter(name).detach(), self.state(name)
        if name not in self.curves:
            options = {**ORACLE_OPTIONS, "combine": self.options["combine"]}
            self.curves[name] = Curve(torch.zeros(p.shape, dtype=torch.float64), 1e-3, None, options)
        curve = self.curves[name]
        unsure = torch.zeros_like(p, dtype=torch.bool)
        fresh = not state or (self.steps[name] == 0 and bool(outside(p, self.mapped(name), 16).any()))
        adams = iter([curve.raw_adam, *(adam for adam, *_ in curve.factor_adams)])
        with torch.no_grad():
            curve.t = self.steps[name]
            if fresh:
                curve.beta = resolve_beta("auto", p.double())
                for kind, (row, col) in curve.pair.items():
                    row.fill_(START[kind])
                    col.fill_(1.0)
                curve.raw.copy_(sel_unmap(p.double(), 1.0, 1.0, 1.0, 0.0, curve.beta, self.options["combine"]))
                for adam in adams:
                    adam.state.clear()
                return curve, unsure
            curve.beta = state["beta"]
            for k, kind in enumerate(KINDS):
                row, col = curve.pair[kind]
                row.copy_(state["scale_row"][:, k].view(row.shape))
                col.copy_(state["scale_col"][:, k].view(col.shape))
            raw = state["raw"].double()
            edited = outside(p, self.mapped(name), 16)
            unsure = outside(p, self.mapped(name), 8) != outside(p, self.mapped(name), 24)
            e, l, m, n = (row * col for row, col in curve.pair.values())
            inverse = sel_unmap(p.double(), e, l, m, n, curve.beta, self.options["combine"], raw)
            curve.raw.copy_(torch.where(edited, inverse, raw))
            self.put(next(adams), curve.raw, curve.t, state["exp_avg"], state["exp_avg_sq"])
            for k, kind in enumerate(KINDS[:3]):
                for leaf, key in zip(curve.pair[kind], ("scale_row", "scale_col"), strict=True):
                    first, second = state[f"{key}_exp_avg"][:, k], state[f"{key}_exp_avg_sq"][:, k]
                    self.put(next(adams), leaf, curve.t, first, second)
        return curve, unsure

    def put(self, adam: torch.optim.Adam, leaf: Tensor, step: int, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        adam.state[leaf] = {
            "step": torch.tensor(float(step)),
            "exp_avg": exp_avg.double().reshape(leaf.shape).clone(),
            "exp_avg_sq": exp_avg_sq.double().reshape(leaf.shape).clone(),
        }

    # ------------------------------------------------------------------------------------------------------ rules

    @rule(
        seed=seeds, missing=st.sets(st.sampled_from(list(PARAMETERS)), max_size=2), zero=st.sampled_from([0, 0, 0, 1])
    )
    def step(self, seed: int, missing: set[str], zero: int) -> None:
        lr = self.optimizer.param_groups[0]["lr"]
        stepping = [n for n in self.members() if n not in missing and self.parameter(n).requires_grad]
        for k, name in enumerate(PARAMETERS):
            p = self.parameter(name)
            p.grad = mixed(*p.shape, seed=seed + k, dtype=p.dtype) * (1 - zero) if name in stepping else None
        only_creates = zero and lr == 0 and not any(self.steps[name] for name in stepping)
        expected = {name: self.expect(name) for name in stepping if name != "bias"}
        twin = None
        if "bias" in stepping:
            twin = nn.Parameter(self.parameter("bias").detach().clone())
            twin.grad = self.parameter("bias").grad
            adam = torch.optim.Adam([twin], lr=lr, foreach=False)
            if state := self.state("bias"):
                adam.load_state_dict(
                    {"state": {0: copy.deepcopy(state)}, "param_groups": adam.state_dict()["param_groups"]}
                )
            if not only_creates:
                adam.step()
        before = {name: self.parameter(name).detach().clone() for name in stepping}
        self.optimizer.step()
        for name in stepping:
            self.steps[name] += not only_creates
        if twin is not None:
            assert torch.equal(twin, self.parameter("bias"))
        for name, (curve, unsure) in expected.items():
            p, state = self.parameter(name), self.state(name)
            moved = 0.0 if only_creates else 1.0
            if moved:
                assert p.grad is not None
                curve.step(p.grad.double(), lr)
            # One step from a common state: rounding of the step itself, and of raw.
            unit = torch.finfo(state["raw"].dtype).eps
            loose = 64 * unit * (1 if state["raw"].dtype == torch.float64 else 16)
            self.close(state["raw"], curve.raw, loose * lr * 1e2 + 64 * unit * curve.raw.abs(), ~unsure)
            if not bool(unsure.any()):
                for k, kind in enumerate(KINDS):
                    for factor, leaf in zip(("scale_row", "scale_col"), curve.pair[kind], strict=True):
                        ours = state[factor][:, k].view(leaf.shape)
                        self.close(ours, leaf, loose * lr * 1e3 + 64 * unit * leaf.abs())
            if lr == 0:
                assert torch.equal(p, before[name])
            else:
                group = next(g for g in self.optimizer.param_groups if any(q is p for q in g["params"]))
                pushed = _rule.push(self.optimizer._views(p, group), self.optimizer._curve(p, group))
                assert torch.equal(p, pushed.view_as(p).to(p.dtype)), name
        self.agree(stepping)

    def close(self, ours: Tensor, theirs: Tensor, slack: Tensor, where: Tensor | None = None) -> None:
        near = (ours.double() - theirs).abs() <= slack
        assert bool((near if where is None else near | ~where).all()), (ours, theirs, slack)

    @rule(name=st.sampled_from(list(PARAMETERS)), seed=seeds, kind=st.integers(0, 7))
    def edit(self, name: str, seed: int, kind: int) -> None:
        p = self.parameter(name)
        mask = mixed(*p.shape, seed=seed) < 0.5
        with torch.no_grad():
            if kind == 0:
                p.mul_(0.997)
            elif kind == 1:
                p.clamp_(-0.2, 0.2)
            elif kind == 2:
                p.masked_fill_(mask, 0.0)
            elif kind == 3:
                p.data = p.data * 0.9
            elif kind == 4:
                p.copy_(mixed(*p.shape, seed=seed, size=0.15))
            else:
                kept = p.detach().clone()
                for values in (kept * 0.5, kept):  # averaged weights in, and back
                    if kind == 5:
                        p.copy_(values)
                    else:
                        p.data.copy_(values)
                if kind == 7:
                    p.data.neg_()
                    self.optimizer.resync()

    @rule()
    def resync(self) -> None:
        self.optimizer.resync()
        self.agree([name for name in self.members() if name != "bias"])

    @precondition(lambda self: len(self.groups) <= len(LATE))
    @rule()
    def add_group(self) -> None:
        name = LATE[len(self.groups) - 1]
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.add_param_group({"params": [(name, self.parameter(name))], "lr": lr})
        self.groups.append([name])
        self.steps[name] = 0

    @rule(name=st.sampled_from(list(PARAMETERS)), frozen=st.booleans())
    def freeze(self, name: str, frozen: bool) -> None:
        self.parameter(name).requires_grad_(not frozen)

    @rule(lr=st.sampled_from([0.0, 1e-4, 1e-3, 3e-3]))
    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    @rule(name=st.sampled_from(list(PARAMETERS)), dtype=st.sampled_from(DTYPES))
    def change_dtype(self, name: str, dtype: torch.dtype) -> None:
        if name == "bias" and dtype == torch.float16:
            return  # Adam's eps is 0 in float16
        p = self.parameter(name)
        p.grad = None
        p.data = p.data.to(dtype)

    @rule(through_pickle=st.booleans())
    def copy(self, through_pickle: bool) -> None:
        pair = (self.model, self.optimizer)
        self.model, self.optimizer = pickle.loads(pickle.dumps(pair)) if through_pickle else copy.deepcopy(pair)

    @rule()
    def save(self) -> None:
        state = self.optimizer.state_dict()
        self.agree(self.members())
        for k, name in enumerate(self.members()):
            assert (k in state["state"]) or not self.parameter(name).requires_grad
        weights = {name: self.parameter(name).detach().clone() for name in PARAMETERS}
        saved = {
            "weights": weights,
            "state": through_file(state),
            "groups": list(self.groups),
            "steps": dict(self.steps),
        }
        self.saves = [*self.saves[-1:], copy.deepcopy(saved)]

    @precondition(lambda self: self.saves)
    @rule(which=st.integers(0, 1), fresh=st.booleans(), model_first=st.booleans())
    def load(self, which: int, fresh: bool, model_first: bool) -> None:
        saved = self.saves[which % len(self.saves)]
        if not fresh and saved["groups"] != self.groups:
            self.optimizer.resync()
            before = copy.deepcopy(self.optimizer.state_dict())
            try:
                self.optimizer.load_state_dict(saved["state"])
                raise AssertionError("a state of other groups was loaded")
            except ValueError:
                same(self.optimizer.state_dict(), before)
            return
        self.groups = list(saved["groups"])
        for name, weight in saved["weights"].items():
            p = self.parameter(name)
            p.grad = None
            p.data = p.data.to(weight.dtype)
        if fresh:
            self.optimizer = self.make()

        def load_model() -> None:
            with torch.no_grad():
                for name, weight in saved["weights"].items():
                    self.parameter(name).copy_(weight)

        if model_first:
            load_model()
            self.optimizer.load_state_dict(saved["state"])
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="the loaded raw weights are authoritative")
                self.optimizer.load_state_dict(saved["state"])
            load_model()
        self.steps = {name: saved["steps"][name] if self.state(name) else 0 for name in PARAMETERS}
        for name, weight in saved["weights"].items():
            assert torch.equal(self.parameter(name), weight), name
        for k, name in enumerate(self.members()):
            same(self.state(name), saved["state"]["state"].get(k, {}))
        self.agree(self.members())

    @rule()
    def distributed_checkpoint(self) -> None:
        for name in PARAMETERS:
            self.parameter(name).grad = None
        weights = {name: self.parameter(name).detach().clone() for name in PARAMETERS}
        state = through_file(get_optimizer_state_dict(self.model, self.optimizer))
        set_optimizer_state_dict(self.model, self.optimizer, state)
        for name, weight in weights.items():
            assert torch.equal(self.parameter(name), weight), name
        for name in self.members():
            if not self.parameter(name).requires_grad:
                self.steps[name] = 0  # torch drops the state of what does not train
                assert not self.state(name)
            else:
                same(self.state(name), state["state"][name])
        self.agree(self.members())


SMALL = settings(
    max_examples=10,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestStateMachine = Machine.TestCase
TestStateMachine.settings = SMALL


if __name__ == "__main__":
    count = int(sys.argv[1])
    run_state_machine_as_test(
        Machine, settings=settings(SMALL, max_examples=max(1, count // 50), stateful_step_count=50)
    )
