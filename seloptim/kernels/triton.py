"""The step of seloptim/_rule.py over many CUDA parameters at once: a few launches, and the host never waits for the device.

Transcribed from _rule.py, which is the reference; the sums factorise as in cpu.cpp:

    U = g*s*X*N              grad e = sum U / beta,   grad n = -sum U * e / beta
    V = g*(a or raw)         grad l = sum V / beta
    W = g*raw*(1 + X)*N      grad m = sum W * e,      grad raw = g*e*m*(1 + X)*N + g*(s or 1)*l/beta

with a = |raw|, s = sign(raw), X = expm1(beta*m*a), N = exp(-n), each sum being weighted with the other factor. Every parameter
is cut into tiles. A tile keeps its sums over its rows and its columns, and a second kernel adds them up in a fixed order:
no atomics, so that runs repeat bit for bit. Parameters of equal dtypes and structure share three launches: pull and update,
the factors' Adam, push (one launch where no scale trains). A program finds its parameter in a table of addresses.

Whatever changes from step to step stands in such a table or is computed on the device, so that a captured graph can be replayed.
"""

# Triton's own types ask for tl.constexpr where a plain value is passed.
# pyright: reportArgumentType=false

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._rule import KINDS, Curve, Hyper, Slot, Views

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "the kernel for CUDA parameters needs triton, which torch for CUDA brings along on Linux: pip install triton, "
        "or use fused=None, which takes the eager path"
    ) from error

# ------------------------------------------------------------------------------------------------- what a table has of a parameter

# Integers: sizes, addresses (those of a slot side by side: value, avg, sq, max), where its tiles, jobs and sums begin.
ROWS, COLS, WEIGHT, GRAD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
RAW, ROW_SLOT, COL_SLOT = tl.constexpr(4), tl.constexpr(8), tl.constexpr(12)
TILES, FIRST_TILE, JOBS, FIRST_JOB = 16, tl.constexpr(17), 18, tl.constexpr(19)
ROW_SUMS, COL_SUMS, FIELDS = tl.constexpr(20), tl.constexpr(21), tl.constexpr(22)

# Numbers, float64. First what the host knows: curvature, and Adam's own ...
BETA, BETA1, NOT_BETA1 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BETA2, NOT_BETA2, EPS, WEIGHT_DECAY = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
# ... then what follows from lr and the count of steps: factor of the gradient, decay of raw, 1/sqrt(1 - beta2^t), step size of raw,
# those of the four kinds, and whether moments and values may be written.
FACTOR, DECAY, CORRECTION = tl.constexpr(7), tl.constexpr(8), tl.constexpr(9)
RATE, KIND_RATES = tl.constexpr(10), tl.constexpr(11)
MOVES, WRITES, NUMBERS = tl.constexpr(15), tl.constexpr(16), tl.constexpr(17)

LOG2E = tl.constexpr(1.4426950408889634074)

# ------------------------------------------------------------------------------------------------------------------ the kernels


@triton.jit
def _exp2_parts(y):
    """2^y = 2*half*(1 + part): `half` is a power of two that never overflows, `part` is accurate near zero.

    The polynomials are (2^f - 1) / f on [-1/2, 1/2], interpolated at the Chebyshev nodes.
    """
    if y.dtype == tl.float64:
        y = tl.where(y > 1024.4, 1024.4, y)  # beyond: infinite
        y = tl.where(y < -1020.4, -1020.4, y)  # beyond: -1, and 0 for the exponential
        k = tl.floor(y + 0.5)
        f = y - k
        q = 4.4549605981865183938e-10 * f + 7.0725859692492236999e-9
        q = q * f + 1.0178062445845773521e-7
        q = q * f + 1.3215442587921689653e-6
        q = q * f + 1.5252733829836118394e-5
        q = q * f + 0.00015403530441736050155
        q = q * f + 0.001333355814641693531
        q = q * f + 0.0096181291076068885273
        q = q * f + 0.055504108664821594339
        q = q * f + 0.2402265069591009822
        q = q * f + 0.69314718055994530942
        half = ((k.to(tl.int64) + 1022) << 52).to(tl.float64, bitcast=True)
    else:
        y = tl.where(y > 128.4, 128.4, y)
        y = tl.where(y < -124.4, -124.4, y)
        k = tl.floor(y + 0.5)
        f = y - k
        q = 0.00015453162945120690 * f + 0.0013390863364671234
        q = q * f + 0.0096180825572778515
        q = q * f + 0.055503571142190778
        q = q * f + 0.24022650760568127
        q = q * f + 0.69314718802622878
        half = ((k.to(tl.int32) + 126) << 23).to(tl.float32, bitcast=True)
    return half, q * f


