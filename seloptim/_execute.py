"""Takes many (parameter, gradient, state) and runs the stages of _rule over them: one by one, or in stacks.

No arithmetic of its own. On a CPU the stages run over blocks of rows whose temporaries stay in cache: at 1024 x 1024 that
is 2.5 times faster than over whole matrices, whose temporaries are fetched from memory and mapped anew at each operation.
"""

import itertools
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _rule, _shards, kernels
from ._rule import Curve, Hyper, Pulled, Scales, Slot, Views

logger = logging.getLogger("seloptim")

NATIVE = {"cpu": "cpu", "cuda": "triton"}  # device type -> module of kernels
NATIVE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BLOCK_ELEMENTS = 1 << 18  # 1 MiB of float32 a temporary
BY_ROW = ("raw", "scale_row", "residual_b")  # of the state, what has rows
STACK_BYTES = 64 << 20  # on an accelerator; on a CPU a stack is one block, since a larger one only adds copies


class Call(NamedTuple):
    """What the CPU kernel is called with for one parameter in every step; no gradient, and no number that changes."""

    tensors: list[Tensor]
    ints: tuple[int, ...]
    beta: float


class Item(NamedTuple):
    """One parameter's part of a step."""

    param: Tensor
    grad: Tensor
    state: Views
    curve: Curve
    step: float | Tensor  # counts this step; a tensor, 0-d and float64, stays on the parameter's device
    slope: float  # what lr is divided by for raw
    # (kinds,): multiples of lr at this step, 0 where frozen; numbers where step is one, in the state's dtype where it is not.
    rates: Sequence[float] | Tensor
    sums: _shards.Sums | None = None  # of a DTensor, of which all the above is this rank's part
    # Of the state's tensors: 1 where they are batches of matrices, as all but the CPU kernel need them.
    batch_dims: int = 1
    call: Call | None = None  # None where no native kernel knows the parameter
    counter: Tensor | None = None  # of steps, in the state: `run` raises it by one

    def shape(self) -> tuple[int, int, int]:
        return _rule.matrix_shape(self.state.raw.value.shape, self.batch_dims)

    def in_batches(self) -> "Item":
        return self._replace(state=_rule.in_batches(self.state, self.shape()), batch_dims=1)


class Block(NamedTuple):
    """Some rows of a matrix, or some matrices of a batch."""

    state: Views  # raw and the residual's part; of the factors Blocks.scales has it
    weight: Tensor
    grad: Tensor


