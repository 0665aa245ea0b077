"""Parameters that lie in parts on many ranks (DTensor): which part of the state each rank holds, and how the ranks agree.

raw and its moments lie as the parameter does. A factor follows the dimension that it runs along and is whole on every rank
along the others; where the parameter is cut and the factor is not, each rank has one part of the sum that is its gradient.
Everything here gives back a plain tensor as it is, and communicates only for a DTensor: then all its ranks must call.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class Sums(NamedTuple):
    """The dimensions of a mesh over which the gradient of each factor of one parameter must be summed."""

    mesh: "DeviceMesh"
    scale_row: tuple[int, ...]
    scale_col: tuple[int, ...]


def is_sharded(t: Any) -> bool:
    """Whether a tensor is a DTensor; without importing what makes them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def local(t: Tensor) -> Tensor:
    """This rank's part of a tensor, as a plain tensor in the same memory."""
    if not is_sharded(t):
        return t.detach()
    with torch.no_grad():
        return t.to_local()  # type: ignore[attr-defined]


def local_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state with this rank's part of each tensor; the state itself where it is not cut, which its first tensor tells."""
    if not is_sharded(state["raw"] if "raw" in state else state["exp_avg"]):
        return state
    return {key: local(value) if isinstance(value, Tensor) else value for key, value in state.items()}


def local_grad(p: Tensor) -> Tensor:
    """This rank's part of p.grad, cut as p is; autograd may leave it as a sum that is still to be made."""
    grad = p.grad
    assert grad is not None
    if is_sharded(p) and is_sharded(grad) and grad.placements != p.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    return local(grad)


# ------------------------------------------------------------------------------------------------------- how state lies


def fault(p: Tensor, batch_dims: int, structure: str) -> str | None:
    """Why the state of a sharded parameter cannot be laid out; None where it can, and for plain tensors."""
    if not is_sharded(p):
        return None
    d: DTensor = p  # type: ignore[assignment]
    if d.device_mesh.get_coordinate() is None:
        return "this rank is no part of its mesh; give the optimizer only parameters of which this rank holds a part"
    for size, placement in zip(d.device_mesh.shape, d.placements, strict=True):
        if placement.is_replicate():
            continue
        dim = _dim(placement)
        if dim is None:
            return f"its placement is {placement}; use Shard or Replicate"
        if structure not in ("row_col", "col") or dim <= batch_dims:
            continue
        if dim > batch_dims + 1:
            return (
                f"it is cut along dimension {dim}, which is one of several behind its column factors; "
                f"shard dimension {batch_dims} or use structure='row'"
            )
        if p.dim() > batch_dims + 2 and p.shape[dim] % size:
            return (
                f"it has {p.shape[dim]} entries along dimension {dim} on {size} ranks, which cut its column factors unevenly; "
                f"shard dimension {batch_dims} or use structure='row'"
            )
    return None


def placed(p: Tensor, key: str, value: Tensor, batch_dims: int, structure: str) -> Tensor:
    """A state tensor that is whole, or cut in any way, cut as the state of `p` is; `value` itself where p is plain."""
    if not is_sharded(p):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = p.device_mesh, _placements(p, key, value.shape, batch_dims, structure)  # type: ignore[attr-defined]
    if is_sharded(value):
        return value.redistribute(mesh, placements)  # type: ignore[attr-defined]
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def assembled(p: Tensor, state: Mapping[str, Any], batch_dims: int, structure: str) -> dict[str, Any]:
    """The state made from this rank's part of p, as the state of p. The count of steps and plain numbers stay."""
    if not is_sharded(p):
        return dict(state)
    rows, cols = _sides(p.shape, batch_dims)
    lead = tuple(p.shape[:batch_dims])
    whole: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or key == "step":
            whole[key] = value
            continue
        if key.startswith("scale_row"):
            shape = (*lead, 1 if structure in ("scalar", "none") else rows, value.shape[-1])
        elif key.startswith("scale_col"):
            shape = (*lead, cols, value.shape[-1])
        else:
            shape = tuple(p.shape)
        whole[key] = wrap(p, value, shape, _placements(p, key, shape, batch_dims, structure))
    return whole


def wrap(p: Tensor, part: Tensor, shape: Sequence[int], placements: Sequence[Any]) -> Tensor:
    """The tensor of this shape of which `part` is this rank's, on p's mesh."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        part.contiguous(),
        p.device_mesh,  # type: ignore[attr-defined]
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def broadcasting(p: Tensor, part: Tensor, factor: Tensor | None, batch_dims: int, is_row: bool) -> Tensor:
    """The tensor that broadcasts to p and of which `part` is this rank's: a kind of `factor`, or ones where there is none."""
    if not is_sharded(p):
        return part
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if factor is None else own for own in (factor if factor is not None else p).placements]  # type: ignore[attr-defined]
    lead, inner = tuple(p.shape[:batch_dims]), tuple(p.shape[batch_dims:])
    if factor is None:
        return wrap(p, part, part.shape, placements)
    if not inner:
        return wrap(p, part, lead, placements)
    if is_row:
        return wrap(p, part, (*lead, factor.shape[-2], *(1,) * (len(inner) - 1)), placements)
    placements = [_along(own, batch_dims + 1) if _dim(own) == batch_dims else own for own in placements]
    return wrap(p, part, (*lead, 1, *inner[1:]), placements)


