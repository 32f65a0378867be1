"""Triton kernels of the update rules and gradient statistics; only `triton_backend.py` imports them."""

# Triton has no type annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from patrickstar._kernels import adam_8bit, grad_norm
from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.schedule_free import ScheduleFreeRule
from patrickstar._kernels.sgd import SGDRule

# [Note: Triton's arithmetic]
# Three properties of Triton would break [Note: bitwise-identical backends]. It contracts multiplications and additions
# unless a launch sets `enable_fp_fusion=False`. `/` and `tl.sqrt` are approximate for float32; `tl.div_rn` and
# `tl.sqrt_rn` are not. GPUs and the interpreter cast NaNs, ties and denormals differently, so bfloat16 is widened and
# rounded by integer operations on its bits; both cast float16 as IEEE 754 requires, so only its NaN is set by bits.
# No floats are summed by `tl.sum`, whose order of additions is unspecified.

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""True if the kernels run in Triton's interpreter on the CPU. Fixed when this module is imported."""

ADAM = tl.constexpr(AdamRule.code)
ADAM_8BIT = tl.constexpr(adam_8bit.Adam8bitRule.code)
SGD = tl.constexpr(SGDRule.code)
SCHEDULE_FREE = tl.constexpr(ScheduleFreeRule.code)
SQUARE_OFFSET, RATIO_OFFSET = tl.constexpr(adam_8bit.SQUARE_OFFSET), tl.constexpr(adam_8bit.RATIO_OFFSET)
SQUARE_WORD, RATIO_WORD = tl.constexpr(adam_8bit.SQUARE_WORD), tl.constexpr(adam_8bit.RATIO_WORD)
SQUARE_SHIFT, RATIO_SHIFT = tl.constexpr(adam_8bit.SQUARE_SHIFT), tl.constexpr(adam_8bit.RATIO_SHIFT)
SQUARE_MASK, HASH_SHIFT = tl.constexpr((1 << adam_8bit.SQUARE_SHIFT) - 1), tl.constexpr(32 - adam_8bit.RATIO_SHIFT)
ROOT_SHIFT = tl.constexpr(adam_8bit.ROOT_SHIFT)
# Exponents of the smallest scale of m, and of the inverse of the largest.
FIRST_SCALE = tl.constexpr(adam_8bit.ONE - adam_8bit.LEAST_ROOT)
LAST_INVERSE = tl.constexpr(adam_8bit.ONE + adam_8bit.LEAST_ROOT - 31)
LANES = tl.constexpr(grad_norm.LANES)
ROWS = tl.constexpr(grad_norm.ROWS)
BLOCK_NUMEL = tl.constexpr(grad_norm.BLOCK_NUMEL)
# Rows loaded before the first is added, enough to hide the memory latency. Must divide `ROWS`.
UNROLLED_ROWS = tl.constexpr(8)


@triton.jit
def _canonical(value):
    return tl.where(value == value, value, float("nan"))


@triton.jit
def _widened(values):
    if values.dtype == tl.bfloat16:
        words = values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        wide = words.to(tl.float32, bitcast=True)
    else:
        wide = values.to(tl.float32)
    return wide


@triton.jit
def _narrowed(values, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        words = values.to(tl.uint32, bitcast=True)
        halves = (words + 0x7FFF + ((words >> 16) & 1)) >> 16  # to nearest, ties to even
        halves = tl.where(values == values, halves, 0x7FC0).to(tl.uint16)
        narrow = halves.to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        halves = values.to(tl.float16).to(tl.uint16, bitcast=True)
        halves = tl.where(values == values, halves, 0x7E00).to(tl.uint16)
        narrow = halves.to(tl.float16, bitcast=True)
    else:
        narrow = values
    return narrow


@triton.jit
def _gradient(grad, accumulated, scales, offsets, mask):
    grads = _widened(tl.load(grad + offsets, mask=mask, other=0.0))
    if accumulated is not None:
        grads = tl.load(accumulated + offsets, mask=mask, other=0.0) + grads
    for index in tl.static_range(len(scales)):
        grads = grads * scales[index]
    return grads


@triton.jit
def _adam(grad, master, exp_avg, exp_avg_sq, scalars, mode: tl.constexpr):
    decay, weight1, beta2, weight2, correction2, eps, minus_step_size, light = scalars
    if mode == 1:
        grad = grad + master * decay
    if mode == 2:
        master = master * decay
    change = (grad - exp_avg) * weight1
    exp_avg = tl.where(light != 0, exp_avg, grad) + change
    exp_avg_sq = exp_avg_sq * beta2 + grad * weight2 * grad
    denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), correction2) + eps
    master = master + tl.div_rn(exp_avg * minus_step_size, denominator)
    return master, exp_avg, exp_avg_sq


