"""What train_gpt.py does differently on many processes, started by torchrun. On one process every function is the obvious thing."""

import contextlib
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


def started_by_torchrun():
    return "LOCAL_RANK" in os.environ


def join(args):
    """Join the other processes, each with a GPU of its own where there are GPUs."""
    if torch.device(args.device).type == "cuda":
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(args.device)
    dist.init_process_group()


def leave():
    if dist.is_initialized():
        dist.destroy_process_group()


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def ranks():
    return dist.get_world_size() if dist.is_initialized() else 1


def distribute(model, make_empty, args):
    """(model, what is called in its place): copies that average their gradients, or one model cut over all processes."""
    if args.parallel == "ddp":
        return model, DistributedDataParallel(model)
    if args.parallel is None:
        return model, model
    # One process holds the whole model, on the host; the others get their parts of it.
    weights = model.state_dict() if rank() == 0 else {}
    with torch.device("meta"):
        model = make_empty()
    model.to(getattr(torch, args.dtype))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.autocast else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=args.device)
    set_whole_weights(model, weights)
    return model, model


def set_whole_weights(model, weights):
    """Weights that process 0 has, into a model that is cut or not."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.is_initialized())
    set_model_state_dict(model, weights, options=options)


@contextlib.contextmanager
def micro_batch(call, last):
    """Gradients are added up over the processes once a step, in the last micro-batch."""
    if isinstance(call, FSDPModule):
        call.set_requires_gradient_sync(last)
    with call.no_sync() if isinstance(call, DistributedDataParallel) and not last else contextlib.nullcontext():
        yield


def mean(*numbers):
    """Means over the processes."""
    if not dist.is_initialized():
        return numbers
    summed = torch.tensor(numbers, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(summed)
    return (summed / ranks()).tolist()


def anywhere(flag):
    """Whether the flag is set on any process: a Ctrl-C need not reach all before the same step."""
    return mean(float(bool(flag)))[0] > 0


def whole(value):
    """A copy of a state with every cut tensor put together, one at a time, on the host of process 0."""
    if isinstance(value, dict):
        return {key: whole(inner) for key, inner in value.items()}
    if isinstance(value, DTensor):
        full = joined(value)
        return full.cpu() if rank() == 0 else None
    return value


def part_of(optimizer, state):
    """A saved state with the tensors that look like their parameter cut like it. SELAdam cuts its factors itself."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {**state, "state": {at: {k: _cut(v, params[at]) for k, v in s.items()} for at, s in state["state"].items()}}


def _cut(value, p):
    if isinstance(p, DTensor) and torch.is_tensor(value) and value.shape == p.shape:
        return distribute_tensor(value.to(p.device), p.device_mesh, p.placements, src_data_rank=None)
    return value


def joined(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t
