"""Schedule-free AdamW: its recurrence, its average, and what is refused."""

import pytest
import torch
from toys import mean_square, train

import patrickstar as ps
from patrickstar import testing
from patrickstar.errors import ConfigError

from .tiers import Room, blocks, compare, inputs, on_disk, options

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "warmup_steps": 3, "r": 1.0}


class PlainScheduleFree:
    """Algorithm 1 of Defazio et al. in double precision, with weight decay at y: x, y and z are separate sequences."""

    def __init__(self, params, lr, betas, weight_decay, warmup_steps, r, eps=1e-8):
        self.y = [param.detach().double() for param in params]
        self.x, self.z = [y.clone() for y in self.y], [y.clone() for y in self.y]
        self.v = [torch.zeros_like(y) for y in self.y]
        self.lr, self.betas, self.weight_decay, self.eps = lr, betas, weight_decay, eps
        self.warmup_steps, self.r = warmup_steps, r
        self.steps, self.total, self.largest = 0, 0.0, 0.0

    def step(self, grads):
        """Update x, y and z."""
        self.steps += 1
        lr, (beta1, beta2) = self.lr * min(1.0, self.steps / self.warmup_steps), self.betas
        self.largest = max(self.largest, lr)
        weight = self.steps**self.r * self.largest**2
        self.total += weight
        for number, grad in enumerate(grads):
            self.v[number] = beta2 * self.v[number] + (1 - beta2) * grad.double() ** 2
            corrected = self.v[number] / (1 - beta2**self.steps)
            change = grad.double() / (corrected.sqrt() + self.eps) + self.weight_decay * self.y[number]
            # `schedulefree` interpolates y with the old z, and then makes the step in both.
            share = weight / self.total
            self.x[number] = (1 - share) * self.x[number] + share * (self.z[number] - lr * change)
            self.z[number] = self.z[number] - lr * change
            self.y[number] = (1 - beta1) * self.z[number] + beta1 * self.x[number]


def test_the_three_sequences_of_the_paper():
    """The kernel stores y and z only; x follows from them."""
    engine, optimizer = ps.initialize(blocks, options("fp32", 9000, optimizer=ps.ScheduleFreeAdamW(**OPTIONS)))
    names = [name for name, _ in engine.module.named_parameters()]
    plain = PlainScheduleFree(list(engine.state_dict().values()), **OPTIONS)
    for batch in inputs(8):
        engine.backward(mean_square(engine(*batch)))
        plain.step([engine.gradient(name) for name in names])
        optimizer.step()
        for found, expected in zip(engine.state_dict().values(), plain.y, strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-6)
    with engine.averaged():
        for found, expected in zip(engine.state_dict().values(), plain.x, strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)
    for found, expected in zip(engine.state_dict().values(), plain.y, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)
    engine.close()


@pytest.mark.parametrize("loop", [{}, {"max_norm": 0.1}, {"accumulation": 2}], ids=str)
def test_states_on_disk(tmp_path, loop):
    config = options("bf16", 9000, optimizer=ps.ScheduleFreeAdamW(**OPTIONS))
    config = on_disk(blocks, config, tmp_path, inputs(1)[0], Room(12_000, 12_000, 0.2))
    compare(blocks, config, lambda trainer, optimizer: train(trainer, inputs(5), **loop))


def test_a_changed_learning_rate_weights_later_steps():
    def script(trainer, optimizer):
        losses = train(trainer, inputs(3))
        optimizer.param_groups[0]["lr"] = 3e-2
        return losses + train(trainer, inputs(6)[3:])

    testing.compare(blocks, options("bf16", 9000, optimizer=ps.ScheduleFreeAdamW(**OPTIONS)), script)


def test_a_checkpoint_resumes_with_the_same_bits(tmp_path):
    config = options("bf16", 9000, optimizer=ps.ScheduleFreeAdamW(**OPTIONS))
    engine = testing.stressed(blocks, config)
    train(engine, inputs(4))
    engine.save(tmp_path / "saved")
    expected = train(engine, inputs(8)[4:])
    engine.close()
    engine = testing.stressed(blocks, config)
    engine.load(tmp_path / "saved")
    testing.assert_same_bits(expected, train(engine, inputs(8)[4:]), "losses")
    engine.close()


def test_lock_free_updates_are_refused_with_the_reason():
    with pytest.raises(ConfigError, match="weights the steps of each parameter"):
        ps.Config(optimizer=ps.ScheduleFreeAdamW(), update=ps.LockFree())


def test_a_moving_average_of_it_is_refused():
    with pytest.raises(ConfigError, match="is not an optimizer that can be averaged"):
        ps.EMA(ps.ScheduleFreeAdamW())


def test_a_first_beta_of_zero_is_refused():
    with pytest.raises(ConfigError, match="must be above 0"):
        ps.ScheduleFreeAdamW(betas=(0.0, 0.9))
