"""Law: delayed updates give the bits of their recurrence in plain PyTorch, on every tier and for any budget."""

import random

import pytest
import seeded
import speculation_cases as cases
import torch
from probes import manager_of
from seeded import assert_same_model
from speculation_cases import DELAYED_EVENTS, backward, build, loop, step

import patrickstar as ps
from patrickstar import testing

from .test_late_copies import some_are_slow

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


def partly_frozen():
    model = build()
    next(model.parameters()).requires_grad_(False)
    return model


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


def test_uses_that_are_refused():
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


def test_the_option_is_checked():
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
@pytest.mark.parametrize("seeds", some_are_slow(100, fast=10))
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


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 6])
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
