"""The process's state is restored after each test."""

import logging
import os
import random
import signal

import numpy as np
import pytest
import restore
import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import TrainingArguments


def state() -> list[object]:
    """Return what belongs to the process, with the next random numbers."""
    numbers = torch.rand(1, device="cpu").item(), np.random.random(), random.random()
    return [dict(os.environ), *(get() for get, _ in restore.SETTINGS), numbers, dist.is_initialized()]


def change_variables(tmp_path):
    os.environ["PATRICKSTAR_OF_A_TEST"] = "1"
    os.environ["PATH"] += ":/nowhere"
    del os.environ["HOME"]


def change_torch(tmp_path):
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = True


def change_process(tmp_path):
    signal.signal(signal.SIGTERM, lambda *_: None)
    logging.getLogger("patrickstar").setLevel(logging.DEBUG)
    logging.disable()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def change_random_numbers(tmp_path):
    for draw in (torch.manual_seed, np.random.seed, random.seed):
        draw(1)


def change_accelerate(tmp_path):
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "EAGER"
    assert Accelerator(cpu=True, gradient_accumulation_steps=3).state.dynamo_plugin.backend.value == "EAGER"
    TrainingArguments(str(tmp_path), torch_compile=True, use_cpu=True)


@pytest.mark.parametrize(
    "change", [change_variables, change_torch, change_process, change_random_numbers, change_accelerate]
)
def test_what_tests_change_is_restored(change, tmp_path):
    with restore.restored():
        before = state()
    with restore.restored():
        change(tmp_path)
        assert state() != before
    with restore.restored():
        assert state() == before
    accelerator = Accelerator(cpu=True)
    assert accelerator.gradient_accumulation_steps == 1
    assert accelerator.state.dynamo_plugin.backend.value == "NO"