def _sides(shape: Sequence[int], batch_dims: int) -> tuple[int, int]:
    rest = tuple(shape[batch_dims:])
    cols = 1
    for size in rest[1:]:
        cols *= size
    return (rest[0] if rest else 1), cols


def _placements(p: Tensor, key: str, shape: Sequence[int], batch_dims: int, structure: str) -> list[Any]:
    """How the state tensor `key` of this shape lies, given how p does."""
    from torch.distributed.tensor import Replicate

    if not key.startswith("scale"):
        return list(p.placements)  # type: ignore[attr-defined]
    rows, _ = _sides(p.shape, batch_dims)
    if key.startswith("scale_col"):
        own = batch_dims + 1
    elif shape[-2] != rows or (rows == 1 and structure in ("scalar", "none")):
        own = None  # one number for all rows
    else:
        own = batch_dims
    found: list[Any] = []
    for placement in p.placements:  # type: ignore[attr-defined]
        dim = _dim(placement)
        if dim is not None and dim < batch_dims:
            found.append(placement)
        elif dim is not None and dim == own:
            found.append(_along(placement, batch_dims))
        else:
            found.append(Replicate())
    return found


def _dim(placement: Any) -> int | None:
    """The dimension that a placement cuts."""
    return None if placement.is_replicate() or placement.is_partial() else placement.dim


def _along(placement: Any, dim: int) -> Any:
    """The same cut through another dimension."""
    if placement.dim == dim:
        return placement
    more = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
    return type(placement)(dim, **more)


# ------------------------------------------------------------------------------------------------------ how ranks agree


def sums(p: Tensor, state: Mapping[str, Any]) -> Sums | None:
    """Where the gradients of the factors must be summed; None for a plain tensor."""
    if not is_sharded(p):
        return None
    mine = p.placements  # type: ignore[attr-defined]

    def over(key: str) -> tuple[int, ...]:
        if key not in state:
            return ()
        pairs = enumerate(zip(mine, state[key].placements, strict=True))
        return tuple(i for i, (whole, factor) in pairs if not whole.is_replicate() and factor.is_replicate())

    return Sums(p.device_mesh, over("scale_row"), over("scale_col"))  # type: ignore[attr-defined]


def add_up(parts: Iterable[tuple[Tensor, "DeviceMesh", tuple[int, ...]]]) -> None:
    """Sum each tensor over these dimensions of its mesh, in place; tensors that go the same way go together."""
    together: dict[tuple[Any, ...], list[Tensor]] = {}
    for part, mesh, dims in parts:
        if dims:
            together.setdefault((mesh, dims, part.dtype, part.device), []).append(part)
    for (mesh, dims, *_), members in together.items():
        # On the mesh's device: FSDP may offload parameters to hosts, whose tensors its collectives do not take.
        flat = torch.cat([part.reshape(-1) for part in members]).to(mesh.device_type)
        for dim in dims:
            dist.all_reduce(flat, group=mesh.get_group(dim))
        for part, total in zip(members, flat.split([part.numel() for part in members]), strict=True):
            part.copy_(total.view(part.shape))


def total(p: Tensor, *numbers: float) -> list[float]:
    """The sums of each number over the parts of p, the same bits on every rank."""
    if not is_sharded(p):
        return list(numbers)
    cut = tuple(i for i, placement in enumerate(p.placements) if not placement.is_replicate())  # type: ignore[attr-defined]
    summed = torch.tensor(numbers, dtype=torch.float64, device=p.device)
    add_up([(summed, p.device_mesh, cut)])  # type: ignore[attr-defined]
    return summed.tolist()


def anywhere(params: Sequence[Tensor], flags: Sequence[bool]) -> list[bool]:
    """For each parameter whether the flag is set on any of its ranks; one collective for each mesh."""
    found = list(flags)
    by_mesh: dict[Any, list[int]] = {}
    for i, p in enumerate(params):
        if is_sharded(p):
            by_mesh.setdefault(p.device_mesh, []).append(i)  # type: ignore[attr-defined]
    for mesh, members in by_mesh.items():
        raised = torch.tensor([found[i] for i in members], dtype=torch.int32, device=mesh.device_type)
        for dim in range(mesh.ndim):
            dist.all_reduce(raised, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        for i, flag in zip(members, raised.tolist(), strict=True):
            found[i] = bool(flag)
    return found
