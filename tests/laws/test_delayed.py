"""Law: delayed updates give the bits of their recurrence in plain PyTorch, on every tier, whatever happens around."""

import random
from pathlib import Path

import pytest
import seeded
import speculation_cases as cases
import torch
from probes import fail_at, manager_of, optimizer_step_of
from seeded import assert_same_model
from speculation_cases import DELAYED_EVENTS, backward, build, loop, partly_frozen, step
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import mean_square, module, train, update

import patrickstar as ps
from patrickstar import testing
from patrickstar._params.local_shards import LocalShards

from . import tiers
from .test_late_copies import some_are_slow
from .tiers import Room, blocks, check_a_killed_run, inputs, on_disk, options, small_engine

STEPS = 6


def compare(script, after=0, **options):
    return cases.compare(script, device="cpu", update=ps.Delayed(after=after), **options)


def test_the_reference_follows_the_recurrence():
    """Step i reads R(M(i-2)): written out here with two copies of the weights and plain SGD."""
    rate, after = 0.5, 3
    config = ps.Config(device="cpu", precision="fp32", optimizer=ps.SGD(lr=rate), update=ps.Delayed(after=after))
    trainer = seeded.reference_of(build, config)
    losses = [step(trainer, number) for number in range(STEPS)]
    torch.manual_seed(0)
    model, newest = build(), build()
    newest.load_state_dict(model.state_dict())
    for number in range(STEPS):
        loss = model(cases.batch(number)).float().square().mean()
        loss.backward()
        assert loss == losses[number]
        gradients = [param.grad for param in model.parameters()]
        before = [param.detach().clone() for param in newest.parameters()]
        with torch.no_grad():
            for param, gradient in zip(newest.parameters(), gradients, strict=True):
                param += gradient * -rate
            read = before if number + 1 >= after else list(newest.parameters())
            for param, value in zip(model.parameters(), read, strict=True):
                param.copy_(value)
                param.grad = None


@pytest.mark.parametrize("event", DELAYED_EVENTS[1:])
def test_whatever_happens_before_the_step_is_as_in_the_reference(event):
    compare(loop([[]] * 2 + [[event], [], [event], []], [1] * 6), chunk_size="6KiB", device_memory=0.7)


def engine_of(model_func=build, *, evict_everything=True, **options):
    config = ps.Config(device="cpu", device_memory="64KiB", host_memory="4MiB", chunk_size="6KiB", **options)
    return seeded.engine_of(model_func, config, evict_everything=evict_everything)


def test_it_takes_one_more_list_of_the_compute_dtype():
    with engine_of(update=ps.Delayed(after=0)) as delayed, engine_of() as exact:
        more = delayed.layout.model_data_bytes - exact.layout.model_data_bytes
        assert more == sum(chunk.nbytes for chunk in manager_of(exact).param16.values())


def test_the_newest_values_are_in_the_state_dict_and_after_flush_in_the_forward():
    config = dict(update=ps.Delayed(after=0))
    with engine_of(**config) as engine:
        reference = seeded.reference_of(build, ps.Config(device="cpu", **config))
        for trainer in (engine, reference):
            for number in range(3):
                step(trainer, number)
        testing.assert_same_bits(reference.state_dict(), engine.state_dict(), "masters")
        batch = cases.batch(99)
        with torch.no_grad():
            before, expected_before = engine(batch).clone(), reference(batch)
            engine.optimizer.flush()
            reference.optimizer.flush()
            after, expected_after = engine(batch).clone(), reference(batch)
        testing.assert_same_bits([expected_before, expected_after], [before, after], "outputs")
        assert not torch.equal(before, after)


def test_uses_and_options_that_are_refused():
    """A parameter whose values are gone can't be read, and one can be written after a flush only."""
    with engine_of(update=ps.Delayed(after=0)) as engine:
        step(engine, 0)
        with pytest.raises(ps.errors.TrainingError, match=r"flush\(\) before"), torch.no_grad():
            next(engine.module.parameters()).mul_(2.0)
        engine.optimizer.flush()
        with torch.no_grad():
            next(engine.module.parameters()).mul_(2.0)
        step(engine, 1)
        backward(engine, 2)
        with pytest.raises(ps.errors.TrainingError, match=r"accumulate=True.*optimizer\.flush"):
            backward(engine, 3)
        engine.optimizer.zero_grad()
        step(engine, 4)
    with pytest.raises(ps.errors.ConfigError, match="after"):
        ps.Delayed(after=-1)
    with pytest.raises(ps.errors.ConfigError, match="needs a name"):
        ps.Config(update={"after": 3})
    assert ps.Config(update={"name": "Delayed", "after": 3}).update == ps.Delayed(after=3)


