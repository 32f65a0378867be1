"""A storage that refuses to be read raises for each tensor over it, and is read again afterwards."""

from types import SimpleNamespace

import pytest
import torch

from patrickstar._hardware import storage_guard as module
from patrickstar._hardware.storage_guard import allow_access, refuse_access, storage_guard


def test_every_access_raises_until_it_is_allowed_again():
    values = torch.arange(6.0).reshape(2, 3)
    view = values.t()[1:]
    assert refuse_access(values.untyped_storage(), "values are away")
    for access in (lambda: view + 1, lambda: view.mm(view), view.data_ptr, lambda: values.zero_()):
        with pytest.raises(RuntimeError, match="values are away"):
            access()
    assert view.shape == (2, 2) and view.t().stride() == (3, 1)
    allow_access(values.untyped_storage())
    assert view.tolist() == [[1, 4], [2, 5]]


@pytest.fixture(params=[None, SimpleNamespace(patrickstar_can_refuse=lambda: 0)], ids=["no library", "library"])
def older(request, monkeypatch):
    """A PyTorch that can't take a refusal back, without a compiler or with one."""
    monkeypatch.setattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None, raising=False)
    monkeypatch.setattr(module, "native_library", lambda: request.param)
    monkeypatch.setattr(module, "storage_guard", storage_guard.__wrapped__)


def test_without_a_compiler_or_with_an_older_pytorch_nothing_refuses(older, monkeypatch):
    monkeypatch.setattr(torch._C, "_set_storage_data_ptr_access_error_msg", None, raising=False)
    values = torch.ones(2)
    for for_good in (False, True):
        assert not refuse_access(values.untyped_storage(), "values are away", for_good=for_good)
    assert values.sum() == 2


def test_what_is_never_allowed_again_refuses_with_an_older_pytorch_too(older, monkeypatch):
    refused = []
    name = "_set_storage_data_ptr_access_error_msg"
    monkeypatch.setattr(torch._C, name, lambda storage, message: refused.append(message), raising=False)
    storage = torch.ones(2).untyped_storage()
    assert not refuse_access(storage, "values are away") and not refused
    allow_access(storage)
    assert refuse_access(storage, "values are away", for_good=True) and refused == ["values are away"]
