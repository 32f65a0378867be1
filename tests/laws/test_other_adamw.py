"""AdamW with 8-bit states, schedule-free AdamW and averages: bytes, bits on every tier, and what they compute."""

import functools

import pytest
import torch
from hypothesis import strategies as st
from sampling import drawn
from seeded import engine_of
from toys import layers, mean_square, train

import patrickstar as ps
from patrickstar._kernels.adam_8bit import SQUARE_OFFSET, SQUARE_SHIFT, SQUARE_WORD, square_of, to_codes
from patrickstar.errors import ConfigError, ModelError, TrainingError

from .models import precisions
from .tiers import Room, blocks, chunk_sizes, compare, inputs, many_blocks, on_disk, options, rooms

EIGHT_BIT = ps.AdamW8bit(lr=1e-2, weight_decay=0.1)
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "warmup_steps": 3, "r": 1.0}
SCHEDULE_FREE = ps.ScheduleFreeAdamW(**OPTIONS)
LOOPS = [{}, {"max_norm": 0.1}, {"accumulation": 2}]


@drawn(20, st.sampled_from([EIGHT_BIT, SCHEDULE_FREE]), precisions, chunk_sizes, rooms, st.sampled_from(LOOPS))
def test_states_on_any_tier(tmp_path_factory, optimizer, precision, chunk_size, room, loop):
    config = options(precision, chunk_size, optimizer=optimizer)
    config = on_disk(many_blocks, config, tmp_path_factory.mktemp("swap"), inputs(1)[0], room)
    compare(many_blocks, config, lambda trainer, optimizer: train(trainer, inputs(4), **loop))


def test_muon_takes_it_for_the_other_parameters():
    config = options("bf16", 9000, optimizer=ps.Muon(lr=1e-2, adamw=EIGHT_BIT))
    ps.testing.compare(blocks, config, lambda trainer, optimizer: train(trainer, inputs(3)))


@pytest.mark.parametrize("update", [ps.Delayed(after=2), None], ids=["delayed", "in the step"])
@pytest.mark.parametrize("optimizer", [EIGHT_BIT, ps.EMA(EIGHT_BIT, decay=0.9)], ids=["alone", "averaged"])
def test_other_updates(tmp_path, update, optimizer):
    config = options("bf16", 9000, optimizer=optimizer, update=update)
    config = on_disk(many_blocks, config, tmp_path, inputs(1)[0], Room(12_000, 12_000, 0.2))
    compare(many_blocks, config, lambda trainer, optimizer: train(trainer, inputs(4)))


def test_states_are_loaded_as_they_are_and_not_from_adamw():
    states = {}
    for name, optimizer in {"AdamW": ps.AdamW(), "8 bits": EIGHT_BIT}.items():
        engine = ps.testing.stressed(blocks, options("bf16", 9000, optimizer=optimizer))
        train(engine, inputs(4))
        states[name] = engine.optimizer.state_dict()
    engine, optimizer = ps.initialize(blocks, options("bf16", 9000, optimizer=EIGHT_BIT))
    with pytest.raises(ModelError, match="exp_avg_8bit"):
        optimizer.load_state_dict(states["AdamW"])
    train(engine, inputs(1))
    optimizer.load_state_dict(states["8 bits"])
    for position, state in optimizer.state_dict()["state"].items():
        assert state["exp_avg_8bit"].dtype == torch.uint8
        ps.testing.assert_same_bits(states["8 bits"]["state"][position], state, "states")


@drawn(50, st.floats(2.0**-60, 2.0**12), st.integers(0, 1 << 30))
def test_rounding_has_the_exact_mean(value, seed):
    generator = torch.Generator().manual_seed(seed)
    random = torch.randint(1 << SQUARE_SHIFT, (20_000,), dtype=torch.int32, generator=generator)
    values = torch.full((20_000,), value) + SQUARE_OFFSET
    found = square_of(to_codes(values, SQUARE_WORD, random, SQUARE_SHIFT)).double()
    # The error of the mean is normal; 6 standard deviations occur once in a billion cases.
    least = max(found.std().item(), 1e-3 * value) / 20_000**0.5
    assert abs(found.mean().item() - value) <= 6 * least + 2.0**-22 * (value + SQUARE_OFFSET)


def test_it_trains_as_adamw_does():
    """Losses of a linear model, of which AdamW with states in fp32 reaches a ten thousandth."""
    losses = {}
    for name, optimizer in {"fp32": ps.AdamW(lr=1e-2), "8 bits": ps.AdamW8bit(lr=1e-2)}.items():
        generator = torch.Generator().manual_seed(0)
        target = torch.randn(64, 64, generator=generator) / 8
        torch.manual_seed(0)
        engine, _ = ps.initialize(torch.nn.Linear(64, 64, bias=False), options("fp32", 9000, optimizer=optimizer))
        for _ in range(400):
            x = torch.randn(32, 64, generator=generator)
            loss = mean_square(engine(x) - x @ target)
            engine.backward(loss)
            engine.optimizer.step()
        losses[name] = loss.item()
        engine.close()
    print(losses)
    assert losses["8 bits"] < 1.5 * losses["fp32"]


