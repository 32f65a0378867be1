"""Commands that can answer without PyTorch do so: it takes seconds to load."""

import subprocess
import sys

import pytest

# Runs each list of arguments of the command line; at the end tells whether a library was loaded that takes seconds.
PROGRAM = """
import sys
from patrickstar.__main__ import main

for line in sys.argv[1:]:
    sys.argv = ["patrickstar", *line.split()]
    try:
        main()
    except SystemExit as end:
        print(f"{line}: exit code {end.code}")
print([name for name in ("torch", "transformers", "tokenizers") if name in sys.modules])
"""

REFUSED = {
    "trian": "Did you mean 'train'?",
    "train --stpes 3": "--steps",
    "train --steps 0": "--steps",
    "train --batch -1": "--batch",
    "train --vocab-size 100": "--vocab-size",
    "train --lr fast": "--lr",
    "train --host-memory 2gigs": "--host-memory: '2gigs' is not a size",
    "train --chunk-size 2gigs": "--chunk-size: '2gigs' is not a size",
    "train --model gpt-1n": "did you mean gpt-1m?",
    "train --data nowhere": "error: there is no file or folder nowhere; check --data",
    "train --resume nowhere": "error: nowhere is not a PatrickStar checkpoint: there is no such folder",
    "train --device-memory 2gigs": "error: --device-memory: '2gigs' is not a size",
    "train --model gpt-12b --device cpu --device-memory 3GiB --host-memory 4GiB": ("157.54 GiB of model data"),
    "train --save-every 1 --save-to /dev/null/kept": "error: --save-to: /dev/null can't be written: Not a directory",
    "train --disk /proc": "error: --disk: /proc can't be written",
    "plan --html /dev/null/plan.html": "error: --html: /dev/null can't be written: Not a directory",
    "plan --model gpt-1n": "did you mean gpt-1m",
    "plan --gpu rtx4061": "did you mean rtx4060",
    "plan --machine nowhere": "'nowhere' is neither a known machine nor a file",
    "export nowhere folder": "error: nowhere is not a PatrickStar checkpoint",
    "report nowhere": "error: the log nowhere can't be read",
}


def test_what_can_not_be_is_refused_without_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = ["--version", "--help", "train --help", *REFUSED, "plan --model gpt-1b --gpu rtx4060 --no-dry-run"]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *lines], capture_output=True, text=True, check=True)
    codes = dict(line.split(": exit code ") for line in done.stdout.splitlines() if ": exit code " in line)
    assert codes == {line: "2" if line in REFUSED else "0" for line in lines}
    assert done.stdout.splitlines()[-1] == "[]"
    assert "Traceback" not in done.stderr
    for text in REFUSED.values():
        assert text in done.stderr
