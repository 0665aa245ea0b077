"""Many ranks: gloo on the CPU. A check runs on every rank of one process group; starting one costs more than the checks."""

from __future__ import annotations

import copy
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from seloptim import Curved, SELAdam, SELAdamW, _execute, param_groups
from seloptim.convert import to_adam, to_adam_state
from seloptim.init import calibrate_beta, mismatched_
from seloptim.tensorboard import log_scales
from tests.cases import make_model, mixed

Check = Callable[[Path], None]
CHECKS: dict[int, dict[str, Check]] = {2: {}, 4: {}}
EIGHT = {"e": 8.0, "l": 8.0, "m": 8.0}


def on(ranks: int) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS[ranks][check.__name__] = check
        return check

    return register


# ------------------------------------------------------------------------------------------------------- the harness


def run_checks(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    _execute.native_is_ready = lambda device, *, compile: False  # as conftest.py has it for the tests of one process
    store = FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=30))
    for name, check in CHECKS[ranks].items():
        own = folder / name
        own.mkdir(exist_ok=True)
        began, failure = time.perf_counter(), ""
        try:
            check(own)
        except BaseException:
            failure = traceback.format_exc()
        (own / f"rank{rank}").write_text(failure or f"passed in {time.perf_counter() - began:.1f} s")
        store.set(f"{name}.{rank}", "failed" if failure else "passed")
        said = [store.get(f"{name}.{other}") for other in range(ranks)]  # waits for the others
        if b"failed" in said:
            break  # collectives may be out of step from here on
    dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------- what checks use


def world() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def whole(t: Any) -> Any:
    return t.full_tensor() if isinstance(t, DTensor) else t


def part(t: Tensor) -> Tensor:
    return t.to_local().detach() if isinstance(t, DTensor) else t.detach()


def cut(t: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    return distribute_tensor(t.clone(), mesh, placements, src_data_rank=None)


def near(a: Tensor, b: Tensor, tolerance: float, what: str = "") -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def same_on_all_ranks(t: Tensor, what: str = "") -> None:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part(t))
    assert all(torch.equal(parts[0], other) for other in parts), what


def same_state(alone: SELAdam, p: Tensor, sharded: SELAdam, q: Tensor, tolerance: float) -> None:
    """The state of one process and that of all ranks; what is whole on every rank has the same bits there."""
    assert alone.state[p].keys() == sharded.state[q].keys()
    for key, value in alone.state[p].items():
        other = sharded.state[q][key]
        if isinstance(value, Tensor):
            near(whole(other), value, tolerance, key)
            if isinstance(other, DTensor) and all(own.is_replicate() for own in other.placements):
                same_on_all_ranks(other, key)
        else:
            assert other == pytest.approx(value, rel=1e-12), key
            same_on_all_ranks(torch.tensor(other, dtype=torch.float64), key)


