"""The command as a user meets it: exit codes, messages, and no traceback unless asked for; `patrickstar doctor`.

What can be answered without PyTorch is, since that takes seconds to load.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from command_line import assert_refused, call, done

import patrickstar
from patrickstar._cli import doctor
from patrickstar._kernels.cpp_backend import CppBackend, Unavailable
from patrickstar._kernels.eager_backend import EagerBackend
from patrickstar._perf_model.machine_spec import Host, Machine, find_machine
from patrickstar.errors import BudgetError

pytestmark = pytest.mark.usefixtures("small_text")

train = partial(call, "train", "--device", "cpu")
TINY = ("--data", "text.py", "--model", "model.json", "--sequence", 16)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an interpreter of its own."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


REFUSED = {
    "no precision": (["--precision", "bf17"], ["--precision"]),
    "no device": (["--device", "tpu"], ["--device"]),
    "a sequence too long": (["--data", "text.py", "--sequence", 1025], ["1024 or less instead of 1025"]),
    "no log": ([*TINY, "--log", "text.py/log.jsonl"], ["text.py/log.jsonl", "choose another path"]),
    "a budget too small": (
        [*TINY, "--device-memory", "1KiB"],
        ["device budget of 1.00 KiB", "Each of these alone is enough", "--device-memory "],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_is_named(case: str) -> None:
    arguments, parts = REFUSED[case]
    assert_refused(train(*arguments), *parts)


def test_too_little_text_is_told() -> None:
    Path("text.py").write_text("no")
    assert_refused(train(*TINY), "less than one sequence of 16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_device_that_is_not_there_is_told() -> None:
    assert_refused(call("train", "--data", "text.py", "--device", "cuda"), "'cuda' is not available")


def test_a_traceback_shows_when_it_is_asked_for() -> None:
    result = train("--model", "gpt-1m", "--data", "nowhere", "--traceback")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "refuse_missing_text" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (BudgetError("too small"), 2, "error: too small\n"),
        (ValueError("odd"), 1, "internal error: ValueError: odd; this is a bug, --traceback shows where\n"),
        (KeyboardInterrupt(), 130, "interrupted before the first step was done\n"),
    ],
)
def test_every_error_is_one_line(monkeypatch, error: BaseException, code: int, message: str) -> None:
    monkeypatch.setattr("patrickstar._cli.train.train", Mock(side_effect=error))
    result = train()
    assert (result.exit_code, result.stderr, result.stdout) == (code, message, "")


def test_without_its_libraries_the_command_says_what_to_install() -> None:
    process = python("-c", "import sys; sys.modules['typer'] = None; from patrickstar.__main__ import main; main()")
    assert process.returncode == 1
    assert process.stderr == "the command line needs typer: pip install '.[cli]' in the clone of PatrickStar\n"


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

WITHOUT_PYTORCH = {
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
    plans = ["plan --model gpt-1b --gpu rtx4060 --no-dry-run", "plan --gpu rtx4060 --host-memory 16GB --qlora 8"]
    lines = ["--version", "--help", "train --help", *WITHOUT_PYTORCH, *plans]
    process = python("-c", PROGRAM, *lines)
    codes = dict(line.split(": exit code ") for line in process.stdout.splitlines() if ": exit code " in line)
    assert codes == {line: "2" if line in WITHOUT_PYTORCH else "0" for line in lines}
    assert process.stdout.splitlines()[-1] == "[]"
    assert "Traceback" not in process.stderr
    for text in WITHOUT_PYTORCH.values():
        assert text in process.stderr
    for text in (f"patrickstar {patrickstar.__version__}\n", "--no-activation-checkpointing", "QLoRA, rank 8"):
        assert text in process.stdout


# The doctor


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(doctor, "examine", partial(doctor.examine, trial_numel=100_000))


def test_every_finding_has_its_line_and_the_kernel_names_its_instruction_sets():
    text = done("doctor").stdout
    names = [line[:16].strip() for line in text.splitlines()]
    memory, rates = ["memory", "memory speed"], ["update speed", "products"]
    for name in ("patrickstar", "processor", "C++ kernel", "Triton kernel", *memory, *rates):
        assert names.count(name) == 1
    if CppBackend.find() is not None:  # it was installed with a C++ compiler
        assert all(variant in text for variant in CppBackend.find().variants())
        assert "->" not in text.split("Triton kernel")[0]


@pytest.mark.parametrize(
    ("cache", "said"),
    [("write back", "if the drive obeys"), ("write through", "protection"), (None, "not say"), ("odd", "cache 'odd'")],
)
def test_a_flush_is_timed_and_what_the_kernel_says_of_the_cache_is_explained(tmp_path, monkeypatch, cache, said):
    assert doctor.write_cache(tmp_path) in (None, "write back", "write through")
    monkeypatch.setattr(doctor, "write_cache", lambda directory: cache)
    text = doctor._flush(tmp_path).text
    assert float(text.split()[1]) >= 0 and " ms after a write of 4 KiB; " in text and said in text


def test_a_machine_file_has_what_was_measured_and_plans_leave_it_as_it_is(tmp_path, monkeypatch):
    host = Host(memory=5 * 10**9, memory_bandwidth=2e10, cores=2, matmul_tflops=0.1)
    measured = Machine(name="here", source="a test", host=host, budgets=True, measured=True)
    monkeypatch.setattr(doctor, "profile_machine", lambda device, disk: measured)
    path = tmp_path / "this.toml"
    text = done("doctor", "--machine", str(path)).stdout
    assert f"`patrickstar plan --machine {path}` plans for this machine; add --disk" in " ".join(text.split())
    written = find_machine(str(path))
    assert written.host == host and written.budgets and not written.measured and "5.0 GB of RAM" in written.name
    plan = done("plan", "--model", "gpt-1m", "--machine", str(path), "--no-dry-run").stdout
    assert "4.66 GiB" in plan and "margins" not in plan
    assert_refused(call("doctor", "--machine", "/proc/this.toml"), "--machine: /proc can't be written")


@pytest.mark.parametrize(
    ("rates", "advice"),
    [
        ((100e9, 400e9, 8e9), "train in bf16 on this CPU, as precision='auto' does for a model of these widths; fp16"),
        ((58e9, 0.7e9, 0.9e9), "train in fp32 on this CPU, as precision='auto' does for a model of these widths; bf16"),
    ],
)
def test_products_are_compared_by_precision(monkeypatch, rates, advice):
    measured = dict(zip(("fp32", "bf16", "fp16"), rates, strict=True))
    monkeypatch.setattr(doctor, "product_rate", lambda precision, *widths: measured[precision])
    finding = doctor._products()
    assert f"fp32 at {rates[0] / 1e9:.0f} GFLOPS, bf16 at " in finding.text
    assert advice in finding.advice


def test_without_the_kernel_it_says_why_and_what_to_do(monkeypatch):
    monkeypatch.setattr(doctor.CppBackend, "load", Mock(side_effect=Unavailable("it was not built: install it again")))
    text = done("doctor").stdout
    assert "not available. Updates on the host use PyTorch's operators" in text
    assert "-> it was not built: install it again" in text
    assert f"by {EagerBackend.name}" in text


def test_a_gpu_where_triton_does_not_work_is_told(monkeypatch):
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor.TritonBackend, "load", Mock(side_effect=Unavailable("pip install triton")))
    assert "pip install triton" in done("doctor").stdout
