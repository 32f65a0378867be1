"""When things move: a trace goes in, decisions come out. Pure Python, imports no torch."""
