"""Optimizer classes that couple parameters, draw random numbers, or keep something of their own: exact on the whole."""

from functools import partial

import pytest
import simulated_machines
import torch
from toys import mean_square

import patrickstar as ps
from patrickstar import testing
from patrickstar._dry_run.simulation import simulate
from patrickstar._engine.engine import Engine
from patrickstar.errors import BudgetError, ConfigError

from .group_optimizers import (
    KINDS,
    Branches,
    CountsInClass,
    DecaysAll,
    DrawsWhenCreated,
    Elsewhere,
    GlobalScale,
    batch,
    config_of,
    train,
)

LAPTOP = simulated_machines.LAPTOP.model_copy(update={"disk": simulated_machines.DESKTOP.disk})
by_name = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@by_name
def test_a_class_that_needs_all_parameters_trains_exactly(kind, precision):
    """Every chunk is evicted at each access; gradients are missing, a bias is frozen, groups differ."""
    testing.compare(Branches, config_of(kind, precision), train)


@pytest.mark.parametrize("where", ["accumulated", "disk", "in backward"])
@by_name
def test_its_bits_do_not_depend_on_where_its_chunks_are_or_how_gradients_come(kind, where, tmp_path):
    disk = {"disk": ps.Disk(tmp_path, capacity="1MiB"), "host_memory": "64KiB"} if where == "disk" else {}
    script = partial(train, accumulation=3 if where == "accumulated" else 1, update=where == "in backward")
    testing.compare(Branches, config_of(kind, **disk), script)


def test_clipping_and_a_scheduler_with_a_warm_up_reach_it():
    """The scheduler sets the first rate before the first step: base rates are those of the constructor."""

    def warm_up(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)

    batches = [(batch(step),) for step in range(8)]
    testing.assert_exact(Branches, batches, config_of(Elsewhere), max_norm=0.1, scheduler=warm_up, accumulation=2)


@pytest.mark.parametrize("file", [True, False], ids=["engine.save", "state_dict"])
@by_name
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(kind, file, tmp_path):
    def run(engine, first, last):
        engine.module.calls = first
        return train(engine, engine.optimizer, range(first, last))

    torch.manual_seed(0)
    whole = testing.stressed(Branches, config_of(kind))
    run(whole, 0, 7)
    if file:
        whole.save(tmp_path / "saved")
    saved, generator = (whole.state_dict(), whole.optimizer.state_dict()), torch.get_rng_state()
    expected = run(whole, 7, 12)
    resumed = testing.stressed(Branches, config_of(kind))
    run(resumed, 0, 2)  # with values of its own, which are replaced
    if file:
        resumed.load(tmp_path / "saved")
    else:
        resumed.load_state_dict(saved[0])
        resumed.optimizer.load_state_dict(saved[1])
        torch.set_rng_state(generator)
    testing.assert_same_bits(expected, run(resumed, 7, 12), "losses and options of groups")
    testing.assert_same_bits(whole.state_dict(), resumed.state_dict(), "parameters")
    whole.close()
    resumed.close()


def wide():
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))


def engine_with(host_bytes, kind=GlobalScale, **options):
    options = {"device": "cpu", "precision": "fp32", "chunk_size": 4 * 64 * 64, "device_memory": "64KiB"} | options
    return testing.stressed(wide, ps.Config(optimizer=kind, host_memory=host_bytes, **options))


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_a_host_budget_that_cannot_hold_the_group_is_refused_in_bytes(disk, tmp_path):
    """And the budget that the error asks for is enough; to the byte, where no staging buffers depend on it."""
    options = {"disk": ps.Disk(tmp_path, capacity="2MiB")} if disk else {}
    with pytest.raises(BudgetError, match=r"GlobalScale.*all parameters together.*bytes.*Raise host_memory") as caught:
        engine_with(300_000, **options)
    assert "ps.AdamW" in str(caught.value)
    enough = 300_000 + caught.value.short_bytes
    if not disk:
        with pytest.raises(BudgetError, match="at least 1 bytes"):
            engine_with(enough - 1)
    engine = engine_with(enough, **options)
    for _ in range(3):
        engine.backward(mean_square(engine(torch.ones(2, 64))))
        engine.optimizer.step()
        stats = engine.stats.last
        assert stats.host_peak_model_bytes + stats.host_peak_non_model_bytes <= enough
    engine.close()


