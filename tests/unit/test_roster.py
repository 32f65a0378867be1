"""Agreement on a roster in a store that has entries of earlier processes, some of which still run."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from sampling import draws

from patrickstar._distributed.group_creation import store_barrier
from patrickstar._distributed.roster import LISTED_RANKS, RosterAgreement, format_ranks, group_prefix
from patrickstar.errors import PeerError

WITHIN_S = 30.0


@pytest.fixture(params=["hash", "file"])
def store(request, tmp_path):
    return dist.HashStore() if request.param == "hash" else dist.FileStore(str(tmp_path / "store"), -1)


def agree(store, size, late=()):
    """Let processes agree, as threads; those in `late` start when all others wait. Return the agreements, by rank."""
    agreements = [RosterAgreement(store, rank, size) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        on_time = [rank for rank in range(size) if rank not in late]
        waiting = [threads.submit(agreements[rank].agree, WITHIN_S) for rank in on_time]
        listed = dist.PrefixStore("patrickstar/agreement", store)
        while late and not all(listed.check([f"member/{rank}"]) for rank in on_time):
            time.sleep(0.001)
        assert not late or not any(future.done() for future in waiting)
        waiting += [threads.submit(agreements[rank].agree, WITHIN_S) for rank in late]
        for future in waiting:
            future.result()
    return agreements


def check_same_group(agreements, names):
    """Assert that all processes have the same group, which no earlier processes had."""
    stores = [agreement.group_store for agreement in agreements]
    assert not stores[0].check(["seen"])
    stores[0].set("seen", "")
    assert all(each.check(["seen"]) for each in stores)
    name = agreements[0]._name
    assert name not in names
    names.add(name)


@pytest.mark.parametrize("sizes", [[2, 2, 2], [4, 2, 4], [2, 1, 3]])
def test_each_generation_has_its_own_group(store, sizes):
    names = set()
    for size in sizes:
        check_same_group(agree(store, size), names)


@pytest.mark.parametrize("late", [[0], [2], [1, 2]])
def test_processes_that_join_late(store, late):
    names = set()
    check_same_group(agree(store, 3, late), names)
    check_same_group(agree(store, 3), names)


def test_a_process_that_ends_after_its_acknowledgement(store):
    first, ended, last = (RosterAgreement(store, rank, 3) for rank in range(3))
    agree(store, 3)  # entries of an earlier generation
    first.start()
    ended.start()
    assert not first.advance()  # publishes a roster with the earlier process of rank 2
    assert not ended.advance()
    successor = RosterAgreement(store, 1, 3)
    successor.start()
    last.start()
    live = [first, successor, last]
    for _ in range(3):
        concluded = [each.advance() for each in live]
    assert all(concluded)
    check_same_group(live, {ended._name})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_left_over_ends(store, rank):
    left_over = RosterAgreement(store, rank, 2)
    left_over.start()
    left_over.advance()
    check_same_group(agree(store, 2), set())
    with pytest.raises(PeerError, match=f"another process has joined as rank {rank} since"):
        left_over.advance()


def test_ranks_that_do_not_join_are_named(store):
    with pytest.raises(PeerError, match=r"rank 0 has waited 0.1 s, and ranks 1, 2 of 3 processes did not join"):
        RosterAgreement(store, 0, 3).agree(0.1)
    with pytest.raises(PeerError, match=r"rank 1 has waited 0.1 s, and rank 2 of 3 processes did not join"):
        RosterAgreement(store, 1, 3).agree(0.1)
    agree(store, 3)
    with pytest.raises(PeerError, match=r"rank 0 has waited 0.1 s, and ranks 1, 2 of 3"):
        RosterAgreement(store, 0, 3).agree(0.1)
    with pytest.raises(PeerError, match=r"rank 1 has waited 0.1 s, and rank 0 of 3"):
        RosterAgreement(store, 1, 3).agree(0.1)


def test_messages_list_a_few_ranks():
    assert format_ranks([3]) == "rank 3"
    assert format_ranks(range(LISTED_RANKS + 5)).endswith(f"{LISTED_RANKS - 1} and 5 more")


def test_keys_do_not_accumulate(store):
    counts = set()
    for _ in range(4):
        agreements = agree(store, 3)
        for rank, agreement in enumerate(agreements):
            agreement.group_store.set(f"address/{rank}", "")
        agreements[0].delete_earlier()
        counts.add(store.num_keys())
        assert all(agreements[0].group_store.check([f"address/{rank}"]) for rank in range(3))
    assert len(counts) == 1


def test_any_order_of_starts_and_kills_ends_in_one_roster():
    for seed in range(draws(400)):
        draw = random.Random(seed)
        store, names = dist.HashStore(), set()
        for _ in range(draw.randint(1, 3)):
            size = draw.randint(1, 4)
            live = {}
            for _ in range(draw.randint(0, 30)):
                rank = draw.randrange(size)
                if rank not in live or draw.random() < 0.2:  # the process that was there is killed
                    live[rank] = RosterAgreement(store, rank, size)
                    live[rank].start()
                elif len(live) < size or rank:  # once all are there, rank 0 waits: nobody is killed after a conclusion
                    live[rank].advance()
            for rank in set(range(size)) - set(live):
                live[rank] = RosterAgreement(store, rank, size)
                live[rank].start()
            order = list(range(size))
            for _ in range(4):
                draw.shuffle(order)
                concluded = [live[rank].advance() for rank in order]
            assert all(concluded), f"seed {seed}"
            check_same_group([live[rank] for rank in range(size)], names)


def barrier(store, rank, size, timeout_s=WITHIN_S):
    store_barrier(group_prefix(store), rank, size, timeout_s)


def test_a_barrier_waits_for_all(store):
    agreements = agree(store, 2)
    waiting = threading.Thread(target=barrier, args=(agreements[0].group_store, 0, 2))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    barrier(agreements[1].group_store, 1, 2)
    waiting.join(WITHIN_S)
    assert not waiting.is_alive()
    with pytest.raises(PeerError, match=r"rank 0 has waited 0.1 s for rank 1, which did not create an engine"):
        barrier(agreements[0].group_store, 0, 2, 0.1)


def test_a_barrier_ends_when_a_process_was_restarted(store):
    agreements = agree(store, 2)
    RosterAgreement(store, 1, 2).start()
    with pytest.raises(PeerError, match=r"rank 1 ended and was restarted while rank 0 waited for it"):
        barrier(agreements[0].group_store, 0, 2)


def test_a_group_of_the_script_has_no_barrier(store):
    barrier(store, 0, 2)
