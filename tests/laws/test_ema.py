"""The moving average of the parameters has the bits of one that plain PyTorch keeps of fp32 parameters."""

import functools

import pytest
import torch
from seeded import engine_of
from toys import inputs, layers, train

import patrickstar as ps
from patrickstar.errors import ConfigError, TrainingError
from patrickstar.testing import assert_same_bits

TIERS = {
    "ample": {},
    "half": {"device_memory": "14KiB", "chunk_size": 2048},
    "disk": {"device_memory": "14KiB", "host_memory": "12MiB", "chunk_size": 2048},
}
INNER = {"AdamW": ps.AdamW(lr=1e-2), "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-2)}
BATCHES = inputs(4, 32, rows=4)
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
            assert_same_bits(plain, engine.state_dict(), "averages")
            output = engine(torch.ones(2, 32))
            with pytest.raises(TrainingError, match=r"a step is not possible inside engine\.averaged"):
                engine.optimizer.step()
            with pytest.raises(TrainingError, match=r"a checkpoint is not possible"):
                engine.save(tmp_path / "checkpoint")
        assert_same_bits(before, engine.state_dict(), "parameters after the evaluation")
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
        assert_same_bits(dict(engine.module.state_dict()), engine.state_dict(), "parameters")
        assert all("ema" in engine.optimizer.state[param] for param in engine.parameters())
    assert_same_bits(*states, "averages of the resumed run")


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
    for optimizer in (3, ps.ScheduleFreeAdamW()):
        with pytest.raises(ConfigError, match="is not an optimizer that can be averaged"):
            ps.EMA(optimizer)
    engine, _ = ps.initialize(build, config("ample", tmp_path, optimizer=ps.EMA()))
    engine.backward(engine(torch.ones(2, 32)).float().square().mean())
    with pytest.raises(TrainingError, match="without stored gradients"), engine.averaged():
        pass
