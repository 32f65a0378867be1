"""Machine specs: packaged files are complete, and errors name the field."""

import re

import pytest
from hypothesis import strategies as st
from sampling import fixed_draws
from simulated_machines import CPU, NODE

from patrickstar._perf_model import machine_spec as module
from patrickstar._perf_model.machine_spec import Gpu, Host, Links, find_machine, read_machine, write_machine
from patrickstar.errors import ConfigError

given = fixed_draws(100)

COMPLETE = """
name = "test"
source = "invented"
[gpu]
count = 2
memory = "16GiB"
matmul_tflops = 50
memory_bandwidth = "500GB"
[host]
memory = "64GB"
memory_bandwidth = "50GB"
cores = 8
[links]
h2d = "12GB"
d2h = "11GB"
gpu_gpu = "40GB"
[disk]
capacity = "1TB"
read = "3GB"
write = "2GB"
[network]
bandwidth = "25GB"
latency_s = 5e-6
"""

rates = st.floats(1e6, 1e12)
counts = st.integers(1, 64)


def read(tmp_path, text):
    path = tmp_path / "machine.toml"
    path.write_text(text)
    return read_machine(path)


@pytest.mark.parametrize("name", module.known_machines())
def test_packaged_specs_are_complete_and_cite_their_sources(name):
    machine = find_machine(name)
    assert machine.name == name
    assert len(machine.source) > 50


def test_the_variant_differs_only_in_host_memory():
    whole, half = find_machine("8xV100-32GB"), find_machine("8xV100-32GB-120GB")
    assert half.host.memory * 2 == whole.host.memory
    same = {"name": whole.name, "source": whole.source, "host": whole.host}
    assert half.model_copy(update=same) == whole


def test_angel_ptms_server_differs_only_in_its_disk_and_network():
    plain, server = find_machine("8xA100-40GB"), find_machine("8xA100-40GB-11TB")
    assert server.disk is not None and server.disk.capacity == 11e12
    assert server.disk.read == server.disk.write == 3.5e9
    assert server.network is not None and server.network.bandwidth < 16 * 12.5e9
    same = {"name": plain.name, "source": plain.source, "disk": None, "network": None}
    assert server.model_copy(update=same) == plain


def test_the_gpus_of_a_dgx_2_share_its_links_by_four():
    machine = find_machine("DGX-2")
    assert machine.gpu == find_machine("8xV100-32GB").gpu.model_copy(update={"count": 16})
    assert machine.transfer_rates(1) == (12.2e9, 12.9e9)
    assert machine.transfer_rates(16) == (12.9e9 / 4, 12.9e9 / 4)


def test_a_user_file_is_read(tmp_path):
    machine = read(tmp_path, COMPLETE)
    assert machine.gpu is not None and machine.links is not None and machine.disk is not None
    assert machine.gpu.memory == 16 * 1024**3
    assert machine.links.h2d == 12e9
    assert find_machine(str(tmp_path / "machine.toml")) == machine
    write_machine(machine.model_copy(update={"measured": True, "budgets": True}), tmp_path / "written.toml")
    read_back = read_machine(tmp_path / "written.toml")
    assert read_back == machine.model_copy(update={"budgets": True}), "not of this computer"
    with pytest.raises(ConfigError, match=r"written\.toml/machine\.toml cannot be written: File exists"):
        write_machine(machine, tmp_path / "written.toml" / "machine.toml")


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('h2d = "12GB"', "", "links.h2d"),
        ('h2d = "12GB"', "h2d = -1.0", "links.h2d"),
        ('h2d = "12GB"', 'h2d = "fast"', "links.h2d"),
        ('d2h = "11GB"', "d2h = 0", "links.d2h"),
        ('gpu_gpu = "40GB"', "", "links.gpu_gpu"),
        ("matmul_tflops = 50", "matmul_tflops = 0", "gpu.matmul_tflops"),
        ("matmul_tflops = 50", "matmul_tflops = 50\nhalf_rate_size = -1", "gpu.half_rate_size"),
        ("count = 2", "count = 0", "gpu.count"),
        ('memory = "64GB"', 'memory = "0GB"', "host.memory"),
        ("cores = 8", "", "host.cores"),
        ("cores = 8", "cores = 8\nsockets = 0", "host.sockets"),
        ("cores = 8", "cores = 8\ncore_bandwidth = 0", "host.core_bandwidth"),
        ("cores = 8", "cores = 8\npage_lock = -2", "host.page_lock"),
        ("cores = 8", "cores = 8\ncolour = 1", "host.colour"),
        ('write = "2GB"', "", "disk.write"),
        ('bandwidth = "25GB"', "", "network.bandwidth"),
        ("latency_s = 5e-6", "", "network.latency_s"),
        ("latency_s = 5e-6", "latency_s = -1", "network.latency_s"),
        ('name = "test"', "", "name"),
        ('[links]\nh2d = "12GB"\nd2h = "11GB"\ngpu_gpu = "40GB"', "", "links"),
        (COMPLETE[COMPLETE.index("[gpu]") : COMPLETE.index("[host]")], "", "host.matmul_tflops"),
    ],
)
def test_an_error_names_the_file_and_the_field(tmp_path, old, new, field):
    assert old in COMPLETE
    with pytest.raises(ConfigError, match=rf"machine\.toml: {re.escape(field)}: "):
        read(tmp_path, COMPLETE.replace(old, new))


