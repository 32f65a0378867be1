"""Law: beside an accelerator backward goes on while the host has room for the gradients that updates read."""

import re

import pytest
import strict_device
from laws.test_in_backward import ReadThrice
from probes import manager_of
from seeded import engine_of, reference_of, run_step
from test_running_updates import LAYERS, after_a_step, batch, build

import patrickstar as ps
from patrickstar._chunks.device_cache import DeviceCache
from patrickstar._step.used_gradients import UsedGradients
from patrickstar.errors import BudgetError


def test_backward_goes_on_beside_updates_while_the_host_has_room(monkeypatch):
    """It waits for no gradient's memory, nor for that of a parameter on the device, whose new value is on the host."""
    start_eviction, abandoned = DeviceCache._start_eviction, []

    def noted(cache, chunk):
        if chunk.host.update is not None:
            abandoned.append(chunk)
        return start_eviction(cache, chunk)

    monkeypatch.setattr(DeviceCache, "_start_eviction", noted)
    with after_a_step("60KiB", update=ps.InBackward()) as (engine, gate):
        assert len(gate.updating) == 2 * LAYERS and len(lists_of(engine)) == LAYERS
        assert len(abandoned) >= LAYERS // 2
        gate.open()
        compare(engine)


@pytest.mark.parametrize("seed", range(4))
def test_gradients_grow_behind_their_copy(seed):
    strict_device.configure(seed=seed)
    budgets = dict(device_memory="8MiB", host_memory="8MiB")
    config = ps.Config(device="strict", chunk_size="9KiB", update=ps.InBackward(), **budgets)
    results = []
    for trainer in (engine_of(ReadThrice, config), reference_of(ReadThrice, config)):
        for number in range(4):
            run_step(trainer, (batch(number),))
        results.append(trainer.state_dict())
    ps.testing.assert_same_bits(results[1], results[0], "with gradients that grow")


def test_backward_waits_for_updates_if_the_host_has_no_room(monkeypatch):
    most, add = [], UsedGradients.add
    with pytest.raises(BudgetError) as short, after_a_step("60KiB", update=ps.InBackward(), host_memory="64KiB"):
        pass
    least = int(re.search(r"device_memory=61440 with host_memory=(\d+)", str(short.value))[1])
    monkeypatch.setattr(UsedGradients, "add", lambda self, index: (add(self, index), most.append(len(self.indices))))
    with after_a_step("60KiB", update=ps.InBackward(), host_memory=least, gated=False) as (engine, _):
        assert max(most) == 1 and engine.stats.last.host_peak_model_bytes <= least
        compare(engine)
        more = least + 8 * (9 << 10)
    with after_a_step("60KiB", update=ps.InBackward(), host_memory=more, gated=False) as (engine, _):
        assert 1 < max(most) < LAYERS, "some more lists have room"
        assert not manager_of(engine).host_tier.has_room(1 << 30)
        assert len(lists_of(engine)) == 1, "the others have made room"
        compare(engine)


def lists_of(engine: ps.Engine) -> list[int]:
    return [index for kind, index in manager_of(engine).chunks if kind == "grad32"]


def compare(engine: ps.Engine) -> None:
    """Train on after three steps, and compare with plain PyTorch."""
    trainer = reference_of(build, engine.config)
    for number in range(6):
        run_step(trainer, (batch(),))
        if number > 2:
            run_step(engine, (batch(),))
    ps.testing.assert_same_bits(trainer.state_dict(), engine.state_dict(), "with updates beside backward")
