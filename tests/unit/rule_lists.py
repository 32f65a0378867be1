"""The update rules written with IEEE 754's operations in NumPy: the reference of `test_update_rule.py`."""

import math

import ieee
import numpy as np

from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.adam_8bit import Adam8bitRule
from patrickstar._kernels.lion import LionRule
from patrickstar._kernels.schedule_free import ScheduleFreeRule
from patrickstar._kernels.sgd import SGDRule


def adam(rule, grad, master, exp_avg, exp_avg_sq, number):
    """Apply algorithm 1 of Kingma and Ba in the operation order of `torch.optim.AdamW`'s fused kernel."""
    if rule.weight_decay and rule.decoupled:
        master = ieee.multiply(master, number(1 - rule.lr * rule.weight_decay))
    elif rule.weight_decay:
        grad = ieee.add(grad, ieee.multiply(master, number(rule.weight_decay)))
    weight = number(1 - rule.beta1)
    change = ieee.subtract(grad, exp_avg)
    if weight < 0.5:
        exp_avg = ieee.add(exp_avg, ieee.multiply(change, weight))
    else:
        # Subtracting `1 - weight` would give a zero of the other sign if `beta1` is 0.
        exp_avg = ieee.add(grad, ieee.multiply(change, ieee.subtract(weight, number(1))))
    square = ieee.multiply(ieee.multiply(grad, number(1 - rule.beta2)), grad)
    exp_avg_sq = ieee.add(ieee.multiply(exp_avg_sq, number(rule.beta2)), square)
    corrected = ieee.divide(ieee.square_root(exp_avg_sq), number(math.sqrt(1 - rule.beta2**rule.step)))
    denominator = ieee.add(corrected, number(rule.eps))
    step_size = number(rule.lr / (1 - rule.beta1**rule.step))
    change = ieee.divide(ieee.multiply(exp_avg, step_size), denominator)
    return ieee.subtract(master, change), exp_avg, exp_avg_sq


def sgd(rule, grad, master, *rest):
    """Apply SGD as documented by `torch.optim.SGD`."""
    *buffers, number = rest
    if rule.weight_decay:
        grad = ieee.add(grad, ieee.multiply(master, number(rule.weight_decay)))
    if rule.momentum and rule.step > 1:
        weighted = ieee.multiply(grad, number(1 - rule.dampening))
        buffers = [ieee.add(ieee.multiply(buffers[0], number(rule.momentum)), weighted)]
    elif rule.momentum:
        buffers = [grad]
    if rule.nesterov:
        grad = ieee.add(grad, ieee.multiply(buffers[0], number(rule.momentum)))
    elif rule.momentum:
        (grad,) = buffers
    return ieee.subtract(master, ieee.multiply(grad, number(rule.lr))), *buffers


def lion(rule, grad, master, exp_avg, number):
    """Apply program 1 of Chen et al.: a step in the direction of a sign, with decoupled weight decay."""

    def average(beta):
        return ieee.add(ieee.multiply(exp_avg, number(beta)), ieee.multiply(grad, number(1 - beta)))

    direction = average(rule.beta1)
    # `np.sign` loses the sign of a negative zero, which shows in a master of negative zero.
    sign = np.where(direction > 0, 1, np.where(direction < 0, -1, ieee.multiply(direction, number(0.0))))
    step = ieee.multiply(sign.astype(direction.dtype), number(rule.lr))
    decayed = ieee.multiply(master, number(1 - rule.lr * rule.weight_decay))
    return ieee.subtract(decayed, step), average(rule.beta2)


