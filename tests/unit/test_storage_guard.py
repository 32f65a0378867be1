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


@pytest.mark.parametrize("library", [None, SimpleNamespace(patrickstar_can_refuse=lambda: 0)])
def test_without_a_compiler_or_with_an_older_pytorch_nothing_refuses(monkeypatch, library):
    monkeypatch.setattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None, raising=False)
    monkeypatch.setattr(module, "native_library", lambda: library)
    monkeypatch.setattr(module, "storage_guard", storage_guard.__wrapped__)
    values = torch.ones(2)
    assert not refuse_access(values.untyped_storage(), "values are away")
    assert values.sum() == 2
