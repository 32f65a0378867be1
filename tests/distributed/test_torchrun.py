"""`torchrun --max-restarts`: examples/restart.py goes on after a kill, under each form of rendezvous.

Tests of this file start new interpreters; test_join.py has restarts of forked processes.
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from . import ranks
from .restarts import agent_store

SCRIPT = Path(__file__).parents[2] / "examples" / "restart.py"
STEPS = 24
KILLED_IN = 12
"""Step after which a process is killed. The checkpoint of step 10 is complete, or the one of step 5 if not."""


def words(folder, *more):
    return ["--folder", str(folder), "--steps", str(STEPS), "--pause", "0", *map(str, more)]


class Agent:
    """torchrun with the example, and what it has printed."""

    def __init__(self, folder: Path, *options: object, pause: float = 0.05, **env: str) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", *map(str, options), str(SCRIPT)]
        command += words(folder, "--pause", pause)
        env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | env
        with tempfile.NamedTemporaryFile(dir=folder.parent, delete=False) as log:
            self._log = Path(log.name)
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)

    @property
    def text(self) -> str:
        return self._log.read_text()

    def find(self, pattern: str) -> list[str]:
        """Return the groups of all matches."""
        return re.findall(pattern, self.text)

    def processes(self) -> list[int]:
        """Return the IDs of the training processes that it has started last, by local rank."""
        return [int(pid) for pid in self.find(r"is process (\d+)")][-2:]

    def end(self, code: int = 0) -> None:
        """Wait for the end, and compare the exit code."""
        try:
            assert self.process.wait(ranks.WITHIN_S) == code, self.text
        finally:
            self.process.kill()
            self.process.wait()


def wait_for_one(agents: list[Agent], pattern: str) -> list[Agent]:
    """Wait until one agent has printed a line that matches; return it."""
    deadline = time.monotonic() + ranks.WITHIN_S
    while not (found := [agent for agent in agents if agent.find(pattern)]):
        run = any(agent.process.poll() is None for agent in agents)
        assert run and time.monotonic() < deadline, "\n\n".join(agent.text for agent in agents)
        time.sleep(0.01)
    return found


def example(arguments: list[str]) -> None:
    """Run the example; runs in each process."""
    spec = importlib.util.spec_from_file_location("restart", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(arguments)


def without_kills(folder, size, *more):
    """Return what the example prints in forked processes."""
    return "".join(ended.text for ended in ranks.run(size, example, arguments=words(folder, *more)))


def check_same_run(killed: str, expected: str, first: int = 1) -> None:
    """Assert that the steps from `first` on have the same losses, and the parameters at the end are the same."""
    steps = [(int(step), loss) for step, loss in re.findall(r"step (\d+)  loss (\S+)", killed)]
    losses = {int(step): loss for step, loss in re.findall(r"step (\d+)  loss (\S+)", expected)}
    for step, loss in steps:
        assert losses[step] == loss, f"step {step}"
    assert {step for step, _ in steps} == set(range(first, STEPS + 1))
    finished = r"finished, parameters (\w{16})"
    assert re.findall(finished, killed) == re.findall(finished, expected)[-1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "victim"),
    [
        (["--standalone"], 1),
        (["--standalone"], 0),
        (["--rdzv-backend", "static", "--master-addr", "127.0.0.1", "--master-port"], 1),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint"], 1),
    ],
)
def test_a_process_is_killed(options, victim, tmp_path):
    if options[-1] == "--master-port":
        options = [*options, ranks.free_port()]
    elif options[-1] == "--rdzv-endpoint":
        options = [*options, f"127.0.0.1:{ranks.free_port()}"]
    agent = Agent(tmp_path / "killed", *options, "--nproc-per-node", 2, "--max-restarts", 2)
    wait_for_one([agent], rf"step {KILLED_IN} ")
    os.kill(agent.processes()[victim], signal.SIGKILL)
    agent.end()
    assert len(agent.find(r"resumed from step (?:5|10)\b")) == 1, agent.text
    assert len(agent.find("is process")) == 4, "finished processes were restarted"
    check_same_run(agent.text, without_kills(tmp_path / "expected", 2))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_process_of_one_of_two_agents_is_killed(backend, tmp_path):
    endpoint = f"127.0.0.1:{ranks.free_port()}"
    options = ["--nnodes", 2, "--nproc-per-node", 2, "--max-restarts", 3, "--rdzv-backend", backend]
    options += ["--rdzv-endpoint", endpoint]
    agents = [Agent(tmp_path / "killed", *options, "--node-rank", rank) for rank in range(2)]
    (first,) = wait_for_one(agents, rf"step {KILLED_IN} ")
    other = agents[1 - agents.index(first)]
    os.kill(other.processes()[0], signal.SIGKILL)
    for agent in agents:
        agent.end()
    check_same_run("\n".join(agent.text for agent in agents), without_kills(tmp_path / "expected", 4))


@pytest.fixture
def elastic():
    """Provide torchrun's options for one or two agents. The test hosts the rendezvous, which must not be lost."""
    options = ["--nnodes", "1:2", "--nproc-per-node", 2, "--max-restarts", 3, "--rdzv-backend", "c10d"]
    with agent_store() as port:
        options += ["--rdzv-endpoint", f"127.0.0.1:{port}"]
        yield [*options, "--rdzv-conf", "is_host=0,last_call_timeout=5,keep_alive_interval=2"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_agents_is_killed(victim, elastic, tmp_path):
    agents = [Agent(tmp_path / "killed", *elastic) for _ in range(2)]
    (first,) = wait_for_one(agents, rf"step {KILLED_IN} ")
    lost = first if victim == 0 else agents[1 - agents.index(first)]
    rest = agents[1 - agents.index(lost)]
    lost.process.kill()
    for pid in lost.processes():
        os.kill(pid, signal.SIGKILL)
    rest.end()
    lost.end(-signal.SIGKILL)
    resumed = int(rest.find(r"resumed from step (\d+)")[-1])
    assert rest.find(r"rank \d of 2 is process"), rest.text
    without_kills(tmp_path / "expected", 4, "--steps", resumed)
    expected = without_kills(tmp_path / "expected", 2)
    check_same_run(rest.text.rpartition("resumed from")[2], expected, resumed + 1)


@pytest.mark.slow
def test_an_agent_is_added(elastic, tmp_path):
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # without it the agents of PyTorch 2.13 wait for each other
    agents = [Agent(tmp_path / "grown", *elastic, pause=1, **env)]
    wait_for_one(agents, "step 7 ")  # after the first checkpoint
    agents.append(Agent(tmp_path / "grown", *elastic, pause=0, **env))
    for agent in agents:
        agent.end()
    text = "\n".join(agent.text for agent in agents)
    resumed = int(re.findall(r"resumed from step (\d+)", text)[-1])
    assert re.findall(r"rank \d of 4 is process", text), text
    without_kills(tmp_path / "expected", 2, "--steps", resumed)
    expected = without_kills(tmp_path / "expected", 4)
    check_same_run(text.rpartition("resumed from")[2], expected, resumed + 1)
