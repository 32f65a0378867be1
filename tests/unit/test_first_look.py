"""First look at an open model: before PyTorch is loaded, with a bound below the plan's."""

import pytest

from patrickstar._plan.first_look import first_look
from patrickstar._plan.planner import SearchOptions
from patrickstar.errors import BudgetError

OPEN = ("machine", "gpus", "device_memory", "host_bandwidth", "cores", "batch", "activation_checkpointing")
OPTIONS = dict.fromkeys(OPEN) | dict(nodes=1, tp=1, ep=1, sequence=1024, dry_run=True, precision="auto")
OPTIONS |= {"gpu": "rtx4090", "disk": "2TB:7GB/s"}


def test_an_open_model_has_a_size_and_a_least_time_at_once():
    text = first_look("llama-3-8b", 1024, SearchOptions(**OPTIONS, host_memory="64GB").search())
    assert "8.03 billion parameters have 104.70 GiB of model data, which fit without activations; 1 x 1,024" in text
    assert "because of disk read" in text
    assert first_look("gpt-1m", 1024, SearchOptions(**OPTIONS, host_memory="64GB").search()) is None


def test_model_data_that_do_not_fit_are_refused_at_once():
    with pytest.raises(BudgetError, match=r"919\.92 GiB of model data .* do not fit on the device and the host\. "):
        first_look("llama-3-70b", 1024, SearchOptions(**OPTIONS | {"disk": None}, host_memory="64GB").search())
