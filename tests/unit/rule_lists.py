"""The update rules written with IEEE 754's operations in NumPy: the reference that `test_rules.py` compares with."""

import math

import ieee
import numpy as np

from patrickstar._kernels.adam import AdamRule
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


LISTS = {AdamRule: adam, SGDRule: sgd, LionRule: lion, ScheduleFreeRule: schedule_free}
