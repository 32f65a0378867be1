"""Law: whatever happens around a step, delayed updates keep parameters, gradients and counts consistent."""

import pytest
import speculation_cases as cases
import torch
from probes import manager_of, optimizer_step_of
from speculation_cases import backward, build
from torch import nn
from torch.utils.checkpoint import checkpoint

import patrickstar as ps
from patrickstar import testing
from patrickstar._engine.engine import Engine
from patrickstar._params.model_data import ModelData
from patrickstar.errors import BudgetError

from .test_delayed import engine_of, run_step, trained
from .tiers import Room, blocks, inputs, on_disk, options, small_engine

DELAYED = {"update": ps.Delayed(after=0)}


def reference_of(model_func=build, **options):
    torch.manual_seed(0)
    return testing.ReferenceTrainer(model_func, ps.Config(device="cpu", **options))


def test_a_graph_that_saved_parameters_of_a_delay_that_has_ended_is_refused_by_autograd():
    with engine_of(**DELAYED) as engine:
        for trainer in (engine, reference_of(**DELAYED)):
            run_step(trainer, 0)
            loss = trainer(cases.batch(1)).float().square().mean()
            trainer.backward(loss, retain_graph=True)
            trainer.optimizer.zero_grad()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                trainer.backward(loss)


@pytest.mark.parametrize("calls", [1, 3, 6])
def test_an_exchange_that_fails_names_its_parameters_and_leaves_masters(monkeypatch, calls):
    with engine_of(evict_everything=False, **DELAYED) as engine:
        run_step(engine, 0)
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
            assert run_step(engine, number).isfinite()


def test_a_step_that_was_interrupted_goes_on_where_it_stopped(monkeypatch):
    with engine_of(**DELAYED) as expected, engine_of(**DELAYED) as engine:
        step = optimizer_step_of(engine)
        update, count = step.delayed.update, 0

        def interrupted(*args):
            nonlocal count
            count += 1
            if count == 4 + 6:  # the fourth chunk of the second step
                raise KeyboardInterrupt
            update(*args)

        monkeypatch.setattr(step.delayed, "update", interrupted)
        for number in range(4):
            found = backward(engine, number)
            if number == 1:
                with pytest.raises(KeyboardInterrupt):
                    engine.optimizer.step()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            testing.assert_same_bits([run_step(expected, number)], [found], f"loss {number}")
        assert step.steps == 4
        testing.assert_same_bits(expected.state_dict(), engine.state_dict(), "parameters")


class Words(nn.Module):
    """A large embedding, of which a batch needs little."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(400, 8), nn.Linear(8, 8)

    def forward(self, ids):
        return self.head(self.words(ids))


def test_embeddings_are_looked_up_on_the_host():
    torch.manual_seed(0)
    config = ps.Config(device="cpu", device_memory="12KiB", host_memory="4MiB", **DELAYED)
    with Engine(Words, config, meter=testing.NoMeter()) as engine:
        for _ in range(4):
            engine.backward(engine(torch.arange(6)).float().square().mean())
            engine.optimizer.step()
        moved = engine.stats.last.h2d_bytes + engine.stats.last.d2h_bytes
        assert moved < 400 * 8 * 2, "the embedding was copied to the device or back"


def test_delayed_updates_from_disk_go_on_beside_operators(tmp_path):
    config = on_disk(blocks, options(**DELAYED), tmp_path, inputs(1)[0], Room(host_bytes=20000, device_bytes=60000))
    torch.manual_seed(0)
    with small_engine(blocks, config) as engine:
        step = optimizer_step_of(engine)
        for batch in inputs(3):
            loss = engine(*batch).float().square().mean()
            engine.backward(loss)
            engine.optimizer.step()
        assert step.disk_step.unfinished and step.updating


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
        for number in range(6):
            testing.assert_same_bits([run_step(reference, number)], [run_step(engine, number)], f"loss {number}")


def test_a_batch_that_was_skipped_is_no_second_backward():
    with engine_of(**DELAYED) as engine:
        run_step(engine, 0)
        for number in range(1, 4):
            backward(engine, 10 * number)
            engine.optimizer.zero_grad()
            run_step(engine, number)
        assert not [chunk for chunk in manager_of(engine).chunks.values() if chunk.kind == "grad32"]


def test_steps_before_a_delay_was_chosen_count(tmp_path):
    with trained(tmp_path, 1, 5, update=None, saves=[5]), trained(tmp_path, 6, 7, update=ps.Delayed(after=6)) as engine:
        assert engine.stats.last.staleness == 1
    with trained(tmp_path, 6, 7, update=ps.Delayed(after=3), saves=[7]):
        pass
    with trained(tmp_path, 8, 8, update=ps.Delayed(after=20)) as engine:
        assert engine.stats.last.staleness == 0


def test_a_parameter_in_no_group_is_as_in_the_reference():
    reference = reference_of(**DELAYED)
    with engine_of(**DELAYED) as engine:
        for number in range(7):
            if number == 3:
                for trainer in (reference, engine):
                    del trainer.optimizer.param_groups[0]["params"][2]
            testing.assert_same_bits([run_step(reference, number)], [run_step(engine, number)], f"loss {number}")
            for trainer in (reference, engine):
                trainer.optimizer.zero_grad()