def schedule_free(rule, grad, master, z, exp_avg_sq, number):
    """Apply one step of Defazio et al. in the operation order of `schedulefree.AdamWScheduleFree`."""
    z = master if rule.step == 1 else z
    square = ieee.multiply(ieee.multiply(grad, number(1 - rule.beta2)), grad)
    exp_avg_sq = ieee.add(ieee.multiply(exp_avg_sq, number(rule.beta2)), square)
    corrected = ieee.square_root(ieee.divide(exp_avg_sq, number(1 - rule.beta2**rule.step)))
    direction = ieee.divide(grad, ieee.add(corrected, number(rule.eps)))
    if rule.weight_decay:
        direction = ieee.add(direction, ieee.multiply(master, number(rule.weight_decay)))
    weight, apart = number(rule.weight), ieee.subtract(z, master)
    if weight < 0.5:
        moved = ieee.add(master, ieee.multiply(apart, weight))
    else:
        moved = ieee.add(z, ieee.multiply(apart, ieee.subtract(weight, number(1))))
    step = number(rule.lr * (rule.beta1 * (1 - rule.weight) - 1))
    after = ieee.add(moved, ieee.multiply(direction, step))
    return after, ieee.subtract(z, ieee.multiply(direction, number(rule.lr))), exp_avg_sq


SQUARES = [2.0**-50 * 2.0 ** (code // 4) * (1 + code % 4 / 4) for code in range(256)]
RATIOS = [2.0**-12 * 2.0 ** (code // 8) * (1 + code % 8 / 8) for code in range(128)]
"""Values of the codes of v and of the ratio of |m| to its scale, before the first of them is subtracted."""
SCALES = [2.0 ** (code // 8 - 25) for code in range(256)]
"""Scales of m by code of v."""


def adam_8bit(rule, grad, master, ratios, squares, number):
    """Apply AdamW to states that are looked up by their codes, and round them stochastically to new codes."""
    scales = ieee.rounded(np.array(SCALES))
    square = ieee.rounded(np.array(SQUARES) - SQUARES[0])[squares]
    ratio = ieee.multiply(ieee.rounded(np.array(RATIOS) - RATIOS[0])[ratios % 128], scales[squares])
    exp_avg = np.where(ratios >= 128, -ratio, ratio)
    states = (values.astype(master.dtype) for values in (exp_avg, square))
    master, exp_avg, square = adam(rule, grad, master, *states, number)
    with np.errstate(all="ignore"):
        words, exp_avg, square = (values.astype(np.float32) for values in (master, exp_avg, square))
    random = hashed(np.where(np.isnan(words), np.uint32(0x7FC00000), words.view(np.uint32)), rule.step)
    squares = rounded_up_or_down(ieee.add(square, np.float32(SQUARES[0])), SQUARES, random % 2**21 / 2**21)
    ratio = ieee.add(ieee.divide(np.abs(exp_avg), scales[squares]), np.float32(RATIOS[0]))
    ratios = rounded_up_or_down(ratio, RATIOS, (random * np.uint64(0x9E3779B1) % 2**32 >> 12) / 2**20)
    return master, ratios + np.uint8(128) * (exp_avg < 0), squares


def hashed(words, step):
    """Return Wellons' `lowbias32` of the words and 24 bits of the step, as 64-bit integers."""
    words = words.astype(np.uint64) ^ np.uint64((step * 0x9E3779B1 >> 8) % 2**24 << 8)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        words = (words ^ words >> shift) * np.uint64(factor) % 2**32
    return words ^ words >> 16


def rounded_up_or_down(values, table, random):
    """Return the code above with the probability of the distance to the code below; NaN gets the last code."""
    table = np.array([*table, 2 * table[-1] - table[-2]])
    values = np.where(np.isnan(values), np.inf, values).astype(np.float64)
    below = np.clip(np.searchsorted(table, values, side="right") - 1, 0, len(table) - 2)
    up = (values - table[below]) / (table[below + 1] - table[below]) + random >= 1
    return np.minimum(below + up, len(table) - 2).astype(np.uint8)


LISTS = {AdamRule: adam, Adam8bitRule: adam_8bit, SGDRule: sgd, LionRule: lion, ScheduleFreeRule: schedule_free}
