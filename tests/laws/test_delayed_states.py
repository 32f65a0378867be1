"""Law: whatever happens around a step, delayed updates keep parameters, gradients and counts consistent."""

from pathlib import Path

import pytest
import seeded
import speculation_cases as cases
import torch
from probes import manager_of, optimizer_step_of
from speculation_cases import backward, build, step
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import train

import patrickstar as ps
from patrickstar import testing
from patrickstar._engine.engine import Engine
from patrickstar._params.model_data import ModelData
from patrickstar.errors import BudgetError

from .test_delayed import engine_of, in_memory
from .tiers import Room, blocks, check_a_killed_run, inputs, on_disk, options, small_engine

DELAYED = {"update": ps.Delayed(after=0)}


def reference_of(model_func=build, **options):
    return seeded.reference_of(model_func, ps.Config(device="cpu", **options))


def assert_same_losses(reference, engine, numbers, before_step=lambda number: None):
    for number in numbers:
        before_step(number)
        testing.assert_same_bits([step(reference, number)], [step(engine, number)], f"loss {number}")


def test_a_graph_that_saved_parameters_of_a_delay_that_has_ended_is_refused_by_autograd():
    with engine_of(**DELAYED) as engine:
        for trainer in (engine, reference_of(**DELAYED)):
            step(trainer, 0)
            loss = trainer(cases.batch(1)).float().square().mean()
            trainer.backward(loss, retain_graph=True)
            trainer.optimizer.zero_grad()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                trainer.backward(loss)


@pytest.mark.parametrize("calls", [1, 3, 6])
def test_an_exchange_that_fails_names_its_parameters_and_leaves_masters(monkeypatch, calls):
    with engine_of(evict_everything=False, **DELAYED) as engine:
        step(engine, 0)
        backward(engine, 1)
        before, count = engine.state_dict(), 0
        ensure_local = ModelData.ensure_local

        def fail(data, managed):
            nonlocal count
            count += 1
            if count == calls:
                raise BudgetError("no room")
            ensure_local(data, managed)

        monkeypatch.setattr(ModelData, "ensure_local", fail)
        with pytest.raises(BudgetError) as raised:
            engine.optimizer.step()
        monkeypatch.undo()
        (note,) = raised.value.__notes__
        named = [name for name in before if name in note]
        assert named and "may be updated in part" in note
        after = engine.state_dict()
        testing.assert_same_bits({n: before[n] for n in named}, {n: after[n] for n in named}, "masters that were named")
        engine.optimizer.zero_grad()
        for number in (2, 3):
            assert step(engine, number).isfinite()


def test_a_step_that_was_interrupted_goes_on_where_it_stopped(monkeypatch):
    with engine_of(**DELAYED) as expected, engine_of(**DELAYED) as engine:
        optimizer_step = optimizer_step_of(engine)
        update, count = optimizer_step.delayed.update, 0

        def interrupted(*args):
            nonlocal count
            count += 1
            if count == 4 + 6:  # the fourth chunk of the second step
                raise KeyboardInterrupt
            update(*args)

        monkeypatch.setattr(optimizer_step.delayed, "update", interrupted)
        for number in range(4):
            found = backward(engine, number)
            if number == 1:
                with pytest.raises(KeyboardInterrupt):
                    engine.optimizer.step()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            testing.assert_same_bits([step(expected, number)], [found], f"loss {number}")
        assert optimizer_step.steps == 4
        testing.assert_same_bits(expected.state_dict(), engine.state_dict(), "parameters")


class Words(nn.Module):
    """A large embedding, of which a batch needs little."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(400, 8), nn.Linear(8, 8)

    def forward(self, ids):
        return self.head(self.words(ids))


def test_embeddings_are_looked_up_on_the_host():
    config = ps.Config(device="cpu", device_memory="12KiB", host_memory="4MiB", **DELAYED)
    with seeded.engine_of(Words, config) as engine:
        train(engine, [(torch.arange(6),)] * 4)
        moved = engine.stats.last.h2d_bytes + engine.stats.last.d2h_bytes
        assert moved < 400 * 8 * 2, "the embedding was copied to the device or back"


def test_delayed_updates_from_disk_go_on_beside_operators(tmp_path):
    config = on_disk(blocks, options(**DELAYED), tmp_path, inputs(1)[0], Room(host_bytes=20000, device_bytes=60000))
    with small_engine(blocks, config) as engine:
        train(engine, inputs(3))
        updates = optimizer_step_of(engine)
        assert updates.disk_step.unfinished and updates.updating


class Reused(nn.Module):
    """A layer that is used twice, with reentrant checkpoints: its gradient grows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x):
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return self.head(x)


def test_gradients_that_grow_are_known_from_the_steps_before():
    config = dict(update=ps.Delayed(after=3))
    reference = reference_of(Reused, **config)
    with engine_of(Reused, **config) as engine:
        assert_same_losses(reference, engine, range(6))


def test_a_batch_that_was_skipped_is_no_second_backward():
    with engine_of(**DELAYED) as engine:
        step(engine, 0)
        for number in range(1, 4):
            backward(engine, 10 * number)
            engine.optimizer.zero_grad()
            step(engine, number)
        assert not [chunk for chunk in manager_of(engine).chunks.values() if chunk.kind == "grad32"]


def test_steps_before_a_delay_was_chosen_count(tmp_path):
    with in_memory(tmp_path, 1, 5, update=None, saves=[5]):
        pass
    with in_memory(tmp_path, 6, 7, update=ps.Delayed(after=6)) as engine:
        assert engine.stats.last.staleness == 1
    with in_memory(tmp_path, 6, 7, update=ps.Delayed(after=3), saves=[7]):
        pass
    with in_memory(tmp_path, 8, 8, update=ps.Delayed(after=20)) as engine:
        assert engine.stats.last.staleness == 0


def test_a_parameter_in_no_group_is_as_in_the_reference():
    reference = reference_of(**DELAYED)
    with engine_of(**DELAYED) as engine:

        def remove(number):
            for trainer in (reference, engine) if number == 3 else ():
                del trainer.optimizer.param_groups[0]["params"][2]

        assert_same_losses(reference, engine, range(7), remove)


def trained(folder: Path, first: int, last: int, saves: bool = False) -> Engine:
    """Train from disk, as a killed run does, and one that goes on."""
    budgets = {"device_memory": "72KiB", "host_memory": "200KiB", "disk": ps.Disk(folder)}
    config = ps.Config(device="cpu", precision="bf16", chunk_size="18KiB", update=ps.Delayed(after=2), **budgets)
    return cases.trained(seeded.engine_of(build, config, page_bytes=8192), folder, first, last, saves)


def test_a_killed_run_resumes_with_the_same_bits(tmp_path):
    check_a_killed_run(trained, tmp_path, lambda step, speculated: step == 7)