@triton.jit
def _expm1_base2(y):
    half, part = _exp2_parts(y)
    x = half * part + (half - 0.5)
    return x + x


@triton.jit
def _exp_base2(y):
    half, part = _exp2_parts(y)
    x = half * part + half
    return x + x


@triton.jit
def _pointer(row, field, dtype: tl.constexpr, aligned: tl.constexpr):
    pointer = tl.load(row + field).to(tl.pointer_type(dtype))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _tile(ints, owners, height: tl.constexpr, width: tl.constexpr, aligned: tl.constexpr):
    """Which part of which parameter this program works on."""
    pid = tl.program_id(0)
    x = tl.load(owners + pid)
    row = ints + x * FIELDS
    rows, cols = tl.load(row + ROWS), tl.load(row + COLS)
    if aligned:
        cols = tl.multiple_of(cols, 16)
    down, across = (rows + height - 1) // height, (cols + width - 1) // width
    rest = pid - tl.load(row + FIRST_TILE)
    b, tile = rest // (down * across), rest % (down * across)
    i = (tile // across) * height + tl.arange(0, height)[:, None]
    j = (tile % across) * width + tl.arange(0, width)[None, :]
    return x, row, rows, cols, down, across, b, tile, i, j


@triton.jit
def _factor(row, slot, start, index, kind: tl.constexpr, dtype: tl.constexpr):
    """One kind of the packed factor (batch, length, kinds) at `index` of a matrix whose entries begin at `start`."""
    return tl.load(_pointer(row, slot, dtype, False) + (start + index) * 4 + kind)


@triton.jit
def _row_scales(row, b, rows, i, kind: tl.constexpr, one: tl.constexpr, has: tl.constexpr, dtype: tl.constexpr):
    """A kind of the row factor, (height, 1); 1 without one."""
    start = b if one else b * rows
    index = i * 0 if one else tl.minimum(i, rows - 1)
    return _factor(row, ROW_SLOT, start, index, kind, dtype) if has else tl.full(i.shape, 1.0, dtype)


@triton.jit
def _col_scales(row, b, cols, j, kind: tl.constexpr, has: tl.constexpr, dtype: tl.constexpr):
    """A kind of the column factor, (1, width); 1 without one."""
    index = tl.minimum(j, cols - 1)
    return _factor(row, COL_SLOT, b * cols, index, kind, dtype) if has else tl.full(j.shape, 1.0, dtype)


@triton.jit
def _map(raw, e, l, m, n, beta, ce, cl, cm, cn, congruent: tl.constexpr, has_n: tl.constexpr):
    """weight = s*(e/beta)*N*X + (l/beta)*(a or raw), the scales being row factors e, l, m, n times column factors ce, ..."""
    a = tl.abs(raw)
    X = _expm1_base2(a * (_to_base2(m, beta) * cm))
    X = tl.where(raw < 0, -X, X) * (e / beta * ce)
    if has_n:
        X = X * _exp_base2((n * -LOG2E) * cn)
    return X + (l / beta * cl) * (raw if congruent else a)


@triton.jit
def _to_base2(m, beta):
    """beta*m*log2(e), rounded once."""
    return (m.to(tl.float64) * beta.to(tl.float64) * LOG2E).to(m.dtype)


@triton.jit
def _pull_and_update(
    ints,
    numbers,
    owners,
    sums,
    learned: tl.constexpr,
    has_row: tl.constexpr,
    one_row: tl.constexpr,
    has_col: tl.constexpr,
    has_n: tl.constexpr,
    congruent: tl.constexpr,
    coupled: tl.constexpr,
    amsgrad: tl.constexpr,
    as_lerp: tl.constexpr,
    aligned: tl.constexpr,
    dtype: tl.constexpr,
    weight_dtype: tl.constexpr,
    grad_dtype: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    x, row, rows, cols, down, across, b, tile, i, j = _tile(ints, owners, height, width, aligned)
    number = numbers + x * NUMBERS
    inside = (i < rows) & (j < cols)
    at = (b * rows + i) * cols + j
    beta = tl.load(number + BETA).to(dtype)
    weights = _pointer(row, WEIGHT, weight_dtype, aligned)

    # The gradient of the weight as torch.optim.Adam would see it.
    g = tl.load(_pointer(row, GRAD, grad_dtype, aligned) + at, mask=inside, other=0.0).to(dtype)
    g = g * tl.load(number + FACTOR).to(dtype)
    if coupled:
        weight = tl.load(weights + at, mask=inside, other=0.0).to(dtype)
        g = g + weight * tl.load(number + WEIGHT_DECAY).to(dtype)

    raws = _pointer(row, RAW, dtype, aligned)
    raw = tl.load(raws + at, mask=inside, other=0.0)
    e = _row_scales(row, b, rows, i, 0, one_row, has_row, dtype)
    l = _row_scales(row, b, rows, i, 1, one_row, has_row, dtype)
    m = _row_scales(row, b, rows, i, 2, one_row, has_row, dtype)
    ce = _col_scales(row, b, cols, j, 0, has_col, dtype)
    cl = _col_scales(row, b, cols, j, 1, has_col, dtype)
    cm = _col_scales(row, b, cols, j, 2, has_col, dtype)
    n, cn = e, ce
    if has_n:
        n = _row_scales(row, b, rows, i, 3, one_row, has_row, dtype)
        cn = _col_scales(row, b, cols, j, 3, has_col, dtype)

    negative = raw < 0
    signed_g = tl.where(negative, -g, g)
    path = g if congruent else signed_g
    X = _expm1_base2(tl.abs(raw) * (_to_base2(m, beta) * cm))
    H = g * X + g  # g*(1 + X)*N
    U = signed_g * X
    if has_n:
        N = _exp_base2((n * -LOG2E) * cn)
        H = H * N
        U = U * N
    # The slope at 0 is the mean of the two one-sided ones.
    straight = path if congruent else tl.where(raw != 0, path, 0.0)
    grad = H * (e * m * (ce * cm)) + straight * (l / beta * cl)

    if learned:
        # A number that is not finite would spread over its whole row and column. W is not finite where U or V is not.
        V = path * raw
        W = H * raw
        finite = (W - W) == 0
        U = tl.where(finite, U, 0.0)
        V = tl.where(finite, V, 0.0)
        W = tl.where(finite, W, 0.0)
        if has_row:
            place = sums + tl.load(row + ROW_SUMS)
            if one_row:
                place = place + (b * down * across + tile) * 4
                if learned & 1:
                    tl.store(place, tl.sum(tl.sum(U * ce, 1), 0))
                if learned & 2:
                    tl.store(place + 1, tl.sum(tl.sum(V * cl, 1), 0))
                if learned & 4:
                    tl.store(place + 2, tl.sum(tl.sum(W * (ce * cm), 1), 0))
                if learned & 8:
                    tl.store(place + 3, tl.sum(tl.sum(U * (ce * cn), 1), 0))
            else:
                place = place + ((b * across + tile % across) * rows + i) * 4
                if learned & 1:
                    tl.store(place, tl.sum(U * ce, 1)[:, None], mask=i < rows)
                if learned & 2:
                    tl.store(place + 1, tl.sum(V * cl, 1)[:, None], mask=i < rows)
                if learned & 4:
                    tl.store(place + 2, tl.sum(W * (ce * cm), 1)[:, None], mask=i < rows)
                if learned & 8:
                    tl.store(place + 3, tl.sum(U * (ce * cn), 1)[:, None], mask=i < rows)
        if has_col:
            place = sums + tl.load(row + COL_SUMS) + ((b * down + tile // across) * cols + j) * 4
            if learned & 1:
                tl.store(place, tl.sum(U * e, 0)[None, :], mask=j < cols)
            if learned & 2:
                tl.store(place + 1, tl.sum(V * l, 0)[None, :], mask=j < cols)
            if learned & 4:
                tl.store(place + 2, tl.sum(W * (e * m), 0)[None, :], mask=j < cols)
            if learned & 8:
                tl.store(place + 3, tl.sum(U * (e * n), 0)[None, :], mask=j < cols)

    # Adam on raw.
    moves = tl.where(inside, tl.load(number + MOVES), 0.0) != 0
    writes = tl.where(inside, tl.load(number + WRITES), 0.0) != 0
    avgs = _pointer(row, RAW + 1, dtype, aligned)
    sqs = _pointer(row, RAW + 2, dtype, aligned)
    avg = tl.load(avgs + at, mask=inside, other=0.0)
    sq = tl.load(sqs + at, mask=inside, other=0.0)
    if as_lerp:
        avg = avg + (grad - avg) * tl.load(number + NOT_BETA1).to(dtype)
    else:
        avg = avg * tl.load(number + BETA1).to(dtype) + grad * tl.load(number + NOT_BETA1).to(dtype)
    sq = sq * tl.load(number + BETA2).to(dtype) + grad * (grad * tl.load(number + NOT_BETA2).to(dtype))
    tl.store(avgs + at, avg, mask=moves)
    tl.store(sqs + at, sq, mask=moves)
    if amsgrad:
        largest = _pointer(row, RAW + 3, dtype, aligned)
        before = tl.load(largest + at, mask=inside, other=0.0)
        sq = tl.where(sq <= before, before, sq)
        tl.store(largest + at, sq, mask=moves)
    denominator = tl.sqrt(sq) * tl.load(number + CORRECTION).to(dtype) + tl.load(number + EPS).to(dtype)
    step = tl.load(number + RATE).to(dtype) * (avg / denominator)
    raw = raw * tl.load(number + DECAY).to(dtype) - step
    tl.store(raws + at, raw, mask=writes)
    if not learned:
        # The scales stay as they are, so that the weight can be mapped here.
        weight = _map(raw, e, l, m, n, beta, ce, cl, cm, cn, congruent, has_n)
        tl.store(weights + at, weight.to(weight_dtype), mask=writes)


@triton.jit
def _update_factors(
    ints,
    numbers,
    owners,
    sums,
    learned: tl.constexpr,
    has_row: tl.constexpr,
    one_row: tl.constexpr,
    has_col: tl.constexpr,
    amsgrad: tl.constexpr,
    dtype: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    chunk: tl.constexpr,
):
    """Adam on `chunk` entries of a row or column factor, from the sums that the tiles have left, added in their order."""
    pid = tl.program_id(0)
    x = tl.load(owners + pid)
    row = ints + x * FIELDS
    number = numbers + x * NUMBERS
    rows, cols = tl.load(row + ROWS), tl.load(row + COLS)
    down, across = (rows + height - 1) // height, (cols + width - 1) // width
    rest = pid - tl.load(row + FIRST_JOB)
    row_length = rows * has_row
    if one_row:
        row_length = rows * 0 + 1
    row_chunks, col_chunks = (row_length + chunk - 1) // chunk, (cols * has_col + chunk - 1) // chunk
    b, c = rest // (row_chunks + col_chunks), rest % (row_chunks + col_chunks)
    is_row = c < row_chunks
    length = tl.where(is_row, row_length, cols)
    entry = tl.where(is_row, c, c - row_chunks) * chunk + tl.arange(0, chunk)[:, None]
    kind = tl.arange(0, 4)[None, :]
    inside = (entry < length) & (((learned >> kind) & 1) != 0)

    total = tl.zeros((chunk, 4), dtype)
    if one_row:
        # One number: its sums stand side by side, one of each tile.
        count = tl.where(is_row, down * across, down)
        turns = tl.where(is_row, (down * across + chunk - 1) // chunk, down)
        place = sums + tl.where(is_row, tl.load(row + ROW_SUMS), tl.load(row + COL_SUMS)) + b * count * length * 4
        for s in range(turns):
            term = tl.where(is_row, s * chunk + tl.arange(0, chunk)[:, None], s * length + entry)
            here = tl.where(is_row, term < count, entry < length) & (((learned >> kind) & 1) != 0)
            total += tl.load(place + term * 4 + kind, mask=here, other=0.0)
        total = tl.where(is_row, tl.sum(total, 0)[None, :], total)
    else:
        count = tl.where(is_row, across, down)
        place = sums + tl.where(is_row, tl.load(row + ROW_SUMS), tl.load(row + COL_SUMS)) + b * count * length * 4
        for s in range(count):
            total += tl.load(place + (s * length + entry) * 4 + kind, mask=inside, other=0.0)

    slot = row + tl.where(is_row, ROW_SLOT, COL_SLOT)
    first = b * length + tl.minimum(entry, length - 1)
    at = first * 4 + kind
    values = _pointer(slot, 0, dtype, False)
    beta = tl.load(number + BETA).to(dtype)
    e = tl.load(values + first * 4)
    unit = tl.where(kind < 2, 1 / beta, tl.where(kind == 2, e, -e / beta))
    grad = tl.where(inside, total * unit, 0.0)

    inside = entry < length
    moves = tl.where(inside, tl.load(number + MOVES), 0.0) != 0
    avgs, sqs = _pointer(slot, 1, dtype, False), _pointer(slot, 2, dtype, False)
    value = tl.load(values + at)
    avg = tl.load(avgs + at) * tl.load(number + BETA1).to(dtype) + grad * tl.load(number + NOT_BETA1).to(dtype)
    sq = tl.load(sqs + at) * tl.load(number + BETA2).to(dtype)
    sq = sq + grad * (grad * tl.load(number + NOT_BETA2).to(dtype))
    tl.store(avgs + at, avg, mask=moves)
    tl.store(sqs + at, sq, mask=moves)
    if amsgrad:
        largest = _pointer(slot, 3, dtype, False)
        before = tl.load(largest + at)
        sq = tl.where(sq <= before, before, sq)
        tl.store(largest + at, sq, mask=moves)
    rate = tl.load(number + KIND_RATES + kind).to(dtype)
    denominator = tl.sqrt(sq) * tl.load(number + CORRECTION).to(dtype) + tl.load(number + EPS).to(dtype)
    # A frozen kind has the rate 0, and 0/0 with eps = 0.
    writes = (tl.where(inside, tl.load(number + WRITES), 0.0) != 0) & (rate != 0)
    tl.store(values + at, value - rate * (avg / denominator), mask=writes)


@triton.jit
def _push(
    ints,
    numbers,
    owners,
    has_row: tl.constexpr,
    one_row: tl.constexpr,
    has_col: tl.constexpr,
    has_n: tl.constexpr,
    congruent: tl.constexpr,
    aligned: tl.constexpr,
    dtype: tl.constexpr,
    weight_dtype: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    x, row, rows, cols, _down, _across, b, _tile_index, i, j = _tile(ints, owners, height, width, aligned)
    number = numbers + x * NUMBERS
    inside = (i < rows) & (j < cols)
    at = (b * rows + i) * cols + j
    raw = tl.load(_pointer(row, RAW, dtype, aligned) + at, mask=inside, other=0.0)
    e = _row_scales(row, b, rows, i, 0, one_row, has_row, dtype)
    l = _row_scales(row, b, rows, i, 1, one_row, has_row, dtype)
    m = _row_scales(row, b, rows, i, 2, one_row, has_row, dtype)
    ce = _col_scales(row, b, cols, j, 0, has_col, dtype)
    cl = _col_scales(row, b, cols, j, 1, has_col, dtype)
    cm = _col_scales(row, b, cols, j, 2, has_col, dtype)
    n, cn = e, ce
    if has_n:
        n = _row_scales(row, b, rows, i, 3, one_row, has_row, dtype)
        cn = _col_scales(row, b, cols, j, 3, has_col, dtype)
    beta = tl.load(number + BETA).to(dtype)
    weight = _map(raw, e, l, m, n, beta, ce, cl, cm, cn, congruent, has_n)
    writes = tl.where(inside, tl.load(number + WRITES), 0.0) != 0
    tl.store(_pointer(row, WEIGHT, weight_dtype, aligned) + at, weight.to(weight_dtype), mask=writes)


# ------------------------------------------------------------------------------------------------------------------ the host's side

DTYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
WIDE, NARROW = (32, 128), (256, 16)  # tiles; the second for rows of at most 16 numbers
CHUNK = 128  # entries of a factor that one program steps
WARPS = 8

# The host's side of what a captured graph uploads at each replay, for as long as the parameter lives.
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# A buffer to capture with, from an earlier step: memory of this kind should not be asked for during a capture.
_spare: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Part(Protocol):
    """What is needed of one parameter, on the device of the others; gradient and state are contiguous."""

    @property
    def param(self) -> Tensor: ...  # itself, not a view: what a graph uploads lives as long as it
    @property
    def grad(self) -> Tensor: ...
    @property
    def state(self) -> Views: ...
    @property
    def curve(self) -> Curve: ...
    @property
    def step(self) -> float | Tensor: ...  # counts this one; a tensor stays on its device
    @property
    def slope(self) -> float: ...
    @property
    def rates(self) -> Sequence[float] | Tensor: ...  # (kinds,): a tensor, on the same device, where step is one


class Variant(NamedTuple):
    """What parameters must have in common to share a launch."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    grad_dtype: torch.dtype
    has_row: bool
    one_row: bool  # a factor of one number, which serves all rows
    has_col: bool
    has_n: bool
    narrow: bool
    aligned: bool


class Matrices(NamedTuple):
    """A parameter as the kernels see it."""

    batch: int
    rows: int
    cols: int
    row: Slot | None
    col: Slot | None
    addresses: list[int]  # of weight, gradient and the three slots


def step(
    parts: Sequence[Part],
    weights: Sequence[Tensor],
    hyper: Hyper,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One step of parameters of one group on one device, in place; three launches for each Variant among them.

    Arguments:
        parts: not empty parameters without a residual, which share the combination rule and the kinds that train.
        weights: what is written in the parameters' place: their values, contiguous.
        hyper: Adam's; its lr may be a tensor on the device.
        grad_scale: what the gradients are to be divided by; None for 1.
        found_inf: where it is not 0, nothing at all is written; None for 0.
    """
    groups: dict[Variant, list[tuple[Part, Matrices]]] = defaultdict(list)
    for part, weight in zip(parts, weights, strict=True):
        matrices = _matrices(part, weight)
        groups[_variant(part, matrices)].append((part, matrices))
    device = parts[0].param.device
    guard: AbstractContextManager[Any] = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with guard:
        for variant, members in groups.items():
            _launch(variant, members, hyper, grad_scale, found_inf)


def _matrices(part: Part, weight: Tensor) -> Matrices:
    batch, rows, cols = part.state.raw.value.shape
    row, col = part.state.scale_row, part.state.scale_col
    if cols == 1 and rows > 1:
        # A column is worked on as a row, which fills tiles.
        rows, cols = cols, rows
        if row is None or row.value.shape[-2] > 1:
            row, col = col, row
    addresses = [weight.data_ptr(), part.grad.data_ptr()]
    for slot in (part.state.raw, row, col):
        tensors = slot or ()
        addresses += [0 if tensor is None else tensor.data_ptr() for tensor in tensors] + [0] * (4 - len(tensors))
    return Matrices(batch, rows, cols, row, col, addresses)


def _variant(part: Part, x: Matrices) -> Variant:
    return Variant(
        part.state.raw.value.dtype,
        part.param.dtype,
        part.grad.dtype,
        x.row is not None,
        x.row is not None and x.row.value.shape[-2] == 1,
        x.col is not None,
        part.curve.has_n,
        x.cols <= NARROW[1],
        x.cols % 16 == 0 and all(address % 16 == 0 for address in x.addresses),
    )


def _launch(
    variant: Variant,
    members: Sequence[tuple[Part, Matrices]],
    hyper: Hyper,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    height, width = NARROW if variant.narrow else WIDE
    table: list[list[int]] = []
    tiles = jobs = sums = 0
    for _, x in members:
        down, across = -(-x.rows // height), -(-x.cols // width)
        row_length = 0 if x.row is None else x.row.value.shape[-2]
        col_length = x.cols if variant.has_col else 0
        own_tiles = x.batch * down * across
        own_jobs = x.batch * (-(-row_length // CHUNK) + -(-col_length // CHUNK))
        row_sums = own_tiles if variant.one_row else x.batch * across * row_length
        table.append(
            [x.rows, x.cols, *x.addresses, own_tiles, tiles, own_jobs, jobs, sums, sums + row_sums * len(KINDS)]
        )
        tiles, jobs = tiles + own_tiles, jobs + own_jobs
        sums += (row_sums + x.batch * down * col_length) * len(KINDS)
    first, curve = members[0][0], members[0][0].curve
    device = first.param.device
    parts = [part for part, _ in members]
    ints, numbers = _tables(table, parts, hyper, grad_scale, found_inf)
    owners = torch.repeat_interleave(ints[:, TILES], output_size=tiles)
    learned = sum(1 << k for k, kind in enumerate(KINDS) if kind in curve.learned)
    congruent, dtype = curve.combine == "congruent", DTYPES[variant.dtype]
    has = {"has_row": variant.has_row, "one_row": variant.one_row, "has_col": variant.has_col}
    shape = {"dtype": dtype, "height": height, "width": width, "num_warps": WARPS}
    partial = torch.empty(sums if learned else 0, dtype=variant.dtype, device=device)
    _pull_and_update[(tiles,)](
        ints,
        numbers,
        owners,
        partial,
        learned=learned,
        has_n=variant.has_n,
        congruent=congruent,
        coupled=hyper.weight_decay != 0 and not hyper.decoupled,
        amsgrad=hyper.amsgrad,
        as_lerp=hyper.beta1 > 0.5,
        aligned=variant.aligned,
        weight_dtype=DTYPES[variant.weight_dtype],
        grad_dtype=DTYPES[variant.grad_dtype],
        **has,
        **shape,
    )
    if not learned:
        return
    _update_factors[(jobs,)](
        ints,
        numbers,
        torch.repeat_interleave(ints[:, JOBS], output_size=jobs),
        partial,
        learned=learned,
        amsgrad=hyper.amsgrad,
        chunk=CHUNK,
        **has,
        **shape,
    )
    _push[(tiles,)](
        ints,
        numbers,
        owners,
        has_n=variant.has_n,
        congruent=congruent,
        aligned=variant.aligned,
        weight_dtype=DTYPES[variant.weight_dtype],
        **has,
        **shape,
    )


def _tables(
    table: list[list[int]],
    parts: Sequence[Part],
    hyper: Hyper,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(ints, numbers) on the device. What the host knows goes there in one copy; the rest follows from it there."""
    device = parts[0].param.device
    on_device = isinstance(parts[0].step, Tensor)
    rows = []
    for part in parts:
        known = [0.0] * 5 if on_device else [part.step, *part.rates]
        rows.append([float(part.curve.beta), part.slope, *known])
    host = torch.tensor(rows, dtype=torch.float64, device="cpu")
    given = (hyper.lr, grad_scale, found_inf)
    waits = on_device or any(isinstance(number, Tensor) and number.device.type != "cpu" for number in given)
    if not waits:
        host = _numbers(host, host[:, 2], host[:, 3:], hyper, grad_scale, found_inf)
    ints = torch.tensor(table, dtype=torch.int64, device="cpu")
    sent = _upload(parts[0].param, torch.cat([ints.flatten(), host.view(torch.int64).flatten()]), device)
    numbers = sent[ints.numel() :].view(torch.float64).view(host.shape)
    if waits:
        steps, rates = numbers[:, 2], numbers[:, 3:]
        if on_device:
            steps = torch.stack([torch.as_tensor(part.step) for part in parts]).double()
            rates = torch.stack([torch.as_tensor(part.rates) for part in parts]).double()
        numbers = _numbers(numbers, steps, rates, hyper, grad_scale, found_inf)
    return sent[: ints.numel()].view(ints.shape), numbers


def _numbers(
    known: Tensor,  # (parameters, at least 2), float64: curvature, what lr is divided by for raw
    steps: Tensor,  # (parameters,), float64, counting this step
    rates: Tensor,  # (parameters, kinds), float64: multiples of lr
    hyper: Hyper,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> Tensor:
    """The second table, (parameters, NUMBERS), where its arguments are."""

    def column(value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor) and (value.device == steps.device or value.device.type != "cpu"):
            return value.to(steps.device, torch.float64).reshape(-1, 1).expand(len(steps), -1)
        return torch.full_like(steps, float(value)).unsqueeze(1)  # a tensor on the host is a number

    lr = column(hyper.lr)
    moves: float | Tensor = 1.0 if found_inf is None else column(found_inf) == 0
    rate = lr / (1 - hyper.beta1 ** column(steps))
    sign = -1.0 if hyper.maximize else 1.0
    numbers: list[float | Tensor] = [
        known[:, 0],
        hyper.beta1,
        1 - hyper.beta1,
        hyper.beta2,
        1 - hyper.beta2,
        hyper.eps,
        hyper.weight_decay,
        sign if grad_scale is None else sign / column(grad_scale),
        1 - lr * hyper.weight_decay if hyper.decoupled else 1.0,
        (1 - hyper.beta2 ** column(steps)).rsqrt(),
        rate / column(known[:, 1]),
        *(rate * rates).unbind(1),
        moves,
        (lr != 0) * moves,
    ]
    return torch.cat([column(number) for number in numbers], 1)


def _upload(owner: Tensor, host: Tensor, device: torch.device) -> Tensor:
    """`host` on the device, copied without waiting."""
    if device.type != "cuda":
        return host
    if not torch.cuda.is_current_stream_capturing():
        pinned = host.pin_memory()
        if owner not in _spare or _spare[owner].numel() < host.numel():
            _spare[owner] = torch.empty_like(pinned, pin_memory=True)
        return pinned.to(device, non_blocking=True)
    pinned = _spare.pop(owner, None)
    if pinned is None or pinned.numel() < host.numel():
        pinned = torch.empty_like(host, pin_memory=True)
    pinned = pinned[: host.numel()].copy_(host)
    _kept[owner] = [*(_kept.get(owner) or ()), pinned]
    return pinned.to(device, non_blocking=True)
