"""Law: frozen modules share an engine's budgets, change no bit, and belong to no saved state."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from sampling import draws
from torch import nn
from toys import inputs, layers, mean_square

import patrickstar as ps
from patrickstar import testing
from patrickstar._engine.engine import Engine
from patrickstar.errors import ModelError

WIDTH = 32


def build(count: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return layers(WIDTH, count, nn.Tanh)


def distill(trainer: Any, teacher: Any, order: str) -> list[torch.Tensor]:
    """Train towards the outputs of a teacher, which is called before or between forward and backward, or evaluated."""
    seen = []
    for number, batch in enumerate(inputs(4, WIDTH)):
        target = teacher(*batch) if order == "before" or (order == "mixed" and number % 2) else None
        out = trainer(*batch)
        target = teacher(*batch) if target is None else target
        loss = mean_square(out - target)
        trainer.backward(loss)
        seen += [loss.detach().clone(), trainer.clip_grad_norm_(0.1)]
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        with torch.no_grad():
            seen.append(trainer(*batch))
        seen.append(teacher(*batch))
    return seen


@pytest.mark.parametrize("order", ["before", "between", "mixed"])
@pytest.mark.parametrize("kind", ["evicted", "tight", "disk", "roomy"])
def test_bits_of_plain_pytorch(kind, order, tmp_path):
    for seed in range(draws(3)):
        draw = random.Random(seed)
        kinds = {"precision": draw.choice(["bf16", "fp32"]), "chunk_size": draw.choice([1100, 4096, "auto"])}
        config = ps.Config(device="cpu", optimizer=ps.AdamW(lr=1e-2), **kinds)
        counts = draw.randint(1, 6), draw.randint(1, 6)
        print(f"seed {seed}: {config!r}, {counts} layers")
        reference = testing.ReferenceTrainer(build(counts[0], seed), config)
        plain = testing.ReferenceTrainer(build(counts[1], seed + 100).requires_grad_(False), config)
        expected = distill(reference, torch.no_grad()(plain.__call__), order)
        options: dict[str, Any] = {"meter": testing.NoMeter(), "poison": True, "evict_everything": kind == "evicted"}
        if kind in ("tight", "disk"):
            config = config.model_copy(update={"device_memory": 30_000, "chunk_size": 4300})
        if kind == "disk":
            config = config.model_copy(update={"host_memory": 120_000, "disk": ps.Disk(tmp_path)})
            options["page_bytes"] = 4096
        frozen = {"teacher": build(counts[1], seed + 100)}
        with Engine(build(counts[0], seed), config, frozen=frozen, **options) as engine:
            found = distill(engine, partial(engine.call_frozen, "teacher"), order)
            testing.assert_same_bits(expected, found, "losses, norms and outputs")
            testing.assert_same_bits(reference.state_dict(), engine.state_dict(), "parameters")
            assert engine.stats.total.device_peak_model_bytes <= engine.device_budget_bytes


def two_models() -> tuple[Engine, nn.Module]:
    teacher = build(2, 1)
    return Engine(build(3, 0), ps.Config(device="cpu"), frozen={"teacher": teacher}, meter=testing.NoMeter()), teacher


def test_no_state_holds_a_frozen_module(tmp_path):
    engine, teacher = two_models()
    numel = sum(param.numel() for param in build(2, 1).parameters())
    of_teacher = {each.chunk for each in engine.inspect().parameters if each.name.startswith("teacher.")}
    nbytes = sum(chunk.nbytes for chunk in engine.inspect().chunks if chunk.index in of_teacher)
    assert 2 * numel <= nbytes < 2.5 * numel, "its parameters take two bytes"
    names = [name for name, _ in build(3, 0).named_parameters()]
    assert [name for name, _ in engine.named_parameters()] == names
    assert list(engine.state_dict()) == names
    assert [len(group["params"]) for group in engine.optimizer.param_groups] == [len(names)]
    engine.save(tmp_path / "checkpoint")
    with Engine(build(3, 7), ps.Config(device="cpu"), meter=testing.NoMeter()) as alone:
        alone.load(tmp_path / "checkpoint")
        testing.assert_same_bits(engine.state_dict(), alone.state_dict(), "loaded without the teacher")
        alone.save(tmp_path / "alone")
    before = [param.detach().clone() for param in teacher.parameters()]
    engine.load(tmp_path / "alone")
    testing.assert_same_bits(before, [param.detach() for param in teacher.parameters()], "teacher")
    engine.close()
    expected = [param.to(torch.bfloat16) for param in build(2, 1).parameters()]
    testing.assert_same_bits(expected, [param.detach() for param in teacher.parameters()], "teacher after closing")


def test_mistakes():
    teacher = build(2, 1)
    for name in ("0", "not a name", ""):
        with pytest.raises(ModelError, match="can't be named"):
            Engine(build(3, 0), ps.Config(device="cpu"), frozen={name: teacher})
    model = nn.ModuleDict({"student": build(1, 0), "head": build(1, 1)})
    with pytest.raises(ModelError, match="can't be named 'head'"):
        Engine(model, ps.Config(device="cpu"), frozen={"head": teacher})
    with pytest.raises(ModelError, match=r"parameter '0.weight' of the frozen module 'teacher' is the same tensor as"):
        Engine(model, ps.Config(device="cpu"), frozen={"teacher": model["head"][0]})
    engine, _ = two_models()
    with pytest.raises(ModelError, match=r"no frozen module 'reference', only \['teacher'\]"):
        engine.call_frozen("reference", *inputs(1, WIDTH)[0])
