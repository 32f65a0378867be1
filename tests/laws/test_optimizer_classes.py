"""Optimizer classes that count in their param group or couple parameters: exact, or refused by name."""

from functools import partial

import pytest
import torch
from toys import mean_square

import patrickstar as ps

from . import group_optimizers
from .group_optimizers import KINDS, WIDTH, Branches, DecaysAll, DrawsWhenCreated, GlobalScale, batch, config_of, train

STEPS, SAVED_AFTER = 12, 7


class Base(group_optimizers.Base):
    """Base class of the optimizers below: it counts in its param groups and updates parameters that have gradients."""

    def update(self, group, params):
        group["step"] = group.get("step", 0) + 1
        rate = self.rate(group, params)
        for param in params:
            average = self.state[param].setdefault("average", torch.zeros_like(param))
            param.sub_(average.lerp_(param.grad, 0.3), alpha=group["lr"] * rate)

    def rate(self, group, params):
        return 1.0


class CountsInGroup(Base):
    """Shrinks its steps from step 6 on, and decays its own learning rate."""

    def rate(self, group, params):
        group["lr"] *= 0.95
        return 1.0 if group["step"] < 6 else 1 / group["step"]


class CountsTensors(Base):
    """Keeps a tensor in the group, which it changes in place, and counts only steps that have a gradient."""

    def rate(self, group, params):
        total = group.setdefault("total", torch.zeros(1))
        if params:
            total += group["lr"]
        return float(total) / group["step"]


class CouplesFromStep8(Base):
    """Divides by the norm of all gradients of a group, from step 8 on."""

    def rate(self, group, params):
        return 1.0 if group["step"] < 8 or not params else float(1 / sum(each.grad.norm() for each in params))


class SumsOverGroup(Base):
    """Accumulates a sum over the group, which it never uses within a probe."""

    def rate(self, group, params):
        group["sum"] = group.get("sum", 0.0) + float(sum(each.grad.abs().sum() for each in params))
        return 1.0 if group["step"] < 1000 else group["sum"]


class CountsInInstance(Base):
    """Counts in itself, and uses it in the far future."""

    count = 0

    def rate(self, group, params):
        self.count += 1
        return 1.0 if self.count < 1000 else 0.1


class CountsInClass(CountsInInstance):
    """Counts in its class."""

    words = "changes count of its class"

    def rate(self, group, params):
        type(self).count += 1
        return 1.0


class UsesFirstParam(Base):
    """Keeps a state under a key of its own."""

    def rate(self, group, params):
        self.state["shared"]["norm"] = params[0].norm() if params else 0.0
        return 1.0


class DrawsFromStep5(Base):
    """Draws a random number in later steps."""

    def rate(self, group, params):
        return 1.0 if group["step"] < 5 else float(torch.rand(()))


class DecaysWithoutGradients(Base):
    """Changes parameters that have no gradient."""

    words = DecaysAll.words

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for param in (param for group in self.param_groups for param in group["params"]):
            param.mul_(0.99)


class NormalizesVectors(Base):
    """Element-wise for matrices, by the norm of the parameter for vectors."""

    def update(self, group, params):
        for param in params:
            param.sub_(param.grad / (param.grad.norm() if param.dim() == 1 else 1.0), alpha=group["lr"])


EXACT = [CountsInGroup, CountsTensors, NormalizesVectors]
TOGETHER = [CouplesFromStep8, SumsOverGroup, CountsInInstance, UsesFirstParam, DrawsFromStep5]
REFUSED = [CountsInClass, DecaysWithoutGradients, DecaysAll, group_optimizers.CountsInClass, DrawsWhenCreated]


def by_name(kind):
    return kind.__name__


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", EXACT + TOGETHER + KINDS, ids=by_name)
def test_a_class_that_counts_in_its_group_or_couples_parameters_trains_exactly(kind, precision):
    """Every chunk is evicted at each access; gradients are missing, a bias is frozen, groups differ."""
    ps.testing.compare(Branches, config_of(kind, precision), train)


