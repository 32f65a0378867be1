"""Construction of models with parameters on the meta device."""

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from patrickstar.integrations.transformers._model_builder import parameters_on_meta


def test_parameters_on_meta_keeps_buffers_sharing_and_flags() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.ones(3), requires_grad=False)
            self.first, self.second = weight, weight
            self.none = None
            self.register_parameter("absent", None)
            self.register_buffer("buffer", torch.ones(2))

    with parameters_on_meta():
        model = Shared()
    assert model.first is model.second
    assert model.first.is_meta
    assert not model.first.requires_grad
    assert torch.equal(model.buffer, torch.ones(2))
    assert not torch_module._global_parameter_registration_hooks

    with pytest.raises(RuntimeError, match="in the middle"), parameters_on_meta():
        raise RuntimeError("in the middle")
    assert not torch_module._global_parameter_registration_hooks