def check_random_loops(seeds, folder, device="cpu", begin=lambda seed: None):
    """Compare loops with the reference; `begin` is called with each seed. Without a folder states are in memory."""
    tested = 0
    for seed in seeds:
        begin(seed)
        options = dict(update=ps.Delayed(after=random.Random(seed).choice([0, 1, 2, 4, 40])))
        if folder is not None:
            options |= dict(disk=ps.Disk(folder), host_memory=f"{150 + seed % 5 * 15}KiB", device_memory=2.5)
        tested += cases.run(seed, DELAYED_EVENTS, device=device, **options).steps > 0
    assert tested > len(seeds) // 2


@pytest.mark.parametrize("room", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("seeds", some_are_slow(100, fast=5))
def test_random_loops_give_the_bits_of_the_reference(seeds, room, tmp_path):
    check_random_loops(seeds, tmp_path if room else None)


def in_memory(folder, first, last, *, update=ps.Delayed(after=3), saves=(), waits=True, **options):  # noqa: B008
    """Train from step `first` to `last`, from a checkpoint of the step before if there is one."""
    engine = engine_of(update=update, **options)
    if (folder / f"step {first - 1}").exists():
        engine.load(folder / f"step {first - 1}")
    for number in range(first, last + 1):
        step(engine, number)
        if number in saves:
            engine.save(folder / f"step {number}", wait=waits)
    return engine


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with in_memory(tmp_path_factory.mktemp("undisturbed"), 1, 8) as engine:
        yield engine


STOPS = [
    pytest.param(stop, waits, marks=() if waits == (stop % 2 == 1) or stop == 3 else pytest.mark.slow)
    for stop in (1, 2, 3, 4, 6)
    for waits in (True, False)
]


@pytest.mark.parametrize(("stop", "waits"), STOPS)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(stop, waits, undisturbed, tmp_path):
    with in_memory(tmp_path, 1, 8, saves=[stop], waits=waits) as saved:
        saved.finish_saving()
        with in_memory(tmp_path, stop + 1, 8) as found:
            for engine in (saved, found):
                assert_same_model(undisturbed, engine)


def test_a_checkpoint_of_a_delayed_run_is_that_of_its_masters_without_a_delay(tmp_path):
    with in_memory(tmp_path, 1, 5, saves=[5]) as saved, in_memory(tmp_path, 6, 5, update=None) as loaded:
        testing.assert_same_bits(saved.state_dict(), loaded.state_dict(), "loaded")
        saved.optimizer.flush()
        testing.assert_same_bits([step(saved, 9)], [step(loaded, 9)], "loss after flush")
        with in_memory(tmp_path, 6, 7, precision="fp32") as other:
            assert saved.state_dict().keys() == other.state_dict().keys(), "in another precision"


@pytest.mark.parametrize("change", ["load_state_dict", "state", "unfreeze", "averaged"])
def test_whatever_replaces_parameters_ends_the_delay(change):
    config = dict(update=ps.Delayed(after=0), optimizer=ps.EMA(ps.AdamW(lr=1e-2), decay=0.9))
    model_func = partly_frozen if change == "unfreeze" else build
    reference = seeded.reference_of(model_func, ps.Config(device="cpu", **config))
    with engine_of(model_func, **config) as engine:
        for trainer in (engine, reference):
            first = next(trainer.module.parameters())
            step(trainer, 0)
            step(trainer, 1)
            if change == "load_state_dict":
                trainer.load_state_dict({name: value * 0.5 for name, value in trainer.state_dict().items()})
            elif change == "unfreeze":
                first.requires_grad_(True)
        if change == "state":
            state = engine.optimizer.state[next(engine.module.parameters())]
            state["exp_avg"] = state["exp_avg"] * 1.0
        elif change == "averaged":
            with engine.averaged():
                engine.state_dict()
        reference.optimizer.flush()
        for number in range(2, 5):
            testing.assert_same_bits([step(reference, number)], [step(engine, number)], f"loss {number}")
        testing.assert_same_bits(reference.state_dict(), engine.state_dict(), "parameters")


def test_statistics_say_how_stale_the_parameters_of_a_step_were():
    with engine_of(update=ps.Delayed(after=3)) as engine:
        found = []
        for number in range(5):
            step(engine, number)
            found.append((engine.stats.last.staleness, engine.stats.last.peak_staleness))
        engine.optimizer.flush()
        step(engine, 9)
        assert [*found, (engine.stats.last.staleness, 0)] == [(0, 0), (0, 0), (0, 0), (1, 1), (1, 1), (0, 0)]
        assert engine.stats.total.staleness == 2 / 6 and engine.stats.total.peak_staleness == 1


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
        before = engine.state_dict()
        fail_at(monkeypatch, LocalShards, "ensure_local", calls, ps.errors.BudgetError("no room"))
        with pytest.raises(ps.errors.BudgetError) as raised:
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
        # the fourth chunk of the second step
        fail_at(monkeypatch, optimizer_step.delayed, "update", 4 + 6, KeyboardInterrupt())
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


large_embedding = module(  # of which a batch needs little
    lambda m, ids: m.head(m.words(ids)), words=lambda: nn.Embedding(400, 8), head=lambda: nn.Linear(8, 8)
)


def test_embeddings_are_looked_up_on_the_host():
    config = ps.Config(device="cpu", device_memory="12KiB", host_memory="4MiB", **DELAYED)
    with seeded.engine_of(large_embedding, config) as engine:
        train(engine, [(torch.arange(6),)] * 4)
        moved = engine.stats.last.h2d_bytes + engine.stats.last.d2h_bytes
        assert moved < 400 * 8 * 2, "the embedding was copied to the device or back"


def test_delayed_updates_from_disk_go_on_beside_operators(tmp_path):
    config = on_disk(blocks, options(**DELAYED), tmp_path, inputs(1)[0], Room(host_bytes=20000, device_bytes=60000))
    with small_engine(blocks, config) as engine:
        train(engine, inputs(3))
        updates = optimizer_step_of(engine).updates
        assert updates.disk.unfinished and updates.queue.updates


skipping = module(
    lambda m, x: m.rest(m.second(m.first(x)) if len(x) > 1 else m.first(x)),
    first=lambda: nn.Linear(48, 48),
    second=lambda: nn.Linear(48, 48),
    rest=build,
)


def test_a_parameter_without_a_gradient_is_written_once_the_update_of_its_chunk_has_ended(tmp_path):
    """An update on disk writes pages back that have masters of other parameters, too."""

    def script(trainer, optimizer):
        losses = []
        for number, rows in enumerate([24, 24, 1, 24, 24]):
            losses.append(update(trainer, mean_square(trainer(cases.batch(number)[:rows]))))
            if rows == 1:
                with torch.no_grad():
                    trainer.module.second.weight.mul_(0.5)
                if not isinstance(trainer, ps.Engine):
                    trainer.follow_writes()
        return losses

    config = options(chunk_size="18KiB", **DELAYED)
    tiers.compare(skipping, on_disk(skipping, config, tmp_path, (cases.batch(0),), Room()), script)


def use_twice(m, x):
    """Use a layer twice, with reentrant checkpoints: its gradient grows."""
    x = x.requires_grad_()
    for _ in range(2):
        x = checkpoint(m.layer, x, use_reentrant=True)
    return m.head(x)


reused = module(use_twice, layer=lambda: nn.Linear(48, 48), head=lambda: nn.Linear(48, 48))


def test_gradients_that_grow_are_known_from_the_steps_before():
    config = dict(update=ps.Delayed(after=3))
    reference = reference_of(reused, **config)
    with engine_of(reused, **config) as engine:
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


def trained(folder: Path, first: int, last: int, saves: bool = False) -> ps.Engine:
    """Train from disk, as a killed run does, and one that goes on."""
    budgets = {"device_memory": "72KiB", "host_memory": "200KiB", "disk": ps.Disk(folder)}
    config = ps.Config(device="cpu", precision="bf16", chunk_size="18KiB", update=ps.Delayed(after=2), **budgets)
    return cases.trained(seeded.engine_of(build, config, page_bytes=8192), folder, first, last, saves)


def test_a_killed_run_resumes_with_the_same_bits(tmp_path):
    check_a_killed_run(trained, tmp_path, lambda step, speculated: step == 7)
