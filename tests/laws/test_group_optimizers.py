"""Optimizer classes that couple parameters, draw random numbers, or keep something of their own: exact on the whole."""

from functools import partial

import pytest
import torch
from seeded import run_step
from toys import inputs, layers, mean_square, update

import patrickstar as ps
from patrickstar._dry_run.simulation import simulate
from patrickstar.errors import BudgetError, ConfigError

from .group_optimizers import KINDS, Branches, Elsewhere, GlobalScale, batch, config_of, train
from .test_dry_run import LAPTOP


@pytest.mark.parametrize("where", ["accumulated", "disk", "in backward"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_its_bits_do_not_depend_on_where_its_chunks_are_or_how_gradients_come(kind, where, tmp_path):
    disk = {"disk": ps.Disk(tmp_path, capacity="1MiB"), "host_memory": "64KiB"} if where == "disk" else {}
    script = partial(train, accumulation=3 if where == "accumulated" else 1, update=where == "in backward")
    ps.testing.compare(Branches, config_of(kind, **disk), script)


def test_clipping_and_a_scheduler_with_a_warm_up_reach_it():
    """The scheduler sets the first rate before the first step: base rates are those of the constructor."""

    def warm_up(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)

    batches = [(batch(step),) for step in range(8)]
    ps.testing.assert_exact(Branches, batches, config_of(Elsewhere), max_norm=0.1, scheduler=warm_up, accumulation=2)


wide = partial(layers, 64, 6)


def tight(host_bytes, **options):
    """Return a configuration with this host budget."""
    options = {"device": "cpu", "precision": "fp32", "chunk_size": 4 * 64 * 64, "device_memory": "64KiB"} | options
    return ps.Config(optimizer=GlobalScale, host_memory=host_bytes, **options)


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_a_host_budget_that_cannot_hold_the_group_is_refused_in_bytes(disk, tmp_path):
    """The budget that the error asks for is enough, with the same bits; to the byte without staging buffers."""
    options = {"disk": ps.Disk(tmp_path, capacity="2MiB")} if disk else {}
    with pytest.raises(BudgetError, match=r"GlobalScale.*all parameters together.*bytes.*Raise host_memory") as caught:
        ps.testing.stressed(wide, tight(300_000, **options))
    assert "ps.AdamW" in str(caught.value)
    enough = 300_000 + caught.value.short_bytes
    if not disk:
        with pytest.raises(BudgetError, match="at least 1 bytes"):
            ps.testing.stressed(wide, tight(enough - 1))

    def script(trainer, optimizer):
        results = []
        for step in range(4):
            results.append(update(trainer, mean_square(trainer(*inputs(1, 64, rows=2, seed=step)[0]))))
            if isinstance(trainer, ps.Engine):
                stats = trainer.stats.last
                assert stats.host_peak_model_bytes + stats.host_peak_non_model_bytes <= enough
        return results

    ps.testing.compare(wide, tight(enough, **options), script)


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_a_dry_run_moves_the_bytes_of_a_run(disk, tmp_path):
    options = {"device": "cpu", "precision": "bf16", "chunk_size": 2 * 64 * 64, "device_memory": "64KiB"}
    options |= {"disk": ps.Disk(tmp_path, capacity="4MiB"), "host_memory": "1MiB"} if disk else {}
    config, moved = ps.Config(optimizer=GlobalScale, **{"host_memory": "2MiB"} | options), []

    def step(engine, device="meta"):
        for _ in range(3 if device == "cpu" else 1):
            run_step(engine, (torch.ones(2, 64, device=device),))
            stats = engine.stats.last
            moved.append((stats.h2d_bytes, stats.d2h_bytes, stats.disk_read_bytes, stats.disk_write_bytes))

    with ps.Engine(wide, config, meter=ps.testing.NoMeter()) as engine:
        step(engine, "cpu")
    simulate(ps.Engine, wide, config, step, LAPTOP, steps=3, meter=ps.testing.NoMeter())
    assert moved[:3] == moved[3:]


def test_several_processes_and_late_updates_are_refused_by_name():
    """Each of several processes has only a part of the parameters."""
    with pytest.raises(ConfigError, match=r"GlobalScale.*all parameters together.*one process"):
        simulate(ps.Engine, wide, config_of(GlobalScale), lambda engine: None, LAPTOP, processes=2)
    with pytest.raises(ConfigError, match=r"GlobalScale.*all parameters together.*update"):
        ps.Config(optimizer=GlobalScale, update=ps.Delayed())


def test_a_class_that_changes_a_frozen_parameter_is_refused_by_name():
    """After a probe has ended; one that does so at once is refused before."""

    class DecaysFrozen(GlobalScale):
        def update(self, group, params):
            super().update(group, params)
            for param in group["params"] if group["step"] > 40 else ():
                param.mul_(0.9)

    engine = ps.testing.stressed(Branches, config_of(DecaysFrozen))
    with pytest.raises(ConfigError, match=r"DecaysFrozen.*stem\.bias.*frozen"):
        train(engine, engine.optimizer, range(42))
    engine.close()


def test_a_class_that_reads_a_frozen_parameter_is_refused_by_name():
    class ReadsAll(GlobalScale):
        def update(self, group, params):
            super().update(group, params)
            group["size"] = float(sum(param.norm() for param in group["params"]))

    engine = ps.testing.stressed(Branches, config_of(ReadsAll))
    engine.backward(mean_square(engine(batch(0))))
    with pytest.raises(ConfigError, match=r"ReadsAll reads parameters that are frozen.*stem\.bias"):
        engine.optimizer.step()
    engine.close()


def test_what_cannot_be_saved_is_refused_at_save_by_name(tmp_path):
    """The object is replaced after a probe has ended."""

    class Keeps(GlobalScale):
        def update(self, group, params):
            super().update(group, params)
            if group["step"] > 40:
                self.helper = object()

    engine = ps.testing.stressed(Branches, config_of(Keeps))
    train(engine, engine.optimizer, range(42))
    with pytest.raises(ps.errors.CheckpointError, match=r"helper.* is a object"):
        engine.save(tmp_path / "saved")
    engine.close()