@triton.jit
def _decoded(codes, word: tl.constexpr, shift: tl.constexpr, offset: tl.constexpr):
    return ((codes.to(tl.uint32) << shift) + word).to(tl.float32, bitcast=True) - offset


@triton.jit
def _encoded(values, random, word: tl.constexpr, shift: tl.constexpr, largest: tl.constexpr):
    words = values.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    words = tl.where(words > 0x7F800000, 0x7F800000, words)
    codes = (words - word + random) >> shift
    return tl.where(codes > largest, largest, codes)


@triton.jit
def _hashed(masters, seed):
    words = masters.to(tl.uint32, bitcast=True) ^ ((tl.zeros_like(masters) + seed).to(tl.uint32) << 8)
    words = (words ^ (words >> 16)) * tl.full(words.shape, 0x7FEB352D, tl.uint32)
    words = (words ^ (words >> 15)) * tl.full(words.shape, 0x846CA68B, tl.uint32)
    return words ^ (words >> 16)


@triton.jit
def _adam_8bit(grad, master, ratios, squares, scalars, mode: tl.constexpr):
    """Return the new master, and the new codes of m and v. See [Note: 8-bit states]."""
    decay, weight1, beta2, weight2, correction2, eps, minus_step_size, light, seed = scalars
    exp_avg_sq = _decoded(squares, SQUARE_WORD, SQUARE_SHIFT, SQUARE_OFFSET)
    exp_avg = _decoded(ratios & 127, RATIO_WORD, RATIO_SHIFT, RATIO_OFFSET)
    exp_avg = exp_avg * (((squares.to(tl.uint32) >> ROOT_SHIFT) + FIRST_SCALE) << 23).to(tl.float32, bitcast=True)
    exp_avg = tl.where(ratios > 127, -exp_avg, exp_avg)
    values = (decay, weight1, beta2, weight2, correction2, eps, minus_step_size, light)
    master, exp_avg, exp_avg_sq = _adam(grad, master, exp_avg, exp_avg_sq, values, mode)
    master = _canonical(master)
    words = _hashed(master, seed)
    random = words & SQUARE_MASK
    squares = _encoded(exp_avg_sq + SQUARE_OFFSET, random, SQUARE_WORD, SQUARE_SHIFT, 255)
    inverse = (((31 - (squares >> ROOT_SHIFT)) + LAST_INVERSE) << 23).to(tl.float32, bitcast=True)
    random = (words * tl.full(words.shape, 0x9E3779B1, tl.uint32)) >> HASH_SHIFT
    ratios = _encoded(tl.abs(exp_avg) * inverse + RATIO_OFFSET, random, RATIO_WORD, RATIO_SHIFT, 127)
    return master, tl.where(exp_avg < 0, ratios + 128, ratios), squares


@triton.jit
def _sgd(grad, master, momentum_buffer, offsets, mask, scalars, mode: tl.constexpr):
    decay, momentum, weight, minus_lr, decays = scalars
    grad = tl.where(decays != 0, grad + master * decay, grad)
    direction = grad
    if mode != 0:
        if mode == 1 or mode == 3:
            buffer = grad
        else:
            buffer = tl.load(momentum_buffer + offsets, mask=mask, other=0.0) * momentum + grad * weight
        direction = buffer
        if mode >= 3:
            direction = grad + buffer * momentum
        tl.store(momentum_buffer + offsets, _canonical(buffer), mask=mask)
    return master + direction * minus_lr


@triton.jit
def _lion(grad, master, exp_avg, scalars):
    decay, beta1, weight1, beta2, weight2, minus_lr = scalars
    direction = exp_avg * beta1 + grad * weight1
    sign = tl.where(direction > 0, 1.0, tl.where(direction < 0, -1.0, direction * 0.0))
    master = master * decay + sign * minus_lr
    exp_avg = exp_avg * beta2 + grad * weight2
    return master, exp_avg


