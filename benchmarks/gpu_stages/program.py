"""One program of a call: imports what it needs, waits for its turn, and runs.

python -m gpu_stages.program MODULE:FUNCTION OPTIONS IMPORT..., in benchmarks/. OPTIONS is a JSON object.
"""

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

from gpu_stages.record import READY, Record


def main(target: str, options: str, *imports: str) -> None:
    """Import, wait for a line of the standard input, and run."""
    module, function = target.split(":")
    run = getattr(import_module(module), function)
    missing = [name for name in imports if find_spec(name) is None]
    for name in imports if not missing else ():
        import_module(name)
    print(READY, flush=True)
    if not sys.stdin.readline():
        sys.exit("the input ended: there is no turn")
    if missing:
        Record().fact("left out", f"{missing[0]} is not installed")
    else:
        run(Record(), SimpleNamespace(**json.loads(options)))


if __name__ == "__main__":
    main(*sys.argv[1:])
