"""Two agents that restart their processes, each by itself, while processes are killed at random moments."""

import os
import random
import signal
import threading
import time

import pytest

from . import ranks
from .restarts import agent_store, losses, start, train

STEPS = 200
KILLS = 20
LAST_STEPS = 20


class Agent(threading.Thread):
    """Starts its ranks, and restarts them when one has ended with an error, as torchrun's agent does."""

    def __init__(self, port, size, chosen, options):
        super().__init__(daemon=True)
        self.arguments = (port, size, train, options, chosen)
        self.processes = []
        self.finished = False

    def run(self):
        while not self.finished:
            self.processes = start(*self.arguments)
            while not self.finished and all(process.poll() in (None, 0) for process in self.processes):
                self.finished = all(process.poll() == 0 for process in self.processes)
                time.sleep(0.02)
            for process in self.processes:
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGTERM)
            ranks.wait(self.processes, 60)


def nearly_done(folder) -> bool:
    """Return whether fewer than `LAST_STEPS` are left."""
    path = folder / "losses"
    return path.exists() and max(losses(folder), default=0) > STEPS - LAST_STEPS


@pytest.mark.slow
@pytest.mark.parametrize("per_agent", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_random_kills(seed, per_agent, tmp_path):
    draw, size = random.Random(seed), 2 * per_agent
    killed, expected = tmp_path / "killed", tmp_path / "expected"
    for folder in (killed, expected):
        folder.mkdir()
    ranks.run(size, train, folder=str(expected), steps=STEPS)
    with agent_store() as port:
        chosen = [list(range(per_agent)), list(range(per_agent, size))]
        agents = [Agent(port, size, each, {"folder": str(killed), "steps": STEPS}) for each in chosen]
        for agent in agents:
            agent.start()
        kills = 0
        while kills < KILLS and not all(agent.finished for agent in agents):
            # Half of the kills are a moment after the last one, while processes start.
            time.sleep(draw.uniform(0, draw.choice([0.6, 3])))
            processes = draw.choice(agents).processes
            victim = draw.choice(processes) if processes else None
            # A process that is killed after another has ended would wait for it in vain: the run is over.
            if victim is not None and victim.poll() is None and not nearly_done(killed):
                victim.kill()
                kills += 1
        for agent in agents:
            agent.join(ranks.WITHIN_S)
        assert all(agent.finished for agent in agents), f"seed {seed}, {kills} kills: the run does not go on"
    print(f"seed {seed}: {kills} kills")
    assert (killed / "end").read_text() == (expected / "end").read_text(), f"seed {seed}"
    assert losses(killed) == losses(expected), f"seed {seed}"
