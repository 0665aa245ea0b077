r"""Cross-entropy of a linear classifier without its logits: fused projection, softmax and gradients.

With hidden states X (N, D), a classifier W (V, D) and logits Z = X W^T + b, every loss here is, row by row, a weighted
sum of log-probabilities, so its gradient is the softmax S times a number minus the target::

    L_i = sum_v t_iv (logsumexp(Z_i) - Z_iv) + z_loss logsumexp(Z_i)^2
    dL_i/dZ_i = (sum_v t_iv + 2 z_loss logsumexp(Z_i)) S_i - t_i          t_i: the target, smoothed, times class weights
    dX = (dL/dZ) W        dW = (dL/dZ)^T X        db = sum_i (dL/dZ)_i

Nothing in this needs two rows at a time. A chunk of rows is projected, turned into its gradient in place, and
multiplied back, while it is still in cache; the (N, V) matrix never exists.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FusedLinearCrossEntropy", "LossStats", "cross_entropy", "linear_cross_entropy"]

# A tile of logits that the last-level cache can hold. On a GPU the accumulation of dW reads and writes (V, D) once a
# chunk, so there a chunk has to be long.
_CPU_TILE_BYTES = 32 << 20
_GPU_TILE_BYTES = 512 << 20
# A classifier of another dtype than the tile's is converted (and, on a GPU, dW accumulated) in pieces of about so many
# numbers.
_BLOCK_NUMEL = 1 << 22


class LossStats(NamedTuple):
    """The loss and what its forward pass knew: ``linear_cross_entropy(..., return_stats=True)``.

    Everything but ``loss`` is detached. Ignored tokens have a NaN ``logsumexp`` (they were never computed) and no hit.
    """

    loss: Tensor  # () or, for reduction="none", (...)
    logsumexp: Tensor  # (...) of the logits, after softcap
    hits: Tensor  # (...) bool: the largest logit is the target's (for probabilities: is the most probable class's)
    z_loss: Tensor  # the shape of loss: the part of it that z_loss added


class _Options(TypedDict, total=False):
    """What both functions take by keyword, for type checkers."""

    ignore_index: int
    reduction: str
    class_weight: Tensor | None
    label_smoothing: float
    softcap: float | None
    z_loss: float
    token_weight: Tensor | None
    denominator: float | Tensor | None
    chunk_rows: int | None


class _Rule(NamedTuple):
    """What the loss of one token is and how tokens are reduced: all that is not a tensor."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float
    chunk_rows: int | None
    hits: bool


class _Operands(NamedTuple):
    """Every tensor of a call, the token dimensions flattened."""

    hidden: Tensor  # (N, D), or the logits (N, V) where weight is None
    weight: Tensor | None  # (V, D)
    bias: Tensor | None  # (V,)
    target: Tensor  # (N,) class indices or (N, V) probabilities
    class_weight: Tensor | None  # (V,)
    token_weight: Tensor | None  # (N,)
    denominator: Tensor | None  # ()


class _Evaluated(NamedTuple):
    loss: Tensor  # (N,) for reduction="none", else ()
    logsumexp: Tensor  # (N,)
    hits: Tensor  # (N,)
    z_loss: Tensor  # like loss
    grad_hidden: Tensor | None  # (N, D), all three in the dtype of the tiles
    grad_weight: Tensor | None  # (V, D)
    grad_bias: Tensor | None  # (V,)


def _reads_values(device: torch.device) -> bool:
    """Whether a look at the values of a tensor is free; on a GPU it would stop the queue."""
    return device.type == "cpu"


def _work_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of tiles, accumulators and loss."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32


