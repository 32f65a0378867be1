"""Stacked experts of Switch Transformers: the same function in a form that expert parallelism can shard."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import patrickstar as ps
from patrickstar.errors import ConfigError, ModelError
from patrickstar.integrations.transformers import parallelize, stack_experts

from . import tiny
from .fake_processes import fake_processes
from .tiny import llama, small_chunks


def switch(capacity=64, **options):
    torch.manual_seed(0)
    return tiny.switch(capacity, **options).train()


def stacked(**options):
    model = switch(**options)
    stack_experts(model)
    return model


def batch(seed=0):
    ids = torch.randint(1, tiny.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.flip(-1)}


@pytest.mark.parametrize("capacity", [64, 2], ids=["all tokens", "tokens beyond the capacity"])
def test_the_function_and_its_gradients_stay(capacity):
    expected, found = switch(capacity), stacked(capacity=capacity)
    losses = [model(**batch()).loss for model in (expected, found)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    gradients = {name: param.grad for name, param in expected.named_parameters()}
    for name, param in found.named_parameters():
        layer, _, matrix = name.rpartition(".")
        if matrix not in ("wi", "wo"):
            torch.testing.assert_close(param.grad, gradients.pop(name), rtol=1e-5, atol=1e-7)
            continue
        for expert in range(4):
            grad = gradients.pop(f"{layer}.expert_{expert}.{matrix}.weight")
            expected_grad = torch.zeros_like(param[expert]) if grad is None else grad
            torch.testing.assert_close(param.grad[expert], expected_grad, rtol=1e-5, atol=1e-7)
    assert not gradients


def test_experts_have_dropout():
    model = stacked(dropout_rate=0.5)
    experts = model.encoder.block[1].layer[1].mlp.experts
    assert (experts.dropout.p, experts.num_experts, experts.wi.shape) == (0.5, 4, (4, 48, 32))
    index, weights = torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)
    first, second = (experts.forward(torch.ones(3, 32), index, weights) for _ in range(2))
    assert not torch.equal(first, second)


def test_training_in_chunks_is_exact():
    ps.testing.assert_exact(stacked, [batch(0), batch(1)], small_chunks("bf16"))


def test_meta_parameters_and_frozen_ones_stay_so():
    with torch.device("meta"):
        model = switch().requires_grad_(False)
    stack_experts(model)
    assert all(param.is_meta and not param.requires_grad for param in model.parameters())


def test_experts_are_sharded_by_the_plan():
    with fake_processes(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        with torch.device("meta"):
            model = switch()
        with pytest.raises(
            ConfigError, match=r"no expert-parallel plan for Switch.*: pass ep_plan, or call stack_experts"
        ):
            parallelize(model, ep=mesh)
        stack_experts(model)
        parallelize(model, ep=mesh)
        sharded = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
    layers = ("encoder.block.1.layer.1", "decoder.block.1.layer.2")
    assert sharded == [f"{layer}.mlp.experts.{matrix}" for layer in layers for matrix in ("wi", "wo")]


def test_other_models_are_refused():
    for model in (llama(), stacked()):
        with pytest.raises(ModelError, match=f"{type(model).__name__} has no experts of Switch Transformers to stack"):
            stack_experts(model)


def test_an_export_with_names_that_transformers_does_not_know_is_refused(tmp_path):
    engine, _ = ps.initialize(stacked(), small_chunks())
    with engine, pytest.raises(ModelError, match=r"mlp\.experts' is a StackedExperts, .* take engine\.state_dict\(\)"):
        engine.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()
