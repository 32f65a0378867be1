"""Copies of parameters in RAM, beside an accelerator: rounded ones can't become an average in full precision."""

import copy
import io

import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from toys import layers

import patrickstar as ps

WIDTH = 8


def engine_of(precision):
    torch.manual_seed(0)
    return ps.testing.stressed(layers(WIDTH, 2), ps.Config(device="strict", precision=precision, chunk_size="1KiB"))


def test_an_average_of_all_digits_is_that_of_plain_pytorch():
    engine, plain = engine_of("fp32"), layers(WIDTH, 2)
    plain.load_state_dict({name: value.cpu() for name, value in engine.module.state_dict().items()})
    results = []
    for module in (engine.module, plain):
        averaged = AveragedModel(module)
        for _ in range(3):
            with torch.no_grad():
                for param in module.parameters():
                    param.mul_(1.5)
            averaged.update_parameters(module)
        results.append([param.detach() for param in averaged.module.parameters()])
    ps.testing.assert_same_bits(*results, "averages")


def test_a_rounded_copy_is_used_like_a_tensor_and_an_average_of_them_is_refused_by_name():
    engine = engine_of("bf16")
    weight = engine.module[0].weight
    rounded, moved = weight.detach().clone().cpu(), weight.detach().cpu()
    assert torch.equal(moved, rounded) and moved.device.type == "cpu" and moved.dtype == torch.bfloat16
    target = torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16)
    for value in (moved + 0, moved.float(), target.copy_(moved), copy.deepcopy(moved), moved.clone()):
        assert type(value) is torch.Tensor and torch.equal(value.bfloat16(), rounded)
    assert moved.float().numpy().tolist() == rounded.float().tolist()
    file = io.BytesIO()
    torch.save(moved, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)) is torch.Tensor
    moved.mul_(2)  # it is a copy
    assert torch.equal(weight.detach().clone().cpu(), rounded)
    torch.zeros(WIDTH, WIDTH).copy_(moved)  # of other values by now
    averaged = AveragedModel(engine.module)
    with pytest.raises(ps.errors.ModelError, match=r"'0\.weight'.*rounded to torch\.bfloat16.*ps\.EMA"):
        averaged.update_parameters(engine.module)


def test_a_parameter_made_of_a_rounded_copy_is_a_parameter():
    engine = engine_of("bf16")
    layer = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(engine.module[0].weight.detach().cpu())
    for write in (lambda target, values: target.copy_(values), lambda target, values: target.add_(other=values)):
        with pytest.raises(ps.errors.ModelError, match=r"'0\.weight'.*rounded"):
            write(torch.zeros(WIDTH, WIDTH), layer.weight.detach())
    optimizer = torch.optim.AdamW(layer.parameters())
    for copied in (layer, copy.deepcopy(layer)):
        copied(torch.ones(2, WIDTH, dtype=torch.bfloat16)).sum().backward()
        assert isinstance(copied.weight, torch.nn.Parameter) and copied.weight.grad is not None
    optimizer.step()
    torch.zeros(WIDTH, WIDTH).copy_(layer.weight.detach())  # trained values
    assert all(type(value) is torch.Tensor for value in copy.deepcopy(layer.state_dict()).values())