def _rows_per_chunk(rows: int, classes: int, itemsize: int, device: torch.device, asked: int | None) -> int:
    if asked is None:
        # Products of fewer than 128 rows cost more per logit; more than 512 gain nothing once a tile has a million.
        budget, most = (_CPU_TILE_BYTES, 512) if device.type == "cpu" else (_GPU_TILE_BYTES, 8192)
        asked = max(128, min(budget // (itemsize * classes), most), (1 << 20) // classes)
    chunks = max(1, -(-rows // asked))
    return max(1, -(-rows // chunks))  # even chunks: a short last one would cost as much as a whole one


def _blocks(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """Pieces of the classifier in the dtype of the product: (first row, last row, piece)."""
    classes, features = weight.shape
    size = classes if weight.dtype == dtype else max(1, _BLOCK_NUMEL // features)
    for start in range(0, classes, size):
        stop = min(start + size, classes)
        yield start, stop, weight[start:stop].to(dtype)


def _product(left: Tensor, right: Tensor, out: Tensor, add: bool = False) -> None:
    """out (+)= left @ right, accumulated in out's dtype whatever that of the factors."""
    if left.dtype == out.dtype:
        torch.addmm(out, left, right, out=out) if add else torch.mm(left, right, out=out)
    elif not add:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        size = max(1, _BLOCK_NUMEL // out.shape[1])
        for start in range(0, out.shape[0], size):
            out[start : start + size] += torch.mm(left[start : start + size], right, out_dtype=out.dtype)


def _check_labels(labels: Tensor, classes: int, ignore_index: int) -> None:
    if labels.numel():
        low, high = (int(x) for x in torch.aminmax(labels))
        if low < 0 or high >= classes:
            raise IndexError(
                f"target {low if low < 0 else high} is out of range for {classes} classes "
                f"(and is not ignore_index={ignore_index})"
            )


def _consume(
    tile: Tensor, target: Tensor, coeff: Tensor | None, class_weight: Tensor | None, rule: _Rule
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Take the logits of a chunk (r, V); leave d(sum_i coeff_i L_i)/d logits in their place unless coeff is None.

    Returns the cross-entropy, the logsumexp and (where asked for) the hits of each row.
    """
    classes, smoothing, softcap = tile.shape[1], rule.label_smoothing, rule.softcap
    soft = target.is_floating_point()
    slope = None
    if softcap is not None:
        tile.div_(softcap).tanh_()
        if coeff is not None:
            slope = tile.square().neg_().add_(1)  # d tanh
        tile.mul_(softcap)

    top = tile.amax(1, keepdim=True)
    hits = None
    dense = picked = onehot = None  # t_i = dense_i + onehot_i e_y
    if rule.hits:
        hits = tile.argmax(1) == (target.argmax(1) if soft else target)
    if soft:
        dense = target.to(tile.dtype) * (1 - smoothing)
        if smoothing:
            dense += smoothing / classes
        if class_weight is not None:
            dense *= class_weight
    else:
        target = target.unsqueeze(1)
        onehot = torch.full_like(top, 1 - smoothing)
        if class_weight is not None:
            onehot *= class_weight[target]
        if smoothing:
            dense = tile.new_full((1, classes), smoothing / classes)
            if class_weight is not None:
                dense *= class_weight
        picked = top - tile.gather(1, target)  # differences first: exact where all logits are shifted by 1e5

    crossed = None
    if dense is not None:
        tile.sub_(top)
        if soft or class_weight is not None:
            # A class that the target gives nothing adds nothing, even where its logit is -inf.
            crossed = tile.mul(dense).masked_fill_(dense == 0, 0).sum(1, keepdim=True).neg_()
        else:
            crossed = tile.sum(1, keepdim=True).mul_(-smoothing / classes)
    torch.softmax(tile, 1, out=tile)
    log_sum = tile.amax(1, keepdim=True).log_().neg_()  # the largest probability is 1 / sum_v exp(z_v - top)
    logsumexp = top + log_sum

    total = torch.zeros_like(top)  # sum_v t_iv
    loss = torch.zeros_like(top)
    if onehot is not None and picked is not None:
        total += onehot
        loss += torch.where(onehot == 0, onehot, onehot * picked) + onehot * log_sum
    if dense is not None and crossed is not None:
        share = dense.sum(1, keepdim=True)
        total += share
        loss += crossed + share * log_sum
    if coeff is not None:
        coeff = coeff.unsqueeze(1)
        tile.mul_(coeff * (total + 2 * rule.z_loss * logsumexp) if rule.z_loss else coeff * total)
        if dense is not None:
            tile.addcmul_(dense, coeff, value=-1)
        if onehot is not None:
            tile.scatter_(1, target, tile.gather(1, target) - coeff * onehot)  # deterministic on a GPU as well
        if slope is not None:
            tile.mul_(slope)
    return loss.squeeze(1), logsumexp.squeeze(1), hits


def _evaluate(
    operands: _Operands,
    rule: _Rule,
    needs: tuple[bool, bool, bool],
    upstream: Tensor | None = None,
    overwrite: bool = False,
) -> _Evaluated:
    """The loss, and the gradients named in `needs` of sum_i upstream_i loss_i (upstream: (N,), () or None for 1)."""
    device = operands.hidden.device
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            return _sweep(operands, rule, needs, upstream, overwrite, torch.get_autocast_dtype(device.type))
    return _sweep(operands, rule, needs, upstream, overwrite, None)


def _sweep(
    operands: _Operands,
    rule: _Rule,
    needs: tuple[bool, bool, bool],
    upstream: Tensor | None,
    overwrite: bool,
    autocast: torch.dtype | None,
) -> _Evaluated:
    hidden, weight, bias, target, class_weight, token_weight, denominator = operands
    device = hidden.device
    dtype = _work_dtype(hidden, weight, bias)
    rows, classes = hidden.shape[0], hidden.shape[1] if weight is None else weight.shape[0]
    soft = target.is_floating_point()
    factor = dtype  # of the products
    if weight is not None and device.type == "cuda" and dtype == torch.float32:
        # Tensor cores take bfloat16 and accumulate in float32. Not float16: gradients underflow in it.
        factors = {autocast} if autocast is not None else {hidden.dtype, weight.dtype}
        factor = torch.bfloat16 if factors == {torch.bfloat16} else dtype
    if class_weight is not None:
        class_weight = class_weight.to(dtype)

    # Which rows count. On a CPU the others are dropped before the first product; on a GPU their coefficients are zero.
    kept = index = wrong = None
    labels, count = target, rows
    if not soft:
        kept = target != rule.ignore_index
        if _reads_values(device):
            count = int(kept.sum())
            if count < rows:
                index = kept.nonzero().squeeze(1)
                labels = target[index]
            kept = None
            _check_labels(labels, classes, rule.ignore_index)
        else:
            wrong = kept & ((target < 0) | (target >= classes))
            labels = target.masked_fill(~kept | wrong, 0)

    if rule.reduction == "mean":
        if denominator is not None:
            denominator = denominator.to(dtype)
        elif soft:
            denominator = torch.full((), rows, dtype=dtype, device=device)
        elif class_weight is not None:
            each = class_weight[labels]
            denominator = (each if kept is None else each.masked_fill(~kept, 0)).sum()
        elif kept is not None:
            denominator = kept.sum().to(dtype)
        else:
            denominator = torch.full((), count, dtype=dtype, device=device)
    else:
        denominator = None
    if token_weight is not None:
        token_weight = token_weight.to(dtype)
    coeffs = None
    if any(needs):
        coeffs = torch.ones(rows, dtype=dtype, device=device) if token_weight is None else token_weight
        if denominator is not None:
            coeffs = coeffs / denominator
        if upstream is not None:
            coeffs = coeffs * upstream.to(dtype)
        if kept is not None:
            coeffs = coeffs.masked_fill(~kept, 0)

    loss = torch.zeros(rows, dtype=dtype, device=device)
    logsumexp = torch.full((rows,), torch.nan, dtype=dtype, device=device)
    hits = torch.zeros(rows if rule.hits else 0, dtype=torch.bool, device=device)
    partial = index is not None
    grad_hidden = grad_weight = grad_bias = None
    if needs[0]:
        grad_dtype = hidden.dtype if weight is None else dtype  # rows of logits are written once: nothing to accumulate
        if overwrite:
            grad_hidden = hidden
        else:
            make = torch.zeros if partial else torch.empty
            grad_hidden = make(hidden.shape, dtype=grad_dtype, device=device)

    step = _rows_per_chunk(count, classes, dtype.itemsize, device, rule.chunk_rows)
    in_place = weight is None and grad_hidden is not None and grad_hidden.dtype == dtype and not partial
    buffer = None if in_place else torch.empty((min(step, count), classes), dtype=dtype, device=device)
    for start in range(0, count, step):
        stop = min(start + step, count)
        pick = slice(start, stop) if index is None else index[start:stop]
        held = None if kept is None else kept[start:stop].unsqueeze(1)
        tile = grad_hidden[start:stop] if buffer is None else buffer[: stop - start]  # type: ignore[index]
        x = hidden[pick]
        if weight is None:
            tile.copy_(x)
            if held is not None:
                tile.masked_fill_(~held, 0)
        else:
            x = x.to(factor)
            if held is not None:
                x = x.masked_fill(~held, 0)  # zero times NaN would reach dW
            for first, last, block in _blocks(weight, factor):
                part = tile[:, first:last]
                if bias is None:
                    _product(x, block.t(), part)
                elif factor == dtype:
                    torch.addmm(bias[first:last].to(dtype), x, block.t(), out=part)
                else:
                    _product(x, block.t(), part)
                    part += bias[first:last]

        coeff = None if coeffs is None else coeffs[pick]
        tile_loss, tile_logsumexp, tile_hits = _consume(tile, labels[start:stop], coeff, class_weight, rule)
        if held is not None and wrong is not None:
            held, bad = held.squeeze(1), wrong[start:stop]
            tile_loss = tile_loss.masked_fill_(~held, 0).masked_fill_(bad, torch.nan)
            tile_logsumexp = tile_logsumexp.masked_fill_(~held, torch.nan)
            tile_hits = None if tile_hits is None else tile_hits & held
            if coeff is not None:
                tile.masked_fill_(bad.unsqueeze(1), torch.nan)
        loss[pick] = tile_loss
        logsumexp[pick] = tile_logsumexp
        if tile_hits is not None:
            hits[pick] = tile_hits

        if needs[2]:
            grad_bias = tile.sum(0) if grad_bias is None else grad_bias.add_(tile.sum(0))
        if weight is None:
            if grad_hidden is not None and buffer is not None:
                grad_hidden[pick] = tile.to(grad_hidden.dtype)
            continue
        tile = tile.to(factor)
        if needs[1]:
            add = grad_weight is not None
            if grad_weight is None:
                grad_weight = torch.empty(weight.shape, dtype=dtype, device=device)
            _product(tile.t(), x, grad_weight, add)
        if grad_hidden is not None:
            out = grad_hidden.new_empty(x.shape) if partial else grad_hidden[start:stop]
            for first, last, block in _blocks(weight, factor):
                _product(tile[:, first:last], block, out, add=first > 0)
            if partial:
                grad_hidden[pick] = out

    if overwrite and partial and grad_hidden is not None:
        grad_hidden.masked_fill_((target == rule.ignore_index).unsqueeze(1), 0)
    if needs[1] and weight is not None and grad_weight is None:
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=device)
    if needs[2] and grad_bias is None:
        grad_bias = torch.zeros(classes, dtype=dtype, device=device)

    z_loss = torch.zeros_like(loss)
    if rule.z_loss:
        z_loss = rule.z_loss * logsumexp.square()
        if not soft:
            z_loss = z_loss.masked_fill_(target == rule.ignore_index, 0)
        loss = loss + z_loss
    if token_weight is not None:
        if not soft:  # an ignored token adds nothing, whatever its weight
            token_weight = token_weight.masked_fill(target == rule.ignore_index, 0)
        loss, z_loss = loss * token_weight, z_loss * token_weight
    if rule.reduction != "none":
        loss, z_loss = loss.sum(), z_loss.sum()
    if denominator is not None:
        loss, z_loss = loss / denominator, z_loss / denominator
    return _Evaluated(loss, logsumexp, hits, z_loss, grad_hidden, grad_weight, grad_bias)


class _CrossEntropy(torch.autograd.Function):
    """Gradients in the forward pass where upstream can only be a factor of them; else another sweep in the backward."""

    @staticmethod
    def forward(ctx, rule: _Rule, needs: tuple[bool, bool, bool], overwrite: bool, *tensors):  # type: ignore[override]
        operands = _Operands(*tensors)
        early = overwrite or (rule.reduction != "none" and operands.weight is not None)
        out = _evaluate(operands, rule, needs if early else (False, False, False), overwrite=overwrite)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(out.logsumexp, out.hits, out.z_loss)
        # Saved even where the gradients are here already: a retained second backward starts again from them, and one
        # that was not retained is told by autograd.
        ctx.save_for_backward(*tensors)
        ctx.rule, ctx.overwrite = rule, overwrite
        ctx.dtypes = tuple(None if x is None else x.dtype for x in operands[:3])
        ctx.grads = out[4:] if early and not overwrite else None
        return out[:4]

    @staticmethod
    def backward(ctx, upstream: Tensor | None, *_):  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the fused cross-entropy has no second derivative, and create_graph=True would lose its term silently; "
                "for gradient penalties use torch.nn.functional.cross_entropy(torch.nn.functional.linear(...), ...)"
            )
        grads, ctx.grads = ctx.grads, None  # given away, so that .grad can take the buffers over
        if upstream is None:
            return (None,) * 10
        if grads is not None:
            if not (_reads_values(upstream.device) and upstream.item() == 1):
                grads = tuple(None if g is None else g.mul_(upstream) for g in grads)
        elif ctx.overwrite:
            # This raises the version of the saved logits: a second backward raises instead of scaling twice.
            factor = upstream.unsqueeze(1) if upstream.dim() else upstream
            grads = (ctx.saved_tensors[0].detach().mul_(factor), None, None)
        else:
            needs = tuple(ctx.needs_input_grad[3:6])
            grads = _evaluate(_Operands(*ctx.saved_tensors), ctx.rule, needs, upstream)[4:]
        grads = (None if g is None else g.to(dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True))
        return (None, None, None, *grads, None, None, None, None)


# Under torch.compile the same two sweeps are opaque operators: a graph without breaks, with eager's arithmetic.


@torch.library.custom_op("seloptim::cross_entropy", mutates_args=())
def _compiled(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    denominator: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    chunk_rows: int | None,
    hits: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    operands = _Operands(hidden, weight, bias, target, class_weight, token_weight, denominator)
    rule = _Rule(reduction, ignore_index, label_smoothing, softcap, z_loss, chunk_rows, hits)
    loss, logsumexp, hit, z, *grads = _evaluate(operands, rule, (needs[0], needs[1], needs[2]))
    a, b, c = (logsumexp.new_empty(0) if g is None else g for g in grads)
    return loss, logsumexp, hit, z, a, b, c


@torch.library.custom_op("seloptim::cross_entropy_backward", mutates_args=())
def _compiled_backward(
    upstream: Tensor,
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    denominator: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    chunk_rows: int | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    operands = _Operands(hidden, weight, bias, target, class_weight, token_weight, denominator)
    rule = _Rule(reduction, ignore_index, label_smoothing, softcap, z_loss, chunk_rows, False)
    grads = _evaluate(operands, rule, (needs[0], needs[1], needs[2]), upstream)[4:]
    a, b, c = (upstream.new_empty(0) if g is None else g for g in grads)
    return a, b, c


def _empty_grads(hidden, weight, bias, needs):
    dtype = _work_dtype(hidden, weight, bias)
    first = hidden.dtype if weight is None else dtype
    likes = zip((hidden, weight, bias), (first, dtype, dtype), needs, strict=True)
    return tuple(
        hidden.new_empty(x.shape if need and x is not None else (0,), dtype=d if need else dtype)
        for x, d, need in likes
    )


@_compiled.register_fake
def _(hidden, weight, bias, target, class_weight, token_weight, denominator, reduction, *rest):
    rows, hits, needs = target.shape[0], rest[-2], rest[-1]
    vector = hidden.new_empty((rows,), dtype=_work_dtype(hidden, weight, bias))
    loss = vector if reduction == "none" else vector.new_empty(())
    hit = vector.new_empty((rows if hits else 0,), dtype=torch.bool)
    return loss, torch.empty_like(vector), hit, torch.empty_like(loss), *_empty_grads(hidden, weight, bias, needs)


@_compiled_backward.register_fake
def _(upstream, hidden, weight, bias, *rest):
    return _empty_grads(hidden, weight, bias, rest[-1])


def _compiled_setup(ctx, inputs, output):
    early = inputs[14] != [False] * 3
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(output[4:] if early else inputs[:7]))
    ctx.early, ctx.options = early, inputs[7:13]
    ctx.dtypes = tuple(None if x is None else x.dtype for x in inputs[:3])


def _compiled_grads(ctx, upstream, *_):
    needs = list(ctx.needs_input_grad[:3])
    if upstream is None:
        return (None,) * 15
    if ctx.early:
        grads = (g * upstream for g in ctx.saved_tensors)
    else:
        grads = _compiled_backward(upstream, *ctx.saved_tensors, *ctx.options, needs)
    grads = (g.to(d) if need else None for g, d, need in zip(grads, ctx.dtypes, needs, strict=True))
    return (*grads, *(None,) * 12)


_compiled.register_autograd(_compiled_grads, setup_context=_compiled_setup)


def _refuse_distributed(name: str, x: Tensor) -> None:
    if hasattr(x, "full_tensor"):  # by this method: importing DTensor to ask takes longer than importing all of this
        raise TypeError(
            f"{name} is a DTensor: a softmax over a shard of the vocabulary would be wrong. "
            "Pass full_tensor(), or gather the parameter first"
        )


def _check_operand(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    _refuse_distributed(name, x)
    if x.layout != torch.strided or x.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise TypeError(
            f"{name} must be a dense tensor of float16, bfloat16, float32 or float64, got {x.dtype} with layout {x.layout}"
        )


def _check_constant(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    _refuse_distributed(name, x)
    if x.is_complex() or x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense real tensor, got {x.dtype} with layout {x.layout}")
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name} requires grad, but the fused loss has no gradient for it; pass {name}.detach()")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")


def _call(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    reduction: str,
    class_weight: Tensor | None,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    token_weight: Tensor | None,
    denominator: float | Tensor | None,
    chunk_rows: int | None,
    return_stats: bool,
    inplace: bool,
) -> Tensor | LossStats:
    """Check everything once, flatten the tokens, and choose eager or compiled."""
    name = "logits" if weight is None else "hidden"
    for label, x in ((name, hidden), ("weight", weight), ("bias", bias)):
        if x is not None:
            _check_operand(label, x)
    if hidden.dim() < 1 or hidden.shape[-1] == 0:
        raise ValueError(
            f"{name} must have at least one feature in its last dimension, got shape {tuple(hidden.shape)}"
        )
    lead, classes = tuple(hidden.shape[:-1]), hidden.shape[-1]
    if weight is not None:
        if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != hidden.shape[-1]:
            raise ValueError(
                f"weight must be (V, {hidden.shape[-1]}) with V > 0 for hidden {tuple(hidden.shape)}, got "
                f"{tuple(weight.shape)} (an empty or flat shard must be gathered first)"
            )
        classes = weight.shape[0]
    if bias is not None and tuple(bias.shape) != (classes,):
        raise ValueError(f"bias must have shape {(classes,)}, got {tuple(bias.shape)}")

    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}")
    soft = target.is_floating_point()
    if target.dtype == torch.bool:
        raise TypeError(f"target must hold class indices (integers) or probabilities (floats), got {target.dtype}")
    _check_constant("target", target, (*lead, classes) if soft else lead)
    if soft and ignore_index != -100:
        raise ValueError(f"ignore_index={ignore_index} has no meaning for probabilities; use token_weight")
    if class_weight is not None:
        _check_constant("class_weight", class_weight, (classes,))
    if token_weight is not None:
        _check_constant("token_weight", token_weight, lead)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')
    if denominator is not None:
        if reduction != "mean":
            raise ValueError(f'denominator needs reduction="mean", got {reduction!r}')
        if isinstance(denominator, Tensor):
            _check_constant("denominator", denominator, ())
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if softcap is not None and not 0.0 < softcap < float("inf"):
        raise ValueError(f"softcap must be positive and finite (or None for no cap), got {softcap}")
    if not -float("inf") < z_loss < float("inf"):
        raise ValueError(f"z_loss must be finite, got {z_loss}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1 (or None to choose), got {chunk_rows}")
    for label, x in (("weight", weight), ("bias", bias), ("target", target)):
        if x is not None and x.device != hidden.device:
            raise ValueError(f"{label} is on {x.device}, {name} on {hidden.device}")

    if inplace:
        compiling = torch.compiler.is_compiling()
        if compiling or hidden.dtype == torch.float16:
            reason = (
                "under torch.compile" if compiling else "for float16, where gradients underflow before they are scaled"
            )
            raise ValueError(f"inplace=True cannot be used {reason}; use inplace=False")
        try:
            flat = hidden.view(-1, classes)
        except RuntimeError as error:
            raise ValueError(f"inplace=True needs logits that are one matrix in memory: {error}") from None
        if 0 in flat.stride() and flat.numel() > flat.untyped_storage().nbytes() // flat.element_size():
            raise ValueError("inplace=True cannot write to expanded logits; use inplace=False")
    else:
        flat = hidden.reshape(-1, classes if weight is None else hidden.shape[-1])
    target = target.reshape(-1, classes) if soft else target.reshape(-1).long()
    device = hidden.device
    if class_weight is not None:
        class_weight = class_weight.to(device)
    if token_weight is not None:
        token_weight = token_weight.to(device).reshape(-1)
    if denominator is not None:
        denominator = torch.as_tensor(denominator, dtype=_work_dtype(hidden, weight, bias), device=device)

    # Asked here: inside Function.forward the grad mode always reads False and needs_input_grad may read True.
    grad = torch.is_grad_enabled()
    needs = tuple(grad and x is not None and x.requires_grad for x in (hidden, weight, bias))
    rule = _Rule(
        reduction,
        ignore_index,
        float(label_smoothing),
        None if softcap is None else float(softcap),
        float(z_loss),
        chunk_rows,
        return_stats,
    )
    tensors = (flat, weight, bias, target, class_weight, token_weight, denominator)
    if torch.compiler.is_compiling():
        early = weight is not None and reduction != "none"
        loss, logsumexp, hits, z, *_ = _compiled(*tensors, *rule, list(needs) if early else [False] * 3)
        logsumexp, z = logsumexp.detach(), z.detach()
    else:
        loss, logsumexp, hits, z = _CrossEntropy.apply(rule, needs, inplace and needs[0], *tensors)
    if reduction == "none":
        loss, z = loss.view(lead), z.view(lead)
    if not return_stats:
        return loss
    return LossStats(loss, logsumexp.view(lead), hits.view(lead), z)


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = ...,
    *,
    return_stats: Literal[False] = ...,
    **options: "Unpack[_Options]",
) -> Tensor: ...
@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = ...,
    *,
    return_stats: Literal[True],
    **options: "Unpack[_Options]",
) -> LossStats: ...
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    chunk_rows: int | None = None,
    return_stats: bool = False,
) -> Tensor | LossStats:
    r"""Cross-entropy of ``hidden @ weight.T + bias`` against ``target``, without ever holding the logits.

    Equivalent plain code, at the memory of all logits and their gradient::

        logits = torch.nn.functional.linear(hidden, weight, bias).flatten(0, -2).double()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        loss = torch.nn.functional.cross_entropy(logits, target.flatten(), weight=class_weight, reduction="none",
                                                 ignore_index=ignore_index, label_smoothing=label_smoothing)
        kept = target.flatten() != ignore_index
        loss = (loss + kept * z_loss * logits.logsumexp(-1) ** 2) * token_weight
        if reduction == "sum":
            loss = loss.sum()
        if reduction == "mean":
            loss = loss.sum() / (denominator or kept.sum())     # with class_weight: or class_weight[target][kept].sum()

    The gradients are made in the forward pass (three matrix products in all; four for ``reduction="none"``, whose
    upstream gradients are not known before the backward pass).

    Args:
        hidden: (..., D) floating point; float16, bfloat16, float32 and float64 may be mixed with the other operands'.
        weight: (V, D), the classifier, as ``nn.Linear.weight``.
        target: (...) class indices of any integer dtype, or (..., V) probabilities of any floating dtype.
        bias: (V,) or None. Default: None.
        ignore_index: tokens with this target add nothing, whatever is in their row of hidden. Default: -100.
        reduction: "mean" (over the kept tokens; with class_weight divided by the sum of theirs; with probabilities over
            all tokens), "sum" or "none" (the loss has target's leading shape). Default: "mean".
        class_weight: (V,), a factor for each class in the target, torch's ``weight``. Default: None.
        label_smoothing: in [0, 1], the share of the target given to all classes evenly. Default: 0.
        softcap: logits become ``softcap * tanh(logits / softcap)``, in nats. Default: None, no cap.
        z_loss: factor of ``logsumexp(logits) ** 2``, added for each kept token, without class weights. Default: 0.
        token_weight: (...), a factor for each token's loss. "mean" still divides by the number of kept tokens. It gets
            no gradient. Default: None.
        denominator: a number or 0-d tensor that "mean" divides by instead, such as the tokens of a whole accumulated
            batch. Default: None.
        chunk_rows: tokens per chunk. Default: None, chosen from V (a tile of 32 MiB on a CPU, of 512 MiB on a GPU).
        return_stats: return ``LossStats(loss, logsumexp, hits, z_loss)``. Default: False.

    Returns:
        The loss, in float64 if an operand is, else in float32: a scalar, or of the leading shape for "none".
        With nothing to average over, "mean" is NaN with zero gradients, as in torch.

    Raises:
        IndexError: a target outside [0, V) that is not ignore_index (on a GPU, where looking would wait: a NaN loss).
        RuntimeError: in the backward pass, for create_graph=True; here, for class_weight, token_weight, denominator or
            probabilities that require grad.
        TypeError: a DTensor, a sparse or non-floating operand.
        ValueError: shapes that do not fit, an empty weight, options out of range.

    Example:
        >>> hidden = torch.tensor([[1.0, 0.0], [0.0, 2.0], [5.0, 5.0]], requires_grad=True)
        >>> weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], requires_grad=True)
        >>> loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 1, -100]))
        >>> loss  # the last token is ignored
        tensor(0.3955, grad_fn=<_CrossEntropyBackward>)
        >>> loss.backward()
        >>> hidden.grad  # (softmax - onehot) @ weight / 2
        tensor([[-0.2119,  0.1060], [ 0.0533, -0.1065], [ 0.0000,  0.0000]])

    Source: the derivation is in docs/loss.md.
    """
    return _call(
        hidden,
        weight,
        bias,
        target,
        ignore_index,
        reduction,
        class_weight,
        label_smoothing,
        softcap,
        z_loss,
        token_weight,
        denominator,
        chunk_rows,
        return_stats,
        False,
    )


@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    return_stats: Literal[False] = ...,
    inplace: bool = ...,
    **options: "Unpack[_Options]",
) -> Tensor: ...
@overload
def cross_entropy(
    logits: Tensor, target: Tensor, *, return_stats: Literal[True], inplace: bool = ..., **options: "Unpack[_Options]"
) -> LossStats: ...
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    chunk_rows: int | None = None,
    return_stats: bool = False,
    inplace: bool = False,
) -> Tensor | LossStats:
    r"""Cross-entropy of logits, in half the memory of torch's; ``inplace=True`` needs none.

    Equivalent plain code: as ``linear_cross_entropy``, from its line ``if softcap``, with ``logits`` given. Logits are
    read in chunks, in float32 at least; the gradient is made in the backward pass, in the one (..., V) buffer that is
    returned.

    Args:
        logits: (..., V) of any floating dtype.
        target: (...) class indices or (..., V) probabilities.
        ignore_index, reduction, class_weight, label_smoothing, softcap, z_loss, token_weight, denominator, chunk_rows,
            return_stats: as for ``linear_cross_entropy``.
        inplace: the forward pass writes the gradient over the logits, which are lost. What else needs them in a
            backward pass raises; a second backward raises. Without grad nothing is written. Default: False.

    Returns:
        The loss (and statistics), as ``linear_cross_entropy``.

    Raises:
        As ``linear_cross_entropy``; ValueError for inplace=True with logits that are float16, expanded, not one matrix
            in memory, or under torch.compile.

    Example:
        >>> logits = torch.tensor([[123.0, 456.0, 789.0]], dtype=torch.float64, requires_grad=True)
        >>> loss = cross_entropy(logits, torch.tensor([1]), inplace=True)
        >>> loss.item()
        333.0
        >>> loss.backward()
        >>> logits.grad
        tensor([[5.7527e-290, -1.0000e+00,  1.0000e+00]], dtype=torch.float64)

    Source: the derivation is in docs/loss.md.
    """
    return _call(
        logits,
        None,
        None,
        target,
        ignore_index,
        reduction,
        class_weight,
        label_smoothing,
        softcap,
        z_loss,
        token_weight,
        denominator,
        chunk_rows,
        return_stats,
        inplace,
    )


class FusedLinearCrossEntropy(nn.Module):
    """``linear_cross_entropy`` as a module: options once, tensors at each call.

    Equivalent plain code: ``linear_cross_entropy(hidden, weight, target, bias, **options)``. It has no parameters: a
    classifier tied to an embedding stays where it is.

    Args:
        ignore_index, reduction, class_weight, label_smoothing, softcap, z_loss, chunk_rows, return_stats: as for
            ``linear_cross_entropy``; class_weight becomes a buffer that is not saved with the model.

    Forward:
        hidden (..., D), weight (V, D), target (...) or (..., V), bias (V,) or None, and by keyword token_weight (...)
        and denominator. Returns and raises as ``linear_cross_entropy``.

    Example:
        >>> head, loss = nn.Linear(2, 3), FusedLinearCrossEntropy(label_smoothing=0.1)
        >>> loss(torch.zeros(4, 2), head.weight, torch.tensor([0, 1, 2, 0]), torch.zeros(3))
        tensor(1.0986, grad_fn=<_CrossEntropyBackward>)

    Source: the derivation is in docs/loss.md.
    """

    class_weight: Tensor | None

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        class_weight: Tensor | None = None,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
        chunk_rows: int | None = None,
        return_stats: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "softcap": softcap,
            "z_loss": z_loss,
            "chunk_rows": chunk_rows,
            "return_stats": return_stats,
        }

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        token_weight: Tensor | None = None,
        denominator: float | Tensor | None = None,
    ) -> Tensor | LossStats:
        return linear_cross_entropy(
            hidden,
            weight,
            target,
            bias,
            class_weight=self.class_weight,
            token_weight=token_weight,
            denominator=denominator,
            **self.options,
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in self.options.items())