# Schedule-free AdamW: its recurrence, its average, and what is refused


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
    engine, optimizer = ps.initialize(blocks, options("fp32", 9000, optimizer=SCHEDULE_FREE))
    names = [name for name, _ in engine.module.named_parameters()]
    plain = PlainScheduleFree(list(engine.state_dict().values()), **OPTIONS)
    for batch in inputs(8):
        engine.backward(mean_square(engine(*batch)))
        plain.step([engine.gradient(name) for name in names])
        optimizer.step()
        assert_close(engine, plain.y, atol=2e-6)
    with engine.averaged():
        assert_close(engine, plain.x)
    assert_close(engine, plain.y)


def assert_close(engine, expected, atol=2e-5):
    for found, value in zip(engine.state_dict().values(), expected, strict=True):
        torch.testing.assert_close(found.double(), value, rtol=2e-5, atol=atol)


def test_a_changed_learning_rate_weights_later_steps():
    def script(trainer, optimizer):
        losses = train(trainer, inputs(3))
        optimizer.param_groups[0]["lr"] = 3e-2
        return losses + train(trainer, inputs(6)[3:])

    ps.testing.compare(blocks, options("bf16", 9000, optimizer=SCHEDULE_FREE), script)


TIERS = {
    "ample": {},
    "half": {"device_memory": "14KiB", "chunk_size": 2048},
    "disk": {"device_memory": "14KiB", "host_memory": "12MiB", "chunk_size": 2048},
}
INNER = {"AdamW": ps.AdamW(lr=1e-2), "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-2)}
BATCHES = inputs(4, width=32, rows=4)
build = functools.partial(layers, 32, 8)


def config(tier: str, tmp_path, **options) -> ps.Config:
    disk = {"disk": str(tmp_path)} if tier == "disk" else {}
    return ps.Config(**{"device": "cpu", "precision": "bf16"} | TIERS[tier] | disk | options)


@pytest.mark.pairwise
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("decay", [0.9, 0.25])
def test_the_average_is_that_of_plain_pytorch(tier, inner, decay, tmp_path):
    options = config(tier, tmp_path, optimizer=ps.EMA(INNER[inner], decay=decay))
    with engine_of(build, options) as engine:
        plain = None
        for step, batch in enumerate(BATCHES):
            train(engine, [batch])
            params = engine.state_dict()
            plain = plain or {name: value.clone() for name, value in params.items()}
            for name, value in params.items() if step else ():
                if decay > 0.5:
                    plain[name].add_((value - plain[name]).mul_(1 - decay))
                else:
                    plain[name] = value - (value - plain[name]).mul_(decay)
        before = engine.state_dict()
        with engine.averaged():
            ps.testing.assert_same_bits(plain, engine.state_dict(), "averages")
            output = engine(torch.ones(2, 32))
            with pytest.raises(TrainingError, match=r"a step is not possible inside engine\.averaged"):
                engine.optimizer.step()
            with pytest.raises(TrainingError, match=r"a checkpoint is not possible"):
                engine.save(tmp_path / "checkpoint")
        ps.testing.assert_same_bits(before, engine.state_dict(), "parameters after the evaluation")
        assert not torch.equal(output, engine(torch.ones(2, 32)))


def test_checkpoints_hold_the_average(tmp_path):
    options = config("ample", tmp_path, optimizer=ps.EMA(ps.AdamW(lr=1e-2), decay=0.9))
    states = []
    for resumed in (False, True):
        engine = engine_of(build, options)
        if resumed:
            engine.load(tmp_path / "two")
        else:
            train(engine, BATCHES[:2])
            engine.save(tmp_path / "two")
        train(engine, BATCHES[2:])
        with engine.averaged():
            states.append(engine.state_dict())
        ps.testing.assert_same_bits(dict(engine.module.state_dict()), engine.state_dict(), "parameters")
        assert all("ema" in engine.optimizer.state[param] for param in engine.parameters())
    ps.testing.assert_same_bits(*states, "averages of the resumed run")


def test_it_counts_as_four_bytes_per_parameter(tmp_path):
    options = [config("half", tmp_path, optimizer=optimizer) for optimizer in (ps.AdamW(), ps.EMA(ps.AdamW()))]
    plain, averaged = (engine_of(build, each).layout for each in options)
    assert averaged.model_data_bytes - plain.model_data_bytes == 4 * sum(chunk.numel for chunk in plain.chunks)


def test_misuse_is_named(tmp_path):
    engine, _ = ps.initialize(build, config("ample", tmp_path))
    with pytest.raises(ConfigError, match=r"keeps no average.*ps\.EMA"), engine.averaged():
        pass
    with pytest.raises(ConfigError, match="decay"):
        ps.EMA(ps.AdamW(), decay=1.0)
    with pytest.raises(ConfigError, match="weights the steps of each parameter"):
        ps.Config(optimizer=ps.ScheduleFreeAdamW(), update=ps.LockFree())
    with pytest.raises(ConfigError, match="must be above 0"):
        ps.ScheduleFreeAdamW(betas=(0.0, 0.9))
    for optimizer in (3, ps.ScheduleFreeAdamW()):
        with pytest.raises(ConfigError, match="is not an optimizer that can be averaged"):
            ps.EMA(optimizer)
    engine, _ = ps.initialize(build, config("ample", tmp_path, optimizer=ps.EMA()))
    engine.backward(engine(torch.ones(2, 32)).float().square().mean())
    with pytest.raises(TrainingError, match="without stored gradients"), engine.averaged():
        pass