@pytest.mark.parametrize("where", ["delayed", "disk", "in backward"])
def test_counts_are_those_of_the_step_wherever_and_whenever_its_update_runs(where, tmp_path):
    disk = {"disk": ps.Disk(tmp_path, capacity="1MiB"), "host_memory": "64KiB"}
    config = config_of(CountsInGroup, **{"delayed": {"update": ps.Delayed()}, "disk": disk}.get(where, {}))
    ps.testing.compare(Branches, config, partial(train, update=where == "in backward"))


@pytest.mark.parametrize("kind", REFUSED, ids=by_name)
def test_a_class_that_changes_more_than_its_parameters_is_refused_by_name(kind):
    """Also if it runs on the whole group, which would differ, too."""
    with pytest.raises(ps.errors.ConfigError, match=f"{kind.__name__}.*{kind.words}") as caught:
        ps.Config(optimizer=kind)
    assert "\n" not in str(caught.value) and "ps.AdamW" in str(caught.value)


@pytest.mark.parametrize("file", [True, False], ids=["engine.save", "state_dict"])
@pytest.mark.parametrize("kind", KINDS + EXACT[:2], ids=by_name)
def test_a_resumed_run_has_the_counts_and_bits_of_an_uninterrupted_one(kind, file, tmp_path):
    def run(engine, first, last):
        engine.module.calls = first
        return train(engine, engine.optimizer, range(first, last))

    torch.manual_seed(0)
    whole = ps.testing.stressed(Branches, config_of(kind))
    run(whole, 0, SAVED_AFTER)
    if file:
        whole.save(tmp_path / "saved")
    saved, generator = (whole.state_dict(), whole.optimizer.state_dict()), torch.get_rng_state()
    expected = run(whole, SAVED_AFTER, STEPS)
    resumed = ps.testing.stressed(Branches, config_of(kind))
    run(resumed, 0, 2)  # with values of its own, which are replaced
    if file:
        resumed.load(tmp_path / "saved")
    else:
        resumed.load_state_dict(saved[0])
        resumed.optimizer.load_state_dict(saved[1])
        torch.set_rng_state(generator)
    ps.testing.assert_same_bits(expected, run(resumed, SAVED_AFTER, STEPS), "losses and options of groups")
    ps.testing.assert_same_bits(whole.state_dict(), resumed.state_dict(), "parameters")
    whole.close()
    resumed.close()


@pytest.mark.parametrize("kind", [CountsInGroup, GlobalScale], ids=by_name)
def test_a_skipped_step_changes_and_counts_nothing(kind):
    engine = ps.testing.stressed(Branches, config_of(kind, "fp16"))
    before = engine.state_dict()
    engine.backward(mean_square(engine(batch(0))) * 1e9)
    engine.optimizer.step()
    assert "step" not in engine.optimizer.param_groups[0]
    ps.testing.assert_same_bits(before, engine.state_dict(), "parameters")
    engine.close()


def test_a_group_that_a_parameter_changes_in_another_way_later_ends_training_by_name():
    """A probe cannot see the hundredth step; the writes of each parameter are compared in every step."""

    class Switches(Base):
        def rate(self, group, params):
            if group["step"] > 60 and params:
                group["lr"] = float(params[0].grad.norm())
            return 1.0

    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH))
    engine, optimizer = ps.initialize(model, ps.Config(device="cpu", precision="fp32", optimizer=Switches))
    with pytest.raises(ps.errors.ConfigError, match=r"Switches.*lr"):
        for step in range(62):
            engine.backward(mean_square(engine(batch(step))))
            optimizer.step()
    engine.close()


class Modes(CountsInGroup):
    """Updates in training mode only, as schedule-free classes do."""

    def train(self):
        for group in self.param_groups:
            group["training"] = True

    def eval(self):
        raise NotImplementedError

    def rate(self, group, params):
        assert group["training"]
        return 1.0


def test_a_class_with_modes_trains_and_its_evaluation_is_refused_by_name():
    ps.testing.compare(Branches, config_of(Modes), train)
    engine, optimizer = ps.initialize(Branches, config_of(Modes))
    with pytest.raises(ps.errors.ConfigError, match=r"Modes\.eval"):
        optimizer.eval()
    engine.close()