def numbers(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """As mixed, but the first is not zero: some shapes have only that one."""
    return mixed(torch.Size(shape).numel() + 1, seed=seed, dtype=dtype)[1:].reshape(tuple(shape))


def both_ways(
    shape: tuple[int, ...],
    placements: Sequence[Placement],
    mesh: DeviceMesh,
    steps: int = 15,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-5,
    **options: Any,
) -> tuple[nn.Parameter, SELAdam]:
    """The same steps on one process and on all ranks: weights and state must agree. What the ranks are left with."""
    options = {"lr": 2e-3, "curved": "all", "scale_lr": EIGHT, **options}
    start = numbers(shape, 7, dtype) * 0.1
    p, q = nn.Parameter(start.clone()), nn.Parameter(cut(start, mesh, placements))
    alone, sharded = SELAdam([p], **{**options, "foreach": False}), SELAdam([q], **options)
    near(whole(q.detach()), p.detach(), 1e-6, "after construction")
    for k in range(steps):
        grad = numbers(shape, 100 + k, dtype)
        p.grad, q.grad = grad, cut(grad, mesh, placements)
        alone.step()
        sharded.step()
    assert sharded.state[q]["raw"].placements == tuple(placements)
    moved = float((p.detach() - start).abs().max()) if p.numel() else 1.0
    assert moved > 1e-3, "a step that does nothing proves nothing"
    near(whole(q.detach()), p.detach(), tolerance, f"{shape} {placements} {options}")
    same_state(alone, p, sharded, q, tolerance)
    return q, sharded


def batch(k: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return mixed(8, 6, seed=2 * k + 1, dtype=dtype), mixed(8, 4, seed=2 * k + 2, dtype=dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], mine: bool = True) -> None:
    """Steps whose batches depend on their number alone, of which each rank has its share."""
    ranks = dist.get_world_size() if mine else 1
    for k in steps:
        x, y = (t[(dist.get_rank() if mine else 0) :: ranks] for t in batch(k))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


def alone_and_trained(steps: int, **options: Any) -> tuple[nn.Module, SELAdam]:
    model = make_model("mlp", torch.float32)
    optimizer = SELAdam(model.named_parameters(), **{"lr": 2e-3, "scale_lr": EIGHT, **options})
    train(model, optimizer, range(steps), mine=False)
    return model, optimizer


def fully_sharded(mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    model = make_model("mlp", torch.float32)
    policy = policy or MixedPrecisionPolicy()
    for layer in model.layers:  # type: ignore[union-attr]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def agree(model: nn.Module, optimizer: SELAdam, alone: nn.Module, its: SELAdam, tolerance: float = 1e-5) -> None:
    for (name, q), p in zip(model.named_parameters(), alone.parameters(), strict=True):
        near(whole(q.detach()), p.detach(), tolerance, name)
        same_state(its, p, optimizer, q, tolerance)


# ------------------------------------------------------------------------------------------------------- two ranks


@on(2)
def ddp_is_one_process(folder: Path) -> None:
    """Contract 25. Replicas see the same gradients and need nothing of ours; both 15 steps agree, and replicas in every bit."""
    alone, its = alone_and_trained(15)
    model = DistributedDataParallel(make_model("mlp", torch.float32))
    optimizer = SELAdam(model.named_parameters(), lr=2e-3, scale_lr=EIGHT)
    train(model, optimizer, range(15))
    agree(model, optimizer, alone, its)
    for p in model.parameters():
        same_on_all_ranks(p)
        for key, value in optimizer.state[p].items():
            same_on_all_ranks(torch.as_tensor(value), key)


@on(2)
def fsdp2_is_one_process(folder: Path) -> None:
    """Contract 25. Guard: _run_sharded adds up column factors' gradients (_shards.add_up); without it they drift apart."""
    alone, its = alone_and_trained(15)
    model = fully_sharded(world())
    optimizer = SELAdam(model.named_parameters(), lr=2e-3, scale_lr=EIGHT)
    train(model, optimizer, range(15))
    agree(model, optimizer, alone, its)
    weight = next(model.parameters())
    placements = {key: v.placements for key, v in optimizer.state[weight].items() if isinstance(v, DTensor)}
    rows = {key for key, own in placements.items() if own == (Shard(0),)}
    assert placements.keys() - rows == {"scale_col", "scale_col_exp_avg", "scale_col_exp_avg_sq"}
    assert {"raw", "exp_avg", "exp_avg_sq", "scale_row", "scale_row_exp_avg", "scale_row_exp_avg_sq"} == rows


@on(2)
def fsdp2_cut_along_columns_is_one_process(folder: Path) -> None:
    """Contract 25, reversed: row factors are whole on every rank."""
    alone, its = alone_and_trained(6)
    model = make_model("mlp", torch.float32)
    fully_shard(model, mesh=world(), shard_placement_fn=lambda p: Shard(p.dim() - 1))
    optimizer = SELAdam(model.named_parameters(), lr=2e-3, scale_lr=EIGHT)
    train(model, optimizer, range(6))
    agree(model, optimizer, alone, its)
    state = optimizer.state[next(model.parameters())]
    assert state["scale_row"].placements == (Replicate(),) and state["scale_col"].placements == (Shard(0),)


@on(2)
def a_gradient_that_is_not_finite_spoils_its_own_weight_alone(folder: Path) -> None:
    """sel.md 7, over shards. Guard: each rank leaves such elements out before the ranks add up."""
    mesh, bad = world(), numbers((4, 3), 1)
    bad[3, 1] = float("nan")
    p, q = (nn.Parameter(t) for t in (numbers((4, 3), 0) * 0.1, cut(numbers((4, 3), 0) * 0.1, mesh, [Shard(0)])))
    p.grad, q.grad = bad, cut(bad, mesh, [Shard(0)])
    alone, sharded = SELAdam([p], scale_lr=EIGHT), SELAdam([q], scale_lr=EIGHT)
    alone.step()
    sharded.step()
    for key in ("scale_row", "scale_col"):
        assert whole(sharded.state[q][key]).isfinite().all()
        near(whole(sharded.state[q][key]), alone.state[p][key], 1e-6, key)
    torch.testing.assert_close(whole(q.detach()), p.detach(), rtol=1e-6, atol=1e-6, equal_nan=True)
    assert int(whole(q.detach()).isnan().sum()) == 1


@on(2)
def fsdp2_from_param_groups_with_decay_clipping_and_shrinking(folder: Path) -> None:
    """Contract 25. What a real script has: param_groups, a norm over all ranks, init="mismatched" on sharded weights."""

    def make(model: nn.Module) -> SELAdamW:
        return SELAdamW(param_groups(model, weight_decay=0.1), lr=2e-3, init="mismatched", anneal_steps=10)

    def run(model: nn.Module, optimizer: SELAdamW, mine: bool) -> None:
        for k in range(15):
            x, y = (t[(dist.get_rank() if mine else 0) :: 2 if mine else 1] for t in batch(k))
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    alone, model = make_model("mlp", torch.float32), fully_sharded(world())
    its, optimizer = make(alone), make(model)
    for p, q in zip(alone.parameters(), model.parameters(), strict=True):
        near(whole(q.detach()), p.detach(), 1e-6)
    run(alone, its, False)
    run(model, optimizer, True)
    agree(model, optimizer, alone, its)


@on(2)
def fsdp2_in_mixed_precision_keeps_masters(folder: Path) -> None:
    """Contract 25. The model computes in bfloat16; weights and raw stay float32, and the step is that of the same gradients."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_sharded(world(), policy)
    optimizer = SELAdam(model.named_parameters(), lr=2e-3, scale_lr=EIGHT)
    alone = make_model("mlp", torch.float32)
    its = SELAdam(alone.named_parameters(), lr=2e-3, scale_lr=EIGHT)
    for k in range(15):
        x, y = (t[dist.get_rank() :: 2] for t in batch(k))
        optimizer.zero_grad()
        output = model(x)
        assert output.dtype == torch.bfloat16
        (output.float() - y).square().mean().backward()
        for p, q in zip(alone.parameters(), model.parameters(), strict=True):
            assert q.grad is not None
            p.grad = whole(q.grad).clone()
        optimizer.step()
        its.step()
    agree(model, optimizer, alone, its)
    assert {part(v).dtype for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)} == {
        torch.float32
    }


@on(2)
def dtensors_are_one_process(folder: Path) -> None:
    """Contract 25, 26. Even, uneven and empty parts, cut along either side, under every structure.

    Guards: _shards._placements lays factors out; _shards.sums says where they are added up; _shards.total makes beta global.
    """
    mesh = world()
    for structure in ("row_col", "row", "col", "scalar", "none"):
        for shape in ((6, 4), (3, 5), (1, 8), (8, 1), (1, 1)):
            for dim in (0, 1):
                both_ways(shape, [Shard(dim)], mesh, 15 if structure == "row_col" else 3, structure=structure)
        both_ways((5,), [Shard(0)], mesh, 3, structure=structure)
        both_ways((1,), [Shard(0)], mesh, 3, structure=structure)
        both_ways((4, 3), [Replicate()], mesh, 3, structure=structure)
    both_ways((3, 3, 2, 2), [Shard(0)], mesh)
    both_ways((3, 4, 2, 2), [Shard(1)], mesh)
    both_ways((3, 4, 3, 2), [Shard(2)], mesh, structure="row")
    for structure in ("row_col", "scalar"):
        for dim in (0, 1, 2):
            both_ways((3, 5, 4), [Shard(dim)], mesh, 3, structure=structure, batch_dims=1)
    both_ways((3,), [Shard(0)], mesh, batch_dims=1)
    both_ways((0, 4), [Shard(0)], mesh)
    both_ways((), [Replicate()], mesh, 3)


@on(2)
def tensor_parallel_is_one_process(folder: Path) -> None:
    """Contract 25. Weights cut along their rows and along their columns. Guard: local_grad brings a gradient to where p lies."""
    alone, its = alone_and_trained(6)
    model = make_model("mlp", torch.float32)
    plan: dict[str, Any] = {"layers.0": ColwiseParallel(), "layers.2": RowwiseParallel(), "layers.4": ColwiseParallel()}
    parallelize_module(model, world(), {**plan, "layers.6": RowwiseParallel()})
    optimizer = SELAdam(model.named_parameters(), lr=2e-3, scale_lr=EIGHT)
    for k in range(6):
        x, y = batch(k)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    agree(model, optimizer, alone, its)

    mesh = world()
    p, q = (nn.Parameter(cut(numbers((4, 3), 0) * 0.1, mesh, [Shard(1)])) for _ in range(2))
    grad = numbers((4, 3), 1)
    p.grad, q.grad = cut(grad, mesh, [Shard(1)]), DTensor.from_local(grad / 2, mesh, [Partial()], run_check=False)
    for each in (p, q):
        SELAdam([each]).step()
    assert torch.equal(part(p), part(q))


@on(2)
def options_mean_the_same_on_shards(folder: Path) -> None:
    """Contract 26. In float64, to rounding: a choice made from one part would show. Guard: mean_slope and beta are global."""
    mesh = world()
    for dim in (0, 1):
        for options in (
            {"lr_space": "weight"},
            {"amsgrad": True, "betas": (0.5, 0.6)},
            {"weight_decay": 0.1},
            {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
            {"init": "mismatched"},
            {"combine": "congruent", "beta": "width"},
            {"scale_lr": {"e": 2.0, "n": (1.0, 3.0)}, "anneal_steps": 10},
            {"scale_init": {"e": 1.5, "n": 0.1}, "beta": 20.0},
            {"foreach": True},
            {"check_edits": "full"},
            {"lr": torch.tensor(2e-3, dtype=torch.float64)},
        ):
            both_ways((5, 4), [Shard(dim)], mesh, 5, torch.float64, 1e-10, **options)


@on(2)
def many_blocks_are_one(folder: Path) -> None:
    """Contract 26. Guard: _gather adds up the blocks of a part before the ranks add up."""
    block, _execute.BLOCK_ELEMENTS = _execute.BLOCK_ELEMENTS, 8
    try:
        for dim in (0, 1):
            both_ways((9, 6), [Shard(dim)], world(), 5, torch.float64, 1e-10)
    finally:
        _execute.BLOCK_ELEMENTS = block


@on(2)
def the_whole_tensor_decides_whether_it_is_curved(folder: Path) -> None:
    """Contract 26, 28. Each rank's own part would decide otherwise. Guard: init._rms counts all parts."""
    mesh = world()
    small, large = torch.full((2, 4), 0.01), torch.full((2, 4), 1.0)
    p = nn.Parameter(cut(torch.cat((small, large)), mesh, [Shard(0)]))  # rms 0.7: curved, though rank 1 has rms 1
    q = nn.Parameter(cut(torch.cat((small, 2 * large)), mesh, [Shard(0)]))  # rms 1.4: not, though rank 0 has rms 0.01
    assert calibrate_beta(p) == pytest.approx(calibrate_beta(whole(p.detach())), rel=1e-12)
    optimizer = SELAdam([("p", p), ("q", q)])
    saved = optimizer.state_dict()["state"]
    assert "raw" in saved[0] and "raw" not in saved[1]
    assert [name for name, _ in optimizer.named_curved()] == ["p"]
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(cut(torch.cat((small, -large)), mesh, [Shard(0)]))
    alone = torch.cat((small, -large))
    mismatched_(model)
    near(whole(model.weight.detach()), mismatched_(alone), 1e-6)


class Watch(TorchDispatchMode):
    """The largest tensor that any operation returns, in elements, and the operations that gather parts."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.gathers = 0, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and not isinstance(t, DTensor) and not t.is_meta:
                self.largest = max(self.largest, t.numel())
        if any(word in str(func) for word in ("gather", "broadcast_", "scatter", "alltoall")):
            self.gathers.append(str(func))
        return out


def peak(function: Callable[[], object]) -> int:
    """The most bytes that `function` holds at one time beyond what was held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    kineto: Any = profiler.profiler
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@on(2)
def no_rank_holds_a_whole_parameter(folder: Path) -> None:
    """Contract 25. Creation, a step and a save touch nothing larger than this rank's part, and half of one process's memory.

    Guard: the stages run on _shards.local; a full_tensor() anywhere is seen.
    """
    mesh = world()

    def make(rows: int, sharded: bool, **options: Any) -> SELAdam:
        start, grad = numbers((rows, 1024), 0) * 0.02, numbers((rows, 1024), 1)
        p = nn.Parameter(cut(start, mesh, [Shard(0)]) if sharded else start)
        p.grad = cut(grad, mesh, [Shard(0)]) if sharded else grad
        return SELAdam([p], **options)

    watch = Watch()
    with watch:
        optimizer = make(256, True)
    assert watch.largest >= 256 * 1024  # the watch sees: here distribute_tensor was given the whole
    watch = Watch()
    with watch:
        mismatched_(optimizer.param_groups[0]["params"][0])
        optimizer = SELAdam(optimizer.param_groups[0]["params"], init="mismatched")
        for _ in range(2):
            optimizer.step()
        optimizer.state_dict()
        optimizer.stats()
        optimizer.resync()
    assert not watch.gathers
    assert watch.largest == 128 * 1024

    def peak_of(optimizer: SELAdam) -> int:
        return peak(optimizer.step)

    # Beside the state, an inverse holds blocks of constant size: below some 4 million weights these would show.
    assert peak_of(make(4096, True)) < 0.6 * peak_of(make(4096, False))


@on(2)
def the_native_kernel_leaves_shards_alone(folder: Path) -> None:
    """Contract 18, 25. It does a whole step at once, without the other ranks. Guard: _execute.run takes sharded items out first."""
    ready, run_native = _execute.native_is_ready, _execute._run_native

    def native(items: Sequence[Any], *rest: Any) -> None:
        raise AssertionError("a sharded parameter in the native kernel")

    _execute.native_is_ready, _execute._run_native = (lambda device, *, compile: True), native
    try:
        q = nn.Parameter(cut(numbers((4, 3), 0) * 0.1, world(), [Shard(0)]))
        q.grad = cut(numbers((4, 3), 1), world(), [Shard(0)])
        SELAdam([q]).step()
        with pytest.raises(ValueError, match=r"fused=True has no kernel for parameter 0\.0: it is a DTensor"):
            SELAdam([q], fused=True)
    finally:
        _execute.native_is_ready, _execute._run_native = ready, run_native


# ------------------------------------------------------------------------------------- what is decided, and by whom


@on(2)
def a_dummy_step_changes_nothing(folder: Path) -> None:
    """Contract 10, 28. A checkpoint before the first step has every key, moves no bit, and the training is the same after it.

    Guard: SELAdam._only_creates.
    """
    model, plain = fully_sharded(world()), fully_sharded(world())
    optimizer = SELAdam(model.named_parameters(), lr=2e-3, scale_lr=EIGHT)
    its = SELAdam(plain.named_parameters(), lr=2e-3, scale_lr=EIGHT)
    third = fully_sharded(world())
    late = SELAdam(third.named_parameters(), lr=2e-3, scale_lr=EIGHT)
    before = [part(p).clone() for p in model.parameters()]
    saved: Any = get_optimizer_state_dict(model, optimizer)["state"]
    for (name, p), old in zip(model.named_parameters(), before, strict=True):
        assert torch.equal(part(p), old)
        keys = {"raw", "scale_row", "scale_col", "beta", "mean_slope", "exp_avg"} if p.dim() == 2 else {"exp_avg"}
        assert keys | {"step"} <= saved[name].keys() and float(optimizer.state[p]["step"]) == 0
    train(model, optimizer, range(4))
    train(plain, its, range(4))
    for p in third.parameters():
        p.grad = torch.ones_like(p)  # with gradients torch takes no dummy step: state_dict() makes the state
    saved = get_optimizer_state_dict(third, late)["state"]
    assert saved.keys() == dict(third.named_parameters()).keys()
    train(third, late, range(4))
    for p, q, r in zip(model.parameters(), plain.parameters(), third.parameters(), strict=True):
        assert torch.equal(part(p), part(q)) and torch.equal(part(r), part(q))


@on(2)
def a_gradient_on_one_rank_makes_a_step_count_on_all(folder: Path) -> None:
    """Contract 10, 28. Guard: _only_creates asks all ranks (_shards.anywhere)."""
    mesh = world()
    q = nn.Parameter(cut(numbers((4, 3), 0) * 0.1, mesh, [Shard(0)]))
    grad = torch.zeros(4, 3)
    grad[3] = 1.0  # on rank 1 alone
    q.grad = cut(grad, mesh, [Shard(0)])
    optimizer = SELAdam([q], lr=0.0)
    optimizer.step()
    assert float(optimizer.state[q]["step"]) == 1
    same_on_all_ranks(optimizer.state[q]["scale_col_exp_avg"])


def with_state(shape: Sequence[int] = (5, 3), dim: int = 0, **options: Any) -> tuple[nn.Parameter, SELAdam]:
    """A sharded parameter after three steps."""
    mesh = world()
    q = nn.Parameter(cut(numbers(shape, 0) * 0.1, mesh, [Shard(dim)]))
    optimizer = SELAdam([("q", q)], **options)
    for k in range(3):
        go_on(q, optimizer, k)
    return q, optimizer


def go_on(q: nn.Parameter, optimizer: SELAdam, k: int) -> None:
    assert isinstance(q, DTensor)
    q.grad = cut(numbers(q.shape, 50 + k), q.device_mesh, q.placements)
    optimizer.step()


@on(2)
def edits_are_taken_by_all_ranks(folder: Path) -> None:
    """Contract 8, 28. In place on the DTensor, on one rank's part alone, unseen, and before the first step.

    Guard: _agree_on_edits; without it the rank that saw the edit would wait for the others in _take.
    """
    for edit_step in (0, 3):
        for rank in (None, 0, 1):
            q, optimizer = with_state()
            if edit_step == 0:
                q = nn.Parameter(q.detach().clone())
                optimizer = SELAdam([q], beta="auto")
                optimizer.state_dict()
            raw, beta = part(optimizer.raw(q)).clone(), optimizer.beta(q)
            with torch.no_grad():
                if rank is None:
                    q.mul_(2)
                elif rank == dist.get_rank():
                    part(q).mul_(2)
            edited = part(q).clone()
            optimizer.state_dict()
            assert torch.equal(part(q), edited)
            mine = rank is None or rank == dist.get_rank()
            assert torch.equal(part(optimizer.raw(q)), raw) == (not mine and edit_step > 0)
            assert (optimizer.beta(q) == beta) == (edit_step > 0)
            same_on_all_ranks(torch.tensor(optimizer.beta(q), dtype=torch.float64))
            go_on(q, optimizer, 9)
    q, optimizer = with_state(check_edits="full")
    if dist.get_rank() == 1:
        part(q.data).mul_(3)
    edited = part(q).clone()
    optimizer.state_dict()
    assert torch.equal(part(q), edited)
    q, optimizer = with_state()
    q.data.mul_(0.5)
    edited = part(q).clone()
    optimizer.resync()
    optimizer.state_dict()
    assert torch.equal(part(q), edited)


@on(2)
def most_weights_out_of_reach_is_counted_over_all_parts(folder: Path) -> None:
    """Contract 28. Guard: _invert_at counts the lost weights of all parts before it puts scales back to their start."""
    for rows_lost, restarted in ((2, False), (4, True)):
        q, optimizer = with_state((5, 3), scale_lr={"e": None})
        for key in ("scale_row", "scale_col"):
            part(optimizer.state[q][key])[..., 0].fill_(
                0.0 if key == "scale_row" else 1.0
            )  # e = 0: no negative weights
        optimizer._forget(q)
        with torch.no_grad():
            q.copy_(cut(torch.full((5, 3), 0.1), world(), [Shard(0)]))
            q.copy_(
                cut(torch.tensor([-0.1] * 3 * rows_lost + [0.1] * 3 * (5 - rows_lost)).view(5, 3), world(), [Shard(0)])
            )
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer.state_dict()
        assert (whole(optimizer.state[q]["scale_row"])[:, 0] == float(restarted)).all()
        assert any("went back to their start" in str(w.message) for w in said) == restarted
        same_on_all_ranks(optimizer.state[q]["scale_col"])


@on(2)
def a_fault_on_one_rank_is_raised_on_all(folder: Path) -> None:
    """Contract 28. Weights that are not finite or have no inverse. Guards: _on_every_rank, and _take asks all ranks."""
    cases: tuple[tuple[float, dict[str, Any], str], ...] = (
        (float("nan"), {"beta": "auto"}, "weights that are not finite"),
        (float("nan"), {}, "non-finite weights|its part on another rank"),
        (float("inf"), {"beta": 12.5}, "non-finite weights|its part on another rank"),
        (float("nan"), {"beta": 12.5, "init": "mismatched"}, "is not finite|its part on another rank"),
        (-0.1, {"beta": 0.5}, "has no inverse|its part on another rank"),
    )
    for bad, options, words in cases:
        start = torch.full((4, 3), 0.1)
        start[3, 2] = bad  # on rank 1
        q = nn.Parameter(cut(start, world(), [Shard(0)]))
        q.grad = cut(torch.ones(4, 3), world(), [Shard(0)])
        with pytest.raises(ValueError, match=f"parameter q: .*({words})"):
            SELAdam([("q", q)], **options).step()
        torch.testing.assert_close(part(q), part(cut(start, world(), [Shard(0)])), rtol=0, atol=0, equal_nan=True)
    q, optimizer = with_state()
    if dist.get_rank() == 1:
        part(q).fill_(float("nan"))
    with pytest.raises(ValueError, match="parameter q was edited and has non-finite weights"):
        optimizer.state_dict()


@on(2)
def accessors_do_not_wait_for_other_ranks(folder: Path) -> None:
    """api.md: before the state exists they raise, afterwards each rank may read alone. Guard: _refuse_alone."""
    mesh = world()
    q = nn.Parameter(cut(numbers((5, 3), 0) * 0.1, mesh, [Shard(0)]))
    optimizer = SELAdam([("q", q), ("bias", nn.Parameter(cut(numbers((3,), 0), mesh, [Shard(0)])))])
    asked: list[Callable[[], Any]] = [
        lambda: optimizer.raw(q),
        lambda: optimizer.scales(q),
        lambda: optimizer.beta(q),
        lambda: list(optimizer.named_curved()),
        lambda: optimizer.resync(q),
        optimizer.stats,
    ]
    if dist.get_rank() == 0:  # the other rank is not there
        for ask in asked:
            with pytest.raises(
                RuntimeError, match="parameter q is a DTensor and has no state yet; all ranks make it together"
            ):
                ask()
        assert "decided in step()" in optimizer.describe()
    optimizer.state_dict()
    go_on(q, optimizer, 0)
    if dist.get_rank() == 0:
        raw, scales = optimizer.raw(q), optimizer.scales(q)
        assert isinstance(raw, DTensor) and isinstance(q, DTensor)
        assert raw.shape == q.shape and raw.placements == q.placements
        row, col = scales["e"]
        assert row.shape == (5, 1) and col.shape == (1, 3) and part(row).shape == (3, 1)
        assert [name for name, _ in optimizer.named_curved()] == ["q"]
        assert optimizer.describe().splitlines()[1].split()[:3] == ["q", "5x3", "mismatched"]
        stats = optimizer.stats()
        assert stats["q/scale_e_mean"] == pytest.approx(float((part(row) * part(col)).mean()), rel=1e-5)
        assert "q/step_largest_decile" in stats
        written: list[str] = []
        note = staticmethod(lambda name, *rest: written.append(name))
        writer: Any = type("Writer", (), {"add_scalar": note, "add_histogram": note})()
        log_scales(writer, optimizer, 0, histograms=True)
        assert written == [*stats, "q/weight", "q/weight_raw"]
    for dim, structure in ((0, "row"), (0, "col"), (1, "row_col"), (1, "scalar")):
        q, optimizer = with_state((3, 4, 2, 2), dim, structure=structure)
        alone = SELAdam([p := nn.Parameter(whole(q.detach()).clone())], structure=structure)
        for kind, (row, col) in optimizer.scales(q).items():
            its = alone.scales(p)[kind]
            assert (row.shape, col.shape) == (its[0].shape, its[1].shape)
            assert whole(row * col).shape == (its[0] * its[1]).shape
    q, optimizer = with_state((1, 8))
    stats = optimizer.stats()
    assert bool(stats) == (dist.get_rank() == 0)  # the other rank has no row of it


# ------------------------------------------------------------------------------------------------ what is refused


@on(2)
def what_is_not_served_says_so(folder: Path) -> None:
    """Contract 23, 25, 27. Guards: _refuse_shards and _shards.fault; _refuse_flattened."""
    mesh = world()

    def parameter(shape: Sequence[int] = (4, 3), dim: int = 0) -> nn.Parameter:
        return nn.Parameter(cut(numbers(shape, 0) * 0.1, mesh, [Shard(dim)]))

    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: SELAdam([parameter()], residual_rank=1), "residual_rank is not available for a DTensor"),
        (lambda: SELAdam([parameter()], capturable=True), "capturable=True is not available for a DTensor"),
        (lambda: Curved(torch.optim.SGD, [parameter()], lr=0.1), "use SELAdam for sharded parameters"),
        (lambda: SELAdam([parameter((3, 3, 2, 2), 1)]), "3 entries along dimension 1 on 2 ranks"),
        (lambda: SELAdam([parameter((3, 4, 2, 2), 2)]), "cut along dimension 2"),
    ]
    for make, words in refused:
        with pytest.raises(ValueError, match=words):
            make()
    partial_sum = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()], run_check=False))
    with pytest.raises(ValueError, match=r"its placement is .*; use Shard or Replicate"):
        SELAdam([partial_sum])
    _, optimizer = with_state()
    with pytest.raises(
        ValueError, match=r"the saved state of parameter 0\.0 is cut over ranks and the parameter is not"
    ):
        SELAdam([nn.Parameter(torch.ones(5, 3))]).load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"its state is cut over ranks; gather it before.*full_state_dict=True"):
        to_adam(optimizer)

    for use_orig_params in (False, True):
        model = make_model("mlp", torch.float32)
        early = SELAdam(model.named_parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, on FSDP1
            model = FullyShardedDataParallel(
                model, use_orig_params=use_orig_params, device_id=torch.device("cpu"), process_group=dist.group.WORLD
            )
        for groups in (list(model.named_parameters()), param_groups(model)):
            with pytest.raises(ValueError, match=r"was flattened by FullyShardedDataParallel.*use .*fully_shard"):
                SELAdam(groups)
        if use_orig_params:
            model(batch(0)[0]).sum().backward()
            with pytest.raises(ValueError, match="was flattened by FullyShardedDataParallel"):
                early.step()


@on(2)
def zero_redundancy_is_one_process(folder: Path) -> None:
    """Contract 27. It hands **defaults on, gives each rank whole parameters, and a rank with none an empty group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own import of its deprecated compiler
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(model: nn.Module) -> Any:
        return ZeroRedundancyOptimizer(model.parameters(), SELAdam, lr=2e-3, scale_lr=EIGHT, anneal_steps=10)

    alone, _ = alone_and_trained(8, anneal_steps=10)
    model = DistributedDataParallel(make_model("mlp", torch.float32))
    optimizer = make(model)
    train(model, optimizer, range(5))
    optimizer.consolidate_state_dict(to=0)
    states: list[Any] = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(states, src=0)
    resumed = DistributedDataParallel(copy.deepcopy(model.module))
    again = make(resumed)
    again.load_state_dict(copy.deepcopy(states[0]))  # rank 0 has live tensors in it, and torch does not copy them here
    for each, its_optimizer in ((model, optimizer), (resumed, again)):
        train(each, its_optimizer, range(5, 8))
        for p, q in zip(alone.parameters(), each.parameters(), strict=True):
            near(q.detach(), p.detach(), 1e-5)
            same_on_all_ranks(q)
    assert any("raw" in state for state in optimizer.optim.state.values())
    lone = nn.Linear(6, 4, bias=False)
    nn.init.constant_(lone.weight, 0.1)
    few = make(DistributedDataParallel(lone))
    lone(torch.ones(2, 6)).sum().backward()
    few.step()
    same_on_all_ranks(lone.weight)
    assert float(lone.weight.detach().max()) < 0.1


# ------------------------------------------------------------------------------------------------------ checkpoints


@on(2)
def a_checkpoint_resumes_in_every_bit_and_on_other_numbers_of_ranks(folder: Path) -> None:
    """Contract 28, 1. Guard: _reinstall keeps the parts as they were saved; factors are DTensors, not each rank's own."""
    options = {"lr": 2e-3, "scale_lr": EIGHT, "anneal_steps": 12}
    model = fully_sharded(world())
    optimizer = SELAdam(model.named_parameters(), **options)
    train(model, optimizer, range(4))
    weights, state = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "two")
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=full)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": state}, folder / "full.pt")
    train(model, optimizer, range(4, 8))

    def other(model: nn.Module) -> nn.Module:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        return model

    def resume(model: nn.Module, **how: Any) -> SELAdam:
        again = SELAdam(model.named_parameters(), **options)
        weights, state = get_state_dict(model, again)
        state_dict_loader.load({"model": weights, "optimizer": state}, checkpoint_id=folder / "two", **how)
        set_state_dict(model, again, model_state_dict=weights, optim_state_dict=state)
        return again

    resumed = other(fully_sharded(world()))
    again = resume(resumed)
    train(resumed, again, range(4, 8))
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(part(p), part(q))
        assert optimizer.state[p].keys() == again.state[q].keys()
        for key, value in optimizer.state[p].items():
            assert torch.equal(
                torch.as_tensor(part(torch.as_tensor(value))), part(torch.as_tensor(again.state[q][key]))
            ), key

    single = other(make_model("mlp", torch.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on reading without a process group
        alone = resume(single, no_dist=True)
    train(single, alone, range(4, 8), mine=False)
    agree(model, optimizer, single, alone)

    saved = torch.load(folder / "full.pt", weights_only=True)
    assert to_adam_state(saved["optimizer"])["state"]["layers.0.weight"]["exp_avg"].shape == (6, 6)
    single = other(make_model("mlp", torch.float32))
    alone = SELAdam(single.named_parameters(), **options)
    set_state_dict(single, alone, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    train(single, alone, range(4, 8), mine=False)
    agree(model, optimizer, single, alone)
    saved = torch.load(folder / "full.pt", weights_only=True)
    resumed = other(fully_sharded(world()))
    again = SELAdam(resumed.named_parameters(), **options)
    set_model_state_dict(resumed, saved["model"], options=full)
    set_optimizer_state_dict(resumed, again, saved["optimizer"], options=full)
    train(resumed, again, range(4, 8))
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(part(p), part(q))


@on(2)
def states_of_one_process_load_onto_shards(folder: Path) -> None:
    """Contract 6, 28. SELAdam's own by load_state_dict, and torch.optim.Adam's, converted. Guard: _shards.placed cuts them."""
    single = make_model("mlp", torch.float32)
    alone = SELAdam(single.named_parameters(), lr=2e-3)
    train(single, alone, range(3), mine=False)
    adams = make_model("mlp", torch.float32)
    adam = torch.optim.Adam(adams.parameters(), lr=2e-3)
    train(adams, adam, range(3), mine=False)
    for source, its in ((single, alone), (adams, adam)):
        model = fully_sharded(world())
        set_model_state_dict(model, source.state_dict(), options=StateDictOptions(full_state_dict=True))
        optimizer = SELAdam(model.named_parameters(), lr=2e-3)
        optimizer.load_state_dict(copy.deepcopy(its.state_dict()))
        if its is adam:
            its = SELAdam(source.named_parameters(), lr=2e-3)
            its.load_state_dict(adam.state_dict())
        train(model, optimizer, range(3, 8))
        train(source, its, range(3, 8), mine=False)
        assert isinstance(its, SELAdam)
        agree(model, optimizer, source, its)


# -------------------------------------------------------------------------------------------------------- four ranks


@on(4)
def meshes_of_two_dimensions(folder: Path) -> None:
    """Contract 25. Replicated and sharded, and cut both ways. Guard: _shards.sums names the dimensions that cut a sum."""
    mesh = init_device_mesh("cpu", (2, 2))
    for shape in ((6, 4), (3, 5)):
        for placements in (
            [Replicate(), Shard(0)],
            [Shard(0), Replicate()],
            [Shard(0), Shard(1)],
            [Shard(1), Shard(0)],
        ):
            both_ways(shape, placements, mesh, 3)
        both_ways(shape, [Shard(0), Shard(1)], mesh, 3, structure="scalar")
    both_ways((8, 5), [Shard(0), Shard(0)], mesh, 3)
    both_ways((4, 3, 5), [Shard(0), Shard(1)], mesh, 3, batch_dims=1)
    both_ways((5,), [Replicate(), Shard(0)], mesh, 3)


@on(4)
def hybrid_sharding_is_one_process(folder: Path) -> None:
    """Contract 25. fully_shard on a mesh (replicate, shard); the checkpoint of four ranks on one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    alone, its = alone_and_trained(6)
    model = fully_sharded(mesh)
    optimizer = SELAdam(model.named_parameters(), lr=2e-3, scale_lr=EIGHT)
    train(model, optimizer, range(6))
    agree(model, optimizer, alone, its)


# --------------------------------------------------------------------------------------------------------- the tests


def test_flat_vectors_in_the_place_of_matrices_are_refused() -> None:
    """Contract 23: what DeepSpeed's ZeRO does to each group. Guard: SELOptimizer._refuse_flat_groups."""
    model = make_model("mlp", torch.float32)
    by_name = {"params": model.named_parameters(), "curved": lambda name, p: p.dim() > 1}
    aside = {"params": [("aside", nn.Parameter(torch.ones(2, 2)))]}
    for groups in (list(model.parameters()), param_groups(model), [by_name], [*param_groups(model), aside]):
        optimizer = SELAdam(groups)
        for group in optimizer.param_groups[:2]:
            group["params"] = [nn.Parameter(torch.cat([p.detach().flatten() for p in group["params"]]))]
        for each in (optimizer, copy.deepcopy(optimizer)):
            with_ones(each)
            with pytest.raises(ValueError, match=r"parameter 0\.0 is a flat vector .*, as DeepSpeed's ZeRO leaves"):
                each.step()
        for group in optimizer.param_groups:
            group["curved"] = False
        optimizer.step()


def test_vectors_that_are_nobodys_part_are_not_taken_for_one() -> None:
    """Groups may be popped, rebuilt and exchanged. Guard: _refuse_flat_groups looks at the shapes that were added."""
    for change in ("pop", "rebuild", "exchange", "curved"):
        model = make_model("mlp", torch.float32)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        biases = [p for p in model.parameters() if p.dim() < 2]
        optimizer = SELAdam([{"params": matrices}, {"params": biases}])
        first, second = optimizer.param_groups
        if change == "pop":
            optimizer.param_groups.pop(0)
        elif change == "rebuild":
            optimizer.param_groups = [{**first, "params": biases}]
        elif change == "exchange":  # as Accelerate does, into tensors of the same shapes
            for group in (first, second):
                group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]
        else:
            optimizer = SELAdam([{"params": matrices, "curved": lambda name, p: False}])
            optimizer.param_groups[0]["params"] = [nn.Parameter(torch.ones(7))]
            optimizer.param_groups[0]["curved"] = [False]
        with_ones(optimizer)
        optimizer.step()


def with_ones(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folders = {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks, checks in CHECKS.items() if checks}
    for ranks, folder in folders.items():
        spawn(run_checks, (ranks, folder), nprocs=ranks)
    return folders


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, checks in CHECKS.items() for name in checks])
def test_ranks(ranks: int, name: str, results: dict[int, Path]) -> None:
    """Contract 10 and 25-28; what each check is of and its guard stand in its own docstring."""
    for rank in range(ranks):
        report = results[ranks] / name / f"rank{rank}"
        if not report.exists():
            pytest.fail("a check before this one failed", pytrace=False)
        if not report.read_text().startswith("passed"):
            pytest.fail(f"rank {rank}: {report.read_text()}", pytrace=False)
