"""Many ranks: gloo on the CPU. A check runs on every rank of one process group; starting one costs more than the checks."""

from __future__ import annotations

import copy
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
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
    store = dist.FileStore(str(folder / "store"), ranks)
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
    more = {"mp_policy": policy} if policy else {}
    for layer in model.layers:  # type: ignore[union-attr]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **more)
    fully_shard(model, mesh=mesh, **more)
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
    assert {part(v).dtype for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)} == {torch.float32}


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
    """Contract 26. Guard: _over_blocks gathers the blocks of a part before the ranks add up."""
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
    held = most = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@on(2)
def no_rank_holds_a_whole_parameter(folder: Path) -> None:
    """Contract 25. Creation, a step and a save touch nothing larger than this rank's part, and half of one process's memory.

    Guard: the stages run on _shards.local; a full_tensor() anywhere is seen.
    """
    mesh = world()
    start, grad = mixed(1024, 512, size=0.02, dtype=torch.float32), mixed(1024, 512, seed=1, dtype=torch.float32)

    def make(sharded: bool) -> SELAdam:
        p = nn.Parameter(cut(start, mesh, [Shard(0)]) if sharded else start.clone())
        p.grad = cut(grad, mesh, [Shard(0)]) if sharded else grad
        return SELAdam([p], init="mismatched")

    watch = Watch()
    with watch:
        make(True)
    assert watch.largest >= start.numel()  # the watch sees: here distribute_tensor was given the whole
    optimizer = make(True)
    watch = Watch()
    with watch:
        for _ in range(2):
            optimizer.step()
        optimizer.state_dict()
        optimizer.stats()
        optimizer.resync()
    assert not watch.gathers
    assert watch.largest == start.numel() // 2

    def peak_of(optimizer: SELAdam) -> int:
        return peak(lambda: (optimizer.step(), optimizer.step()))

    assert peak_of(make(True)) < 0.6 * peak_of(make(False))


# --------------------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folders = {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks, checks in CHECKS.items() if checks}
    for ranks, folder in folders.items():
        mp.spawn(run_checks, (ranks, folder), nprocs=ranks)
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