@triton.jit
def _schedule_free(grad, master, z, exp_avg_sq, scalars, mode: tl.constexpr):
    decay, beta2, weight2, correction2, eps, weight, step_of_y, minus_lr = scalars
    if mode >= 4:
        z = master
    exp_avg_sq = exp_avg_sq * beta2 + grad * weight2 * grad
    direction = tl.div_rn(grad, tl.sqrt_rn(tl.div_rn(exp_avg_sq, correction2)) + eps)
    if mode % 2 == 1:
        direction = direction + master * decay
    moved = (z - master) * weight
    interpolated = z + moved
    if mode % 4 >= 2:
        interpolated = master + moved
    return interpolated + direction * step_of_y, z + direction * minus_lr, exp_avg_sq


@triton.jit
def _joined(uppers, lowers, marked):
    """Return masters and second moments. See [Note: split masters]."""
    words, lowers = marked.to(tl.uint32, bitcast=True), lowers.to(tl.uint16, bitcast=True).to(tl.uint32)
    rounded_up = (lowers + (words >> 31) > 0x8000).to(tl.uint32)
    uppers = uppers.to(tl.uint16, bitcast=True).to(tl.uint32) - rounded_up
    return ((uppers << 16) | lowers).to(tl.float32, bitcast=True), (words & 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _lower(masters):
    return masters.to(tl.uint32, bitcast=True).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def _marked(moments, masters):
    ties = masters.to(tl.uint32, bitcast=True) & 0x1FFFF
    words = moments.to(tl.uint32, bitcast=True)
    return tl.where(ties == 0x18000, words | 0x80000000, words).to(tl.float32, bitcast=True)


@triton.jit
def update_kernel(
    param,
    upper,
    grad,
    accumulated,
    master,
    first_state,
    second_state,
    numel,
    scalars,
    scales,
    rule: tl.constexpr,
    mode: tl.constexpr,
    program_numel: tl.constexpr,
):
    """Update `program_numel` elements of a span with the operations of `Rule.apply`.

    `upper` of whole masters, `accumulated` and missing states are None. `scalars` (of the rule) and `scales` (of the
    gradient) are tuples of float32 numbers.
    """
    offsets = tl.program_id(0).to(tl.int64) * program_numel + tl.arange(0, program_numel)
    mask = offsets < numel
    grads = _gradient(grad, accumulated, scales, offsets, mask)
    masters = tl.load(master + offsets, mask=mask, other=0)
    if rule == ADAM:
        exp_avgs = tl.load(first_state + offsets, mask=mask, other=0.0)
        exp_avg_sqs = tl.load(second_state + offsets, mask=mask, other=0.0)
        if upper is not None:
            uppers = tl.load(upper + offsets, mask=mask, other=0.0)
            masters, exp_avg_sqs = _joined(uppers, masters, exp_avg_sqs)
        masters, exp_avgs, exp_avg_sqs = _adam(grads, masters, exp_avgs, exp_avg_sqs, scalars, mode)
        exp_avg_sqs = _canonical(exp_avg_sqs)
        if upper is not None:
            exp_avg_sqs = _marked(exp_avg_sqs, _canonical(masters))
        tl.store(first_state + offsets, _canonical(exp_avgs), mask=mask)
        tl.store(second_state + offsets, exp_avg_sqs, mask=mask)
    elif rule == ADAM_8BIT:
        ratios = tl.load(first_state + offsets, mask=mask, other=0)
        squares = tl.load(second_state + offsets, mask=mask, other=0)
        masters, ratios, squares = _adam_8bit(grads, masters, ratios, squares, scalars, mode)
        tl.store(first_state + offsets, ratios.to(tl.uint8), mask=mask)
        tl.store(second_state + offsets, squares.to(tl.uint8), mask=mask)
    elif rule == SGD:
        masters = _sgd(grads, masters, first_state, offsets, mask, scalars, mode)
    elif rule == SCHEDULE_FREE:
        zs = tl.load(first_state + offsets, mask=mask, other=0.0)
        exp_avg_sqs = tl.load(second_state + offsets, mask=mask, other=0.0)
        masters, zs, exp_avg_sqs = _schedule_free(grads, masters, zs, exp_avg_sqs, scalars, mode)
        tl.store(first_state + offsets, _canonical(zs), mask=mask)
        tl.store(second_state + offsets, _canonical(exp_avg_sqs), mask=mask)
    else:
        exp_avgs = tl.load(first_state + offsets, mask=mask, other=0.0)
        masters, exp_avgs = _lion(grads, masters, exp_avgs, scalars)
        tl.store(first_state + offsets, _canonical(exp_avgs), mask=mask)
    masters = _canonical(masters)
    if upper is not None:
        tl.store(master + offsets, _lower(masters), mask=mask)
    else:
        tl.store(master + offsets, masters, mask=mask)
    tl.store(param + offsets, _narrowed(masters, param.dtype.element_ty), mask=mask)


@triton.jit
def _fold_lanes(lanes, blocks: tl.constexpr):
    """Add the lanes of each block: 16 to 16, 8 to 8, and so on."""
    for step in tl.static_range(5):
        pairs = tl.permute(tl.reshape(lanes, (blocks, 2, LANES >> (step + 1))), (0, 2, 1))
        lower, upper = tl.split(pairs)
        lanes = lower + upper
    return tl.reshape(lanes, (blocks,))


@triton.jit
def grad_stats_kernel(grad, accumulated, table, scales, sums, not_finite, count: tl.constexpr, blocks: tl.constexpr):
    """Store the sum of squares and the number of non-finite elements of each block of several gradients.

    The order of additions follows [Note: sums in fixed order]. A program computes `blocks` blocks of one gradient.
    `table` has rows of `count` numbers, one for each gradient: its first program, its number of elements, and how many
    elements behind `grad` and behind `accumulated` it begins.
    """
    program = tl.program_id(0).to(tl.int64)
    which = tl.sum((tl.load(table + tl.arange(0, count)) <= program).to(tl.int32)) - 1
    numel = tl.load(table + count + which)
    block = (program - tl.load(table + which)) * blocks + tl.arange(0, blocks)
    grad += tl.load(table + 2 * count + which)
    if accumulated is not None:
        accumulated += tl.load(table + 3 * count + which)
    first = block[:, None] * BLOCK_NUMEL + tl.arange(0, LANES)[None, :]
    lanes = tl.full((blocks, LANES), 0.0, tl.float64)
    counts = tl.full((blocks, LANES), 0, tl.int32)
    for rows in range(0, ROWS, UNROLLED_ROWS):
        for row in tl.static_range(UNROLLED_ROWS):
            offsets = first + (rows + row) * LANES
            mask = offsets < numel
            grads = _gradient(grad, accumulated, scales, offsets, mask)
            # Pad the last row with zeros even if a scale is not finite.
            grads = tl.where(mask, grads, 0.0)
            exponents = grads.to(tl.uint32, bitcast=True) & 0x7F800000
            counts = counts + tl.where(exponents == 0x7F800000, 1, 0)
            wide = grads.to(tl.float64)
            lanes = lanes + wide * wide
    results = program * blocks + tl.arange(0, blocks)  # zeros behind the gradient's last block
    tl.store(sums + results, _fold_lanes(lanes, blocks))
    tl.store(not_finite + results, _fold_lanes(counts, blocks))


@triton.jit
def fold_kernel(values, table, totals, count: tl.constexpr, blocks: tl.constexpr):
    """Store the sum of each gradient's block sums, added in the order of `grad_norm.fold`. See `grad_stats_kernel`."""
    which = tl.program_id(0)
    values += tl.load(table + which) * blocks
    numel = (tl.load(table + count + which) + BLOCK_NUMEL - 1) // BLOCK_NUMEL
    lane = tl.arange(0, LANES)[None, :]
    lanes = tl.full((1, LANES), 0.0, tl.float64)
    for first in range(0, numel, LANES * UNROLLED_ROWS):
        for row in tl.static_range(UNROLLED_ROWS):
            offsets = first + row * LANES + lane
            lanes = lanes + tl.load(values + offsets, mask=offsets < numel, other=0.0)
    tl.store(totals + which + tl.arange(0, 1), _fold_lanes(lanes, 1))