class Blocks:
    """A batch of matrices (batch, rows, cols) in blocks that fit the cache; on an accelerator all of it is one block."""

    def __init__(self, weight: Tensor, grad: Tensor, state: Views) -> None:
        self.weight, self.grad, self.state = weight, grad, state
        self.raw = state.raw.value
        batch, rows, cols = self.raw.shape
        self._batch, self._rows, self._by_row = max(1, batch), max(1, rows), 1
        if self.raw.device.type == "cpu" and self.raw.numel() > BLOCK_ELEMENTS:
            self._batch = max(1, BLOCK_ELEMENTS // (rows * cols))
            if rows * cols > BLOCK_ELEMENTS:
                self._rows = max(1, BLOCK_ELEMENTS // cols)
                self._by_row = -(-rows // self._rows)
        if self._batch >= batch and self._by_row == 1:
            self.blocks = [Block(state, weight, grad)]
            return
        slots = [self._slots(name) for name in ("raw", "residual_b", "residual_a")]
        self.blocks = [
            Block(Views(raw, None, None, b, a), w, g)  # type: ignore[arg-type]
            for (raw, b, a), w, g in zip(zip(*slots, strict=False), self.pieces(weight), self.pieces(grad), strict=True)
        ]

    def pieces(self, tensor: Tensor, by_row: bool = True) -> list[Tensor]:
        """A tensor (batch, rows, ...) as one view a block; one without rows, or with one for all, serves every row."""
        by_batch = tensor.split(self._batch) if self._batch < tensor.shape[0] else (tensor,)
        if not by_row or tensor.shape[1] == 1:
            return [piece for piece in by_batch for _ in range(self._by_row)]
        return [row for piece in by_batch for row in piece.split(self._rows, 1)]

    def scales(self, curve: Curve) -> tuple[Scales, Iterable[Scales]]:
        """The scales as they are now, unpacked, and each block's part of them."""
        scales = _rule.unpack(*_rule.factors(self.state), curve)
        if len(self.blocks) == 1:
            return scales, [scales]

        def vectors(of: tuple[Tensor, ...], by_row: bool) -> Iterable[tuple[Tensor, ...]]:
            return zip(*(self.pieces(v, by_row) for v in of), strict=True) if of else itertools.repeat(())

        # A stack, whose matrices have a curvature each and units in tensors, is never cut.
        return scales, (
            Scales(row, col, scales.row_units, scales.col_units)
            for row, col, _ in zip(vectors(scales.row, True), vectors(scales.col, False), self.blocks, strict=False)
        )

    def totals(self, curve: Curve, scales: Scales, pulled: list[Pulled]) -> dict[str, Tensor]:
        """The gradients of what trains beside raw, each from what the blocks found."""
        totals: dict[str, Tensor] = {}
        for name in _rule.VALUES[1:]:
            slot: Slot | None = getattr(self.state, name)
            scale = name.startswith("scale")
            if slot is not None and (curve.learned or not scale):
                total = self._gather(slot.value, [getattr(found, name) for found in pulled], name in BY_ROW)
                totals[name] = _rule.in_units(name, total, scales, curve) if scale else total
        return totals

    def _slots(self, name: str) -> Iterable[Slot | None]:
        slot: Slot | None = getattr(self.state, name)
        if slot is None:
            return itertools.repeat(None)
        parts = (itertools.repeat(None) if t is None else self.pieces(t, name in BY_ROW) for t in slot)
        return itertools.starmap(Slot, zip(*parts, strict=False))

    def _gather(self, like: Tensor, parts: list[Tensor], by_row: bool) -> Tensor:
        """In the order of the blocks, so that runs repeat bit for bit."""
        if len(parts) == 1:
            return parts[0]
        total = like.new_zeros((*like.shape[:2], parts[0].shape[2]))
        for target, part in zip(self.pieces(total, by_row), parts, strict=True):
            target.add_(part)
        return total


class Scratch:
    """Memory for the temporaries of a block, which the next block takes again.

    On a CPU memory that is fresh from the system takes longer to arrive than most operations on it; an accelerator's allocator
    keeps what it had.
    """

    def __init__(self) -> None:
        self._memory: list[Tensor] = []
        self._views: list[Tensor] = []  # of that memory, like the block
        self._taken = 0

    def fit(self, block: Tensor) -> None:
        """From here on `new` is asked for memory like this; of what was taken nothing is needed any more."""
        self._taken = 0
        if self._views and (self._views[0].shape != block.shape or self._views[0].dtype != block.dtype):
            self._views = []

    def new(self, like: Tensor) -> Tensor:
        """As torch.empty_like, contiguous, of the block's shape and dtype."""
        if like.device.type != "cpu":
            return torch.empty_like(like)
        i, size = self._taken, like.numel()
        self._taken += 1
        if i == len(self._views):
            if i == len(self._memory):
                self._memory.append(like.new_empty(size))
            elif self._memory[i].numel() < size or self._memory[i].dtype != like.dtype:
                self._memory[i] = like.new_empty(size)
            self._views.append(self._memory[i][:size].view(like.shape))
        return self._views[i]


def run(
    items: Sequence[Item],
    hyper: Hyper,
    *,
    batched: bool,
    native: Collection[str] = (),
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One step of every item: state and parameter are written in place, gradients are only read.

    native: the device types on which items take a native kernel, where there is one for them. Only there gradients may be those of
    the loss times `grad_scale`, and only on a device that is not the host may `found_inf` be 1, for a step that writes nothing.
    """
    sharded = [item for item in items if item.sums is not None]
    suited: dict[tuple[torch.device, torch.dtype], list[Item]] = defaultdict(list)
    rest: list[Item] = []
    empty: list[Item] = []
    for item in items:
        device = item.param.device
        if item.sums is not None:
            continue
        if item.call is None or device.type not in native:
            rest.append(item)
        elif item.param.numel():
            suited[device, item.state.raw.value.dtype].append(item)
        else:
            empty.append(item)
    for members in suited.values():
        _run_native(members, hyper, grad_scale, found_inf)
    if empty:
        _count(empty)
    if not rest and not sharded:
        return
    scratch = Scratch()
    with _no_autocast(rest + sharded):
        if batched:
            _run_batched(rest, hyper, scratch)
        else:
            _run_single(rest, hyper, scratch)
        _run_sharded(sharded, hyper, scratch)
        _count(rest + sharded)


def _count(items: Iterable[Item]) -> None:
    if counts := [item.counter for item in items if item.counter is not None]:
        torch._foreach_add_(counts, 1.0)  # pyright: ignore[reportPrivateImportUsage]


def _no_autocast(items: Iterable[Item]) -> ExitStack:
    stack = ExitStack()
    for device_type in {item.param.device.type for item in items}:
        if torch.amp.is_autocast_available(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
    return stack


def native_refusal(param: Tensor, has_residual: bool) -> str | None:
    """Why there is no native kernel for a parameter, or None."""
    if has_residual:
        return "it has a residual (residual_rank > 0)"
    if _shards.is_sharded(param):
        return "it is a DTensor, whose ranks must add up their factors' gradients in the middle of a step"
    if type(param.data) is not Tensor:
        return f"it is a {type(param.data).__name__}"
    if param.device.type not in (*NATIVE, "meta"):
        return f"it is on {param.device}, not on a CPU or a CUDA device"
    if param.dtype not in NATIVE_DTYPES:
        return f"its dtype is {param.dtype}"
    return None


def native_is_ready(device_type: str, *, compile: bool) -> bool:
    """Whether a device's native kernel can be used now. compile=True builds the CPU's if need be, or raises RuntimeError;
    without triton CUDA's raises ImportError."""
    if NATIVE.get(device_type) == "cpu":
        if compile:
            kernels.load()
        elif not kernels.available():
            _say_once(
                "the native CPU kernel is not built, steps take the slower eager path; python -m seloptim build, or fused=True, builds it"
            )
            return False
        return True
    if NATIVE.get(device_type) == "triton":
        try:
            from .kernels import triton  # noqa: F401
        except ImportError as error:
            if compile:
                raise
            _say_once(f"steps on CUDA devices take the slower eager path: {error}")
            return False
        return True
    return False


@cache
def _say_once(message: str) -> None:
    logger.info(message)


def native_call(item: Item) -> Call | None:
    """The part of a native step's arguments that stays, or None where there is no kernel for the parameter."""
    if native_refusal(item.param, item.state.residual_b is not None):
        return None
    slots = [slot for slot in item.state[:3] if slot is not None]
    lengths = (0 if slot is None else slot.value.shape[-2] for slot in item.state[1:3])
    tensors = [tensor for slot in slots for tensor in slot if tensor is not None]
    return Call(tensors, (*item.shape(), *lengths, item.curve.has_n), float(item.curve.beta))


def _run_native(items: Sequence[Item], hyper: Hyper, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Items of one group, one device and one dtype, in one call."""
    weights = [item.param.contiguous() for item in items]
    if NATIVE[items[0].param.device.type] == "cpu":
        _call_cpu(items, weights, hyper, grad_scale)
    else:
        from .kernels import triton

        with _no_autocast(items):
            whole = [item._replace(grad=item.grad.detach().contiguous()).in_batches() for item in items]
            triton.step(whole, [weight.detach() for weight in weights], hyper, grad_scale, found_inf)
            _count(items)
        torch.autograd.graph.increment_version([item.param for item in items])
    for item, weight in zip(items, weights, strict=True):
        if weight is not item.param:
            item.param.detach().copy_(weight)


def _rates(item: Item) -> Tensor:
    like = item.state.raw.value
    return item.rates if isinstance(item.rates, Tensor) else like.new_tensor(item.rates)


def _call_cpu(items: Sequence[Item], weights: list[Tensor], hyper: Hyper, grad_scale: Tensor | None) -> None:
    state: list[Tensor] = []
    ints: list[int] = []
    numbers: list[float] = []
    for item in items:
        call = item.call
        assert call is not None
        state += call.tensors
        ints += call.ints
        numbers += (call.beta, float(item.step), item.slope, *map(float, item.rates))
    curve = items[0].curve
    learned = sum(1 << k for k, kind in enumerate(_rule.KINDS) if kind in curve.learned)
    torch.ops.seloptim.step_(
        weights,
        [item.grad.contiguous() for item in items],
        state,
        ints,
        numbers,
        [item.counter for item in items if item.counter is not None],
        float(hyper.lr),
        hyper.beta1,
        hyper.beta2,
        hyper.eps,
        hyper.weight_decay,
        hyper.decoupled,
        hyper.amsgrad,
        hyper.maximize,
        curve.combine == "congruent",
        learned,
        grad_scale,
    )


def _run_single(items: Sequence[Item], hyper: Hyper, scratch: Scratch) -> None:
    for item in items:
        blocks = _blocks(item)
        lr, rates = hyper.lr / item.slope, _rates(item)
        _step(blocks, item.curve, hyper, item.step, lr, rates, scratch)
        _write_back(item.param.detach(), blocks.weight)


def _blocks(item: Item) -> Blocks:
    state = item.in_batches().state
    shape = state.raw.value.shape
    # views where the layout allows them
    return Blocks(item.param.detach().reshape(shape), item.grad.detach().reshape(shape), state)


def _run_sharded(items: Sequence[Item], hyper: Hyper, scratch: Scratch) -> None:
    """In two halves: what all items need of the other ranks goes in one collective between them.

    One by one: stacks of equal parts would be other stacks on other ranks.
    """
    halves: list[tuple[Item, Blocks, dict[str, Tensor]]] = []
    parts: list[tuple[Tensor, Any, tuple[int, ...]]] = []
    for item in items:
        blocks = _blocks(item)
        totals = _begin(blocks, item.curve, hyper, item.step, hyper.lr / item.slope, scratch)
        halves.append((item, blocks, totals))
        assert item.sums is not None
        parts += [(total, item.sums.mesh, getattr(item.sums, name)) for name, total in totals.items()]
    _shards.add_up(parts)
    for item, blocks, totals in halves:
        _finish(blocks, item.curve, hyper, item.step, _rates(item), totals, scratch)
        _write_back(item.param.detach(), blocks.weight)


def _run_batched(items: Sequence[Item], hyper: Hyper, scratch: Scratch) -> None:
    alike: dict[tuple, list[Item]] = defaultdict(list)
    for item in (item.in_batches() for item in items):
        shapes = tuple(None if slot is None else slot.value.shape for slot in item.state)
        raw = item.state.raw.value
        step = None if isinstance(item.step, Tensor) else item.step  # each matrix of a stack may have its own count
        key = (shapes, raw.dtype, raw.device, item.param.dtype, step, item.curve._replace(beta=0.0))
        alike[key].append(item)
    for members in alike.values():
        raw = members[0].state.raw.value
        limit = STACK_BYTES if raw.device.type != "cpu" else BLOCK_ELEMENTS * raw.element_size()
        size = max(1, limit // max(1, raw.numel() * raw.element_size()))
        if size == 1:
            _run_single(members, hyper, scratch)
            continue
        for start in range(0, len(members), size):
            _run_stack(members[start : start + size], hyper, scratch)


def _run_stack(items: Sequence[Item], hyper: Hyper, scratch: Scratch) -> None:
    first = items[0]
    batch, rows, cols = first.state.raw.value.shape
    raw = first.state.raw.value

    def along_batch(numbers: list[float]) -> Tensor:
        if isinstance(first.step, Tensor):
            # A graph that is being captured allows no copy from the host.
            return torch.cat([raw.new_full((batch, 1, 1), number) for number in numbers])
        return torch.tensor(numbers, dtype=raw.dtype, device=raw.device).repeat_interleave(batch).view(-1, 1, 1)

    weight = torch.cat([item.param.detach().reshape(batch, rows, cols) for item in items])
    grad = torch.cat([item.grad.detach().reshape(batch, rows, cols) for item in items])
    state = Views(*(_stack_slot([item.state[i] for item in items]) for i in range(len(first.state))))  # type: ignore[arg-type]
    curve = first.curve._replace(beta=along_batch([float(item.curve.beta) for item in items]))
    slopes = [item.slope for item in items]
    lr = hyper.lr / (slopes[0] if len(set(slopes)) == 1 else along_batch(slopes))
    step, rates = first.step, _rates(first)
    if isinstance(step, Tensor):
        step = torch.stack([torch.as_tensor(item.step) for item in items]).repeat_interleave(batch).view(-1, 1, 1)
        rates = torch.stack([_rates(item) for item in items]).repeat_interleave(batch, 0).unsqueeze(1)
    lr = 0.0 if _rule.is_zero(hyper.lr) else lr
    _step(Blocks(weight, grad, state), curve, hyper, step, lr, rates, scratch)
    if not _rule.is_zero(hyper.lr):
        params = [item.param.detach() for item in items]
        parts = weight.split(batch)
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
            params, [part.view(param.shape) for part, param in zip(parts, params, strict=True)]
        )
    for i, stacked in enumerate(state):
        for j, tensor in enumerate(stacked or ()):
            if tensor is not None:
                torch._foreach_copy_([item.state[i][j] for item in items], list(tensor.split(batch)))  # type: ignore[index]


def _stack_slot(slots: Sequence[Slot | None]) -> Slot | None:
    if slots[0] is None:
        return None
    return Slot(*(None if parts[0] is None else torch.cat(parts) for parts in zip(*slots, strict=True)))  # type: ignore[misc,arg-type]


def _step(
    blocks: Blocks,
    curve: Curve,
    hyper: Hyper,
    step: float | Tensor,
    lr: float | Tensor,
    rates: Tensor,
    scratch: Scratch,
) -> None:
    """The four stages over one batch of matrices."""
    totals = _begin(blocks, curve, hyper, step, lr, scratch)
    _finish(blocks, curve, hyper, step, rates, totals, scratch)


def _begin(
    blocks: Blocks, curve: Curve, hyper: Hyper, step: float | Tensor, lr: float | Tensor, scratch: Scratch
) -> dict[str, Tensor]:
    """The stages up to the move of raw; the gradients of what trains beside it."""
    decay = hyper.weight_decay if hyper.decoupled else 0.0
    scales, parts = blocks.scales(curve)
    new = scratch.new if _rule.writable(blocks.state, blocks.grad) else None
    pulled: list[Pulled] = []
    for block, of in zip(blocks.blocks, parts, strict=True):
        scratch.fit(block.state.raw.value)
        found = _rule.pull_part(_gradient(block, hyper), block.state, curve, of, new)
        _rule.update(block.state.raw, found.raw, hyper, step, lr, decay, new)
        pulled.append(found)
    return blocks.totals(curve, scales, pulled)


def _finish(
    blocks: Blocks,
    curve: Curve,
    hyper: Hyper,
    step: float | Tensor,
    rates: Tensor,
    totals: dict[str, Tensor],
    scratch: Scratch,
) -> None:
    """What follows when raw has moved: the factors by their whole gradients, and the weight."""
    for name, total in totals.items():
        slot: Slot = getattr(blocks.state, name)
        scale = name.startswith("scale")
        own_lr = hyper.lr * rates if scale and not _rule.is_zero(hyper.lr) else hyper.lr
        _rule.update(slot, total, hyper, step, own_lr)
    if _rule.is_zero(hyper.lr):
        return
    _, parts = blocks.scales(curve)
    new = scratch.new if _rule.writable(blocks.state) else None
    on_device = isinstance(hyper.lr, Tensor) and not _rule.on_host(hyper.lr)
    in_place = not on_device and blocks.weight.dtype == blocks.raw.dtype
    for block, of in zip(blocks.blocks, parts, strict=True):
        scratch.fit(block.state.raw.value)
        weight = block.weight
        moved = _rule.push(block.state, curve, of, new, out=weight if in_place else None)
        if on_device:
            moved = torch.where(hyper.lr == 0, weight, moved.to(weight.dtype))  # type: ignore[arg-type]
        if moved is not weight:
            weight.copy_(moved)


def pull(item: Item, hyper: Hyper) -> tuple[Tensor, dict[str, Tensor]]:
    """The first stage alone, for another optimizer to move raw by: (gradient of raw, what `push` takes on)."""
    blocks = _blocks(item)
    scales, parts = blocks.scales(item.curve)
    gradient = torch.empty_like(blocks.raw)
    new = torch.empty_like if _rule.writable(blocks.state, blocks.grad) else None
    pulled: list[Pulled] = []
    for block, of, target in zip(blocks.blocks, parts, blocks.pieces(gradient), strict=True):
        found = _rule.pull_part(_gradient(block, hyper), block.state, item.curve, of, new)
        if found.raw.shape == gradient.shape:
            gradient = found.raw
        else:
            target.copy_(found.raw)
        pulled.append(found._replace(raw=target))  # the block's own is spent: let its memory go
    return gradient, blocks.totals(item.curve, scales, pulled)


def push(item: Item, hyper: Hyper, totals: dict[str, Tensor]) -> None:
    """The other stages, when raw has moved: the factors by Adam, and the parameter onto the map."""
    blocks = _blocks(item)
    _finish(blocks, item.curve, hyper, item.step, _rates(item), totals, Scratch())
    _write_back(item.param.detach(), blocks.weight)


def _write_back(param: Tensor, weight: Tensor) -> None:
    """The weight as a batch of matrices is the parameter itself, unless its layout made it a copy."""
    if weight.data_ptr() != param.data_ptr() and param.numel():
        param.copy_(weight.reshape(param.shape))


def _gradient(block: Block, hyper: Hyper) -> Tensor:
    """The weight's gradient as torch.optim.Adam would see it, in the state's dtype."""
    dtype = block.state.raw.value.dtype
    grad = block.grad.to(dtype)
    if hyper.maximize:
        grad = -grad
    if hyper.weight_decay and not hyper.decoupled:
        grad = grad.add(block.weight.to(dtype), alpha=hyper.weight_decay)
    return grad