def test_the_tightest_budget_gives_the_same_bits():
    def script(trainer, optimizer):
        results = []
        for step in range(4):
            loss = mean_square(trainer(torch.randn(2, 64, generator=torch.Generator().manual_seed(step))))
            trainer.backward(loss)
            optimizer.step()
            results.append(loss.detach().clone())
        return results

    options = {"device": "cpu", "precision": "fp32", "chunk_size": 4 * 64 * 64, "device_memory": "64KiB"}
    with pytest.raises(BudgetError) as caught:
        engine_with(300_000)
    host = 300_000 + caught.value.short_bytes
    testing.compare(wide, ps.Config(optimizer=GlobalScale, host_memory=host, **options), script)


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_a_dry_run_moves_the_bytes_of_a_run(disk, tmp_path):
    options = {"device": "cpu", "precision": "bf16", "chunk_size": 2 * 64 * 64, "device_memory": "64KiB"}
    options |= {"disk": ps.Disk(tmp_path, capacity="4MiB"), "host_memory": "1MiB"} if disk else {}
    config, moved = ps.Config(optimizer=GlobalScale, **{"host_memory": "2MiB"} | options), []

    def step(engine, device="meta"):
        for _ in range(3 if device == "cpu" else 1):
            engine.backward(mean_square(engine(torch.ones(2, 64, device=device))))
            engine.optimizer.step()
            stats = engine.stats.last
            moved.append((stats.h2d_bytes, stats.d2h_bytes, stats.disk_read_bytes, stats.disk_write_bytes))

    with Engine(wide, config, meter=testing.NoMeter()) as engine:
        step(engine, "cpu")
    simulate(Engine, wide, config, step, LAPTOP, steps=3, meter=testing.NoMeter())
    assert moved[:3] == moved[3:]


def test_several_processes_are_refused_by_name():
    """Each of them has only a part of the parameters."""
    with pytest.raises(ConfigError, match=r"GlobalScale.*all parameters together.*one process"):
        simulate(Engine, wide, config_of(GlobalScale), lambda engine: None, LAPTOP, processes=2)


def test_late_updates_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"GlobalScale.*all parameters together.*update"):
        ps.Config(optimizer=GlobalScale, update=ps.Delayed())


def test_a_skipped_step_changes_nothing():
    engine = testing.stressed(Branches, config_of(GlobalScale, "fp16"))
    before = engine.state_dict()
    engine.backward(mean_square(engine(batch(0))) * 1e9)
    engine.optimizer.step()
    assert "step" not in engine.optimizer.param_groups[0]
    testing.assert_same_bits(before, engine.state_dict(), "parameters")
    engine.close()


def test_a_class_that_changes_a_frozen_parameter_is_refused_by_name():
    """After a probe has ended; one that does so at once is refused before."""

    class DecaysFrozen(GlobalScale):
        def update(self, group, params):
            super().update(group, params)
            for param in group["params"] if group["step"] > 40 else ():
                param.mul_(0.9)

    engine = testing.stressed(Branches, config_of(DecaysFrozen))
    with pytest.raises(ConfigError, match=r"DecaysFrozen.*stem\.bias.*frozen"):
        train(engine, engine.optimizer, range(42))
    engine.close()


def test_a_class_that_reads_a_frozen_parameter_is_refused_by_name():
    class ReadsAll(GlobalScale):
        def update(self, group, params):
            super().update(group, params)
            group["size"] = float(sum(param.norm() for param in group["params"]))

    engine = testing.stressed(Branches, config_of(ReadsAll))
    engine.backward(mean_square(engine(batch(0))))
    with pytest.raises(ConfigError, match=r"ReadsAll reads parameters that are frozen.*stem\.bias"):
        engine.optimizer.step()
    engine.close()


@pytest.mark.parametrize("kind", [DecaysAll, CountsInClass, DrawsWhenCreated], ids=lambda kind: kind.__name__)
def test_what_would_differ_on_the_whole_group_too_is_refused_by_name(kind):
    with pytest.raises(ConfigError, match=f"{kind.__name__}.*{kind.words}") as caught:
        ps.Config(optimizer=kind)
    assert "\n" not in str(caught.value) and "ps.AdamW" in str(caught.value)


def test_what_cannot_be_saved_is_refused_at_save_by_name(tmp_path):
    """The object is replaced after a probe has ended."""

    class Keeps(GlobalScale):
        def update(self, group, params):
            super().update(group, params)
            if group["step"] > 40:
                self.helper = object()

    engine = testing.stressed(Branches, config_of(Keeps))
    train(engine, engine.optimizer, range(42))
    with pytest.raises(ps.errors.CheckpointError, match=r"helper.* is a object"):
        engine.save(tmp_path / "saved")
    engine.close()
