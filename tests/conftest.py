"""What every test may share."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """Tiny tensors are slower on several threads than on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