def test_invalid_toml_and_missing_files_raise(tmp_path):
    with pytest.raises(ConfigError, match="is not valid TOML"):
        read(tmp_path, "name =")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_machine(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("name", "near"), [("8xV100", "8xV100-32GB"), ("h200", "H200"), ("4090", "RTX4090-desktop"), ("zzz", "H200")]
)
def test_an_unknown_machine_lists_the_nearest_names(name, near):
    with pytest.raises(ConfigError, match=f"{name!r} is neither a known machine.*{near}"):
        find_machine(name)


@given(st.integers(1, 20_000), st.integers(0, 2000))
def test_products_of_half_rate_size_reach_half(size, half):
    gpu = Gpu(count=1, memory=1, matmul_tflops=100, memory_bandwidth=1, half_rate_size=half)
    assert gpu.matmul_rate(half or 1) == (50e12 if half else 100e12)
    assert gpu.matmul_rate(size) <= gpu.matmul_rate(size + 1) <= 100e12


@given(rates, rates, counts, counts, counts)
def test_updates_are_limited_by_cores_and_memory(memory_rate, core_rate, sockets, processes, threads):
    host = Host(memory=1, memory_bandwidth=memory_rate, cores=64, sockets=sockets, core_bandwidth=core_rate)
    rate = host.update_bandwidth(processes, threads)
    assert rate <= memory_rate and rate <= processes * threads * core_rate
    assert rate <= host.update_bandwidth(processes + 1, threads)
    assert rate <= host.update_bandwidth(processes, threads + 1)
    plain = Host(memory=1, memory_bandwidth=memory_rate, cores=64)
    assert plain.update_bandwidth(processes, threads) == memory_rate


@given(rates, rates, counts, counts)
def test_gpus_on_one_link_share_its_bandwidth(h2d, d2h, shared_by, gpus):
    links = Links(h2d=h2d, d2h=d2h, shared_by=shared_by)
    busy = min(gpus, shared_by)
    for own, rate in ((h2d, links.h2d_per_gpu(gpus)), (d2h, links.d2h_per_gpu(gpus))):
        assert rate <= own and busy * rate <= max(h2d, d2h) * (1 + 1e-9)
        assert rate == own or gpus > 1 < shared_by


def test_a_process_has_a_part_of_a_machine():
    assert CPU.share(1) is CPU
    part = CPU.model_copy(update={"links": Links(h2d=60, d2h=40)}).share(2)
    assert (part.host.memory, part.host.memory_bandwidth, part.host.matmul_tflops) == (1 << 30, 400, 0.5)
    assert part.host.update_bandwidth(1, 2) == CPU.host.update_bandwidth(2, 2) / 2
    assert part.transfer_rates(1) == (30, 20), "its cores copy"
    sockets = Host(memory=1, memory_bandwidth=800, cores=4, sockets=2, core_bandwidth=150)
    links, disk = Links(h2d=50, d2h=40, gpu_gpu=100, shared_by=2), module.DiskDrive(capacity=100, read=8, write=4)
    node = NODE.model_copy(update={"host": sockets, "links": links, "disk": disk})
    part = node.share(2)
    assert part.transfer_rates(1) == node.transfer_rates(2) == (25, 25)
    assert part.host.update_bandwidth(1, 9) == node.host.update_bandwidth(2, 2) / 2 == 300
    assert (part.disk.capacity, part.disk.read, part.disk.write) == (100, 4, 2)
    assert part.gpu == node.gpu and part.links.gpu_gpu == 100
