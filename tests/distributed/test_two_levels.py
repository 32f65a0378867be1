"""Two levels of transport, in meshes with replicas: exact results, and bytes inside and between replicas."""

import pytest
from sampling import draws

from . import ranks
from .test_exactness import any_budget, branches, everything_evicted

MESHES = [(4, 2), (4, 4), (2, 2)]
"""Numbers of processes and of replicas."""


@pytest.mark.parametrize("size, replicas", MESHES)
def test_everything_evicted_at_every_access(size, replicas):
    ranks.run(size, everything_evicted, seeds=list(range(300, 300 + draws(24 // size))), replicas=replicas)


@pytest.mark.parametrize("size, replicas", MESHES)
def test_any_budget_of_each_process(size, replicas):
    ranks.run(size, any_budget, seeds=list(range(400, 400 + draws(24 // size))), replicas=replicas)


@pytest.mark.parametrize("size, replicas", MESHES)
def test_processes_with_different_loops(size, replicas):
    ranks.run(size, branches, seeds=list(range(500, 500 + draws(24 // size))), replicas=replicas)
