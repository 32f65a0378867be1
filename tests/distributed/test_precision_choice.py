"""Several processes choose one precision, whatever each of them would measure."""

from types import SimpleNamespace

import pytest
import rates
import torch
import torch.distributed as dist
from toys import layers

import patrickstar as ps
from patrickstar._distributed.process_group import World
from patrickstar._dry_run.precision_choice import settle_precision
from patrickstar.errors import ConfigError

from . import ranks


@ranks.in_processes(2)
def test_two_processes_agree():
    world = World.find(torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        # Rank 0 finds fp32 faster; the other one does not measure, since it would take the cores of rank 0.
        patch.setattr(rates.MEASURED, rates.fixed(fp32=2e9) if dist.get_rank() == 0 else None)
        with ps.initialize(layers(8, 2), ps.Config(device="cpu")) as (engine, _):
            assert engine.config.precision == "fp32"
        # Of different GPUs each counts: all have to have bf16.
        gpu = SimpleNamespace(name="GPU", has_bf16=dist.get_rank() == 0)
        patch.setattr("patrickstar._tiers.hardware.Hardware.new_accelerator", lambda device: gpu)
        settled = settle_precision(ps.Config(), layers(8, 1), torch.device("cuda", 0), world)
        assert settled.precision == "fp16"
    asked = ps.Config(device="cpu", precision="auto" if dist.get_rank() == 0 else "bf16")
    with pytest.raises(ConfigError, match="processes differ in precision: rank 0 has 'auto', rank 1 has 'bf16'"):
        ps.initialize(layers(8, 2), asked)
