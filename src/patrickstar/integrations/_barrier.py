"""Barrier in which a process goes on serving the others."""

from patrickstar._engine.engine import Engine


def barrier(engine: Engine | None) -> None:
    """Wait for the other processes of an engine, if there are any, and serve their requests meanwhile.

    A process that waits in a collective of another library can't serve requests for its shards of parameters.
    """
    if engine is not None and engine.world.size > 1:
        engine.average(0.0)
