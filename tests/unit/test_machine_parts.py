"""Machines by their parts: the specs of whole machines with the same parts, and names as people write them."""

from functools import partial

import pytest

from patrickstar._perf_model.machine_parts import find_gpu, known_gpus, machine_of_parts, parse_disk, parse_rate
from patrickstar._perf_model.machine_spec import find_machine
from patrickstar.errors import ConfigError


@pytest.mark.parametrize(
    ("gpu", "machine"), [("rtx4090", "RTX4090-desktop"), ("a100-80gb", "DGX-A100-80GB"), ("h200", "H200")]
)
def test_a_gpu_is_that_of_the_machine_with_it(gpu, machine):
    own, whole = machine_of_parts(gpu), find_machine(machine)
    assert own.gpu.model_copy(update={"count": whole.gpu.count}) == whole.gpu
    assert (own.links.h2d, own.links.d2h) == (whole.links.h2d, whole.links.d2h)
    assert own.links.gpu_gpu == whole.links.gpu_gpu


def test_a_desktop_of_parts_is_the_desktop():
    own = machine_of_parts("rtx4090", host_memory="64GB", disk="2TB:7GB/s:5GB/s")
    whole = find_machine("RTX4090-desktop")
    assert (own.gpu, own.host, own.disk) == (whole.gpu, whole.host, whole.disk)


def test_a_gpu_is_found_as_people_write_it():
    written = ["RTX 4090", "GeForce RTX 5090", "4090", "A100", "A100-80GB", "NVIDIA H100", "MI300X"]
    names = ["rtx4090", "rtx5090", "rtx4090", "a100-80gb", "a100-80gb", "h100", "mi300x"]
    assert [find_gpu(each)[0] for each in written] == names


def test_all_gpus_are_machines():
    for name, part in known_gpus().items():
        machine = machine_of_parts(name, 2)
        assert machine.gpu.count == 2 and machine.gpu.memory == part.memory
        assert machine.links.gpu_gpu > 0


@pytest.mark.parametrize("count", [1, 4, 8])
def test_cards_of_a_desktop_exchange_no_more_than_its_memory_passes_on(count):
    machine = machine_of_parts("rtx4090", count)
    assert 2 * count * machine.links.gpu_gpu <= machine.host.memory_bandwidth
    assert machine.links.gpu_gpu <= machine.links.h2d


def test_a_rate():
    assert [parse_rate(text, "host_bandwidth") for text in ("170GB/s", " 1.5GB", "64GiB/s")] == [17e10, 15e8, 2.0**36]


@pytest.mark.parametrize(
    ("text", "capacity", "read", "write"),
    [("1TB", 1e12, 7e9, 5e9), ("1TB:7GB/s", 1e12, 7e9, 7e9), ("512GB:3.5GB/s:2GB/s", 512e9, 3.5e9, 2e9)],
)
def test_a_disk(text, capacity, read, write):
    disk = parse_disk(text)
    assert (disk.capacity, disk.read, disk.write) == (capacity, read, write)


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        *(
            (parse_disk, text, "--disk {}: ")
            for text in ("1TB:7GB", "1TB:1GB/s:1GB/s:1GB/s", "large", "1TB:fast/s", "")
        ),
        *((partial(parse_rate, option="rate"), text, "rate='{}': ") for text in ("170", "2GB/h", "fast/s", "")),
        (find_gpu, "RTX 4091", "--gpu {}: it is not known; did you mean rtx4090"),
    ],
)
def test_what_is_no_part_of_a_machine(parse, text, says):
    with pytest.raises(ConfigError, match=says.format(text)):
        parse(text)
