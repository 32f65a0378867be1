"""`ps.join`: processes that are restarted, with a store that has entries of the earlier ones."""

import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from toys import layers, mean_square

import patrickstar as ps
from patrickstar._distributed.process_group import World
from patrickstar._distributed.roster import RosterAgreement
from patrickstar.errors import ConfigError, PeerError

from . import ranks
from .restarts import agent_store, environment, losses, run, start, train

STEPS = 6


@pytest.fixture
def folders(tmp_path):
    made = tmp_path / "killed", tmp_path / "expected"
    for folder in made:
        folder.mkdir()
    return made


def check_same_run(folders):
    killed, expected = folders
    assert (killed / "end").read_text() == (expected / "end").read_text()
    assert losses(killed) == losses(expected)


def options(folder, steps=STEPS, die_at=0):
    return {"folder": str(folder), "steps": steps, "die_at": die_at}


def test_a_run_goes_on_after_a_kill(folders):
    killed, expected = folders
    with agent_store() as port:
        first = start(port, 2, train, options(killed, die_at=4))
        first[1].wait(ranks.WITHIN_S)
        # The agent of the other machine starts its process at once, while rank 0 finds out.
        second = start(port, 2, train, options(killed), [1])
        ended = ranks.wait(first)
        ranks.check_ended(ended, [1, -signal.SIGKILL])
        assert "PeerError: rank 1 (process" in ended[0].text
        ranks.check_ended(ranks.wait([*start(port, 2, train, options(killed), [0]), *second]), [0, 0])
    ranks.run(2, train, **options(expected))
    check_same_run(folders)


def test_a_run_goes_on_with_fewer_processes(folders):
    killed, expected = folders
    with agent_store() as port:
        ended = ranks.wait(start(port, 3, train, options(killed, die_at=4)))
        ranks.check_ended(ended, [1, 1, -signal.SIGKILL])
        run(port, 2, train, options(killed))
        run(port, 3, train, options(expected, steps=2))
        run(port, 2, train, options(expected))
    earlier = (killed / "losses").read_text().splitlines()
    assert earlier.pop(2).startswith("3 "), "a step that was repeated by two processes"
    (killed / "losses").write_text("\n".join(earlier))
    check_same_run(folders)


def join_and_die_before_the_engine(last_words: str) -> None:
    """End rank 1 between the two calls; runs in each process."""
    ps.join()
    if dist.get_rank() == 1 and last_words:
        ranks.die()
    ps.initialize(lambda: layers(4, 1), ps.Config(device="cpu"))


def test_a_process_ends_before_the_engine_is_created():
    with agent_store() as port:
        first = start(port, 2, join_and_die_before_the_engine, {"last_words": "yes"})
        first[1].wait(ranks.WITHIN_S)
        second = start(port, 2, join_and_die_before_the_engine, {"last_words": ""}, [1])
        ended = ranks.wait(first)
        ranks.check_ended(ended, [1, -signal.SIGKILL])
        assert "PeerError: rank 1 ended and was restarted while rank 0 waited for it" in ended[0].text
        second += start(port, 2, join_and_die_before_the_engine, {"last_words": ""}, [0])
        ranks.check_ended(ranks.wait(second), [0, 0])


def join_alone(rank: int, timeout: float) -> None:
    """Join without the others; runs in one process of several."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3"}
    ps.join(timeout)


@pytest.mark.parametrize(
    ("rank", "error"),
    [
        (0, "PeerError: rank 0 has waited 1 s, and ranks 1, 2 of 3 processes did not join"),
        (1, "ConfigError: RANK and WORLD_SIZE say that this is one of 3 processes, but it can't join the others"),
    ],
)
def test_others_that_do_not_join_in_time(rank, error):
    (ended,) = ranks.wait(ranks.start(1, join_alone, {"rank": rank, "timeout": 1.0}))
    assert ended.code == 1 and error in ended.text, ended.text


def several_calls(first: str) -> None:
    """Join twice, after the script's own call or without; runs in each process."""
    if first == "init_process_group":
        dist.init_process_group("gloo")
    ps.join()
    group = dist.group.WORLD
    ps.join()
    assert dist.group.WORLD is group
    engine, optimizer = ps.initialize(lambda: layers(4, 2), ps.Config(device="cpu"))
    assert engine.world.size == dist.get_world_size() == int(os.environ["WORLD_SIZE"])
    engine.backward(mean_square(engine(torch.ones(2, 4))))
    optimizer.step()
    engine.close()
    if first == "init_process_group":
        dist.destroy_process_group()


@pytest.mark.parametrize("first", ["join", "init_process_group"])
def test_joining_twice(first):
    ranks.run(2, several_calls, first=first)
    ranks.run(1, several_calls, first=first)


@ranks.in_processes(1)
def test_one_process_without_a_launcher():
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        del os.environ[name]
    ps.join()
    assert dist.get_world_size() == 1 and dist.get_rank() == 0
    dist.all_reduce(torch.ones(1))
    assert World.find(torch.device("cpu")).size == 1
    with ps.initialize(lambda: layers(4, 2), ps.Config(device="cpu")) as (engine, optimizer):
        engine.backward(mean_square(engine(torch.ones(2, 4))))
        optimizer.step()


@ranks.in_processes(1)
def test_variables_that_can_not_be_used():
    with pytest.raises(ConfigError, match="timeout=0"):
        ps.join(0)
    for rank, size in (("2", "2"), ("-1", "2"), ("one", "2"), ("0", "many")):
        os.environ |= {"RANK": rank, "WORLD_SIZE": size}
        with pytest.raises(ConfigError, match=f"RANK is '{rank}' and WORLD_SIZE '{size}'"):
            ps.join()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "none"}
    with pytest.raises(ConfigError, match="one of 2 processes, but it can't join the others"):
        ps.join()
    assert not dist.is_initialized()


def leave_open() -> None:
    """End with an open engine, and without a call that destroys the process group; runs in each process."""
    ps.join()
    engine, optimizer = ps.initialize(lambda: layers(4, 2), ps.Config(device="cpu"))
    engine.backward(mean_square(engine(torch.ones(2, 4))))
    optimizer.step()
    sys.modules[__name__].engine = engine


def test_a_finished_script_ends_with_code_0():
    # One is a new interpreter, since forked ranks do not end as a script does.
    ranks.end(2, leave_open, [0, 0], interpreters=1)


def connect_to_a_process_that_ended() -> None:
    """Join with a process that acknowledges the roster, ends and is restarted; runs in rank 0."""

    def join_and_end() -> None:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
        RosterAgreement(store, 1, 2).agree(ranks.WITHIN_S)
        time.sleep(0.5)
        RosterAgreement(store, 1, 2).start()

    other = threading.Thread(target=join_and_end)
    other.start()
    with pytest.raises(PeerError, match=r"rank 1 ended and was restarted while rank 0 waited for it"):
        ps.join()
    other.join()
    assert not dist.is_initialized()


def test_a_process_ends_before_the_others_connect():
    with agent_store() as port:
        ranks.end(1, connect_to_a_process_that_ended, [0], env=[environment(0, 2)], port=port)
