"""Two hosts, simulated by processes in separate network namespaces with a link between them."""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest
import torch

import patrickstar as ps
from patrickstar._distributed import process_group

from . import ranks
from .test_faults import SHAPE, ids, step

PORT = 29400
NEW_HOST_NAME = 0x04000000
"""CLONE_NEWUTS of `unshare`: what the process calls itself is its own."""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[dict[str, str]]]:
    """Make two simulated hosts; provide the environment of a process of each."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, and the command ip")
    names = [f"ps{os.getpid()}a", f"ps{os.getpid()}b"]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", "psa", "netns", names[0], "type", "veth", "peer", "name", "psb", "netns", names[1])
            for name, wire, address in zip(names, ("psa", "psb"), ("10.213.0.1/24", "10.213.0.2/24"), strict=True):
                _ip("-n", name, "address", "add", address, "dev", wire)
                _ip("-n", name, "link", "set", wire, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr.decode().strip()}")
        address = {"MASTER_ADDR": "10.213.0.1"}
        yield [address | {"HOST": name, "GLOO_SOCKET_IFNAME": f"ps{name[-1]}"} for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def move_to_host(name: str) -> None:
    """Move this process to a simulated host, with its name and its network."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{name}") as network:
        failed = libc.setns(network.fileno(), 0) or libc.unshare(NEW_HOST_NAME)
    assert not failed, os.strerror(ctypes.get_errno())
    socket.sethostname(name)


def two_hosts(die: bool) -> None:
    """Train for some steps, then kill the second process if `die`; runs in each process."""
    move_to_host(os.environ["HOST"])
    process_group.ALIVE_TIMEOUT_S = 2.0  # rank 0 waits as long for a rank on another host to report
    engine, optimizer = ps.initialize(SHAPE.build, ps.Config(device="cpu", chunk_size=512, host_memory="1MiB"))
    assert engine.world.local_ranks == [engine.world.rank]
    assert engine.host_budget_bytes == 1 << 20, "the other process is on another host"
    for _ in range(2):
        step(engine, optimizer)
    loss = engine.average(engine(ids(engine.world.rank)).item())
    print(f"on {socket.gethostname()}: {loss:.9g}")
    if die and engine.world.rank == 1:
        ranks.die()
    if die:
        step(engine, optimizer)
    engine.close()
    assert all(torch.isfinite(param).all() for param in engine.module.parameters())


@pytest.mark.slow
def test_training_over_two_hosts(hosts):
    ended = ranks.wait(ranks.start(2, two_hosts, {"die": False}, env=hosts, port=PORT))
    ranks.check_ended(ended, [0, 0])
    words = [result.text.splitlines()[-1].split() for result in ended]
    assert words[0][1] != words[1][1] and words[0][2] == words[1][2]


def test_a_process_on_another_host_is_killed(hosts):
    ended = ranks.wait(ranks.start(2, two_hosts, {"die": True}, env=hosts, port=PORT))
    ranks.check_ended(ended, [1, -signal.SIGKILL])
    assert "PeerError: rank 1 (process" in ended[0].text
