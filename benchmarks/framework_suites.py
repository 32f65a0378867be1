"""Run the frameworks' own tests with PatrickStar's classes in place of theirs: what still passes, and why not the rest.

python benchmarks/framework_suites.py --trl CHECKOUT --accelerate CHECKOUT --lightning CHECKOUT --directory DIR
    [--only PATTERN]
Checkouts are of the repositories, at the versions that are installed or the nearest that exist; their packages are not
used. Each file runs with the framework's classes and with PatrickStar's; tests of TRL that fail run once more in fp32.
`framework_hub.py` writes random tiny models and small datasets under the names that tests load from the hub. Results
that are in DIR already are used again. The table names the folders of the checkouts: let these names have versions.
Needs `pip install parameterized pytest-datadir pytest-rerunfailures jmespath cloudpickle tensorboardX`.
"""

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import framework_hub
from framework_reasons import reason
from report import options, publish, table

HERE = Path(__file__).parent
TRL = [f"tests/test_{name}_trainer.py" for name in ("reward", "kto", "dpo", "sft", "rloo", "grpo")]
ACCELERATE = [f"tests/test_{name}.py" for name in ("accelerator", "optimizer", "state_checkpointing", "examples")]
LIGHTNING = [
    "strategies/test_single_device.py",
    "trainer/optimization/test_optimizers.py",
    "trainer/optimization/test_manual_optimization.py",
    "trainer/optimization/test_multiple_optimizers.py",
    "trainer/optimization/test_backward_calls.py",
    "loops/optimization/test_automatic_loop.py",
    "loops/optimization/test_closure.py",
    "loops/test_training_loop.py",
    "callbacks/test_gradient_accumulation_scheduler.py",
    "callbacks/test_stochastic_weight_avg.py",
    "checkpointing/test_trainer_checkpoint.py",
    "checkpointing/test_checkpoint_callback_frequency.py",
    "models/test_cpu.py",
    "models/test_hooks.py",
    "models/test_restore.py",
]
SUITES = {"trl": TRL, "accelerate": ACCELERATE, "lightning": [f"tests/tests_pytorch/{name}" for name in LIGHTNING]}
"""Files of each framework whose tests train."""
CHOSEN = "not multi_gpu and not Slow and not Vision"
"""Tests that run on a CPU without models of images."""
BF16 = "compares parameters with fp32 ones, or expects an update smaller than their rounding; passes with bf16=False"
"""Reason of a failure that fp32 removes: TRL trains in bf16 by default, and the engine's parameters are then bf16."""


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of the tests of a file by name: "" if it passed, "skipped", or the error."""

    of_tests: dict[str, str]
    trained: int
    """Number of tests that created an engine."""

    @property
    def passed(self) -> set[str]:
        return {name for name, outcome in self.of_tests.items() if outcome == ""}

    @property
    def skipped(self) -> int:
        return sum(outcome == "skipped" for outcome in self.of_tests.values())


def write_folder(framework: str, checkout: Path, folder: Path) -> None:
    """Make a folder with the checkout's files and, beside them, models and datasets of the hub."""
    folder.mkdir(parents=True)
    for file in checkout.resolve().iterdir():
        if file.name not in ("trl", "src", ".git"):  # the installed packages are tested
            (folder / file.name).symlink_to(file)
    if framework == "trl":
        framework_hub.write_trl_models(folder, framework_hub.write_trl_datasets(checkout, folder))
    elif framework == "accelerate":
        framework_hub.write_accelerate_models(checkout, folder)


def outcome_of(case: ElementTree.Element) -> str:
    for tag in ("error", "failure"):
        if (found := case.find(tag)) is not None:
            return f"{found.get('message') or ''}\n{found.text or ''}"
    return "" if case.find("skipped") is None else "skipped"


def run(framework: str, file: str, folder: Path, label: str, tests: Iterable[str] = (), **variables: str) -> Outcomes:
    """Run a file, or some tests of it, in a process of its own with some environment variables."""
    stem = folder.parent / f"{framework}-{Path(file).stem}-{label}"
    results, engines = stem.with_suffix(".xml"), stem.with_suffix(".engines")
    if not results.exists():
        print(f"running {stem.name}", flush=True)
        paths = [str(HERE / "framework_site"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | variables
        environment |= {"FRAMEWORK": framework, "PYTHONPATH": ":".join(filter(None, paths)), "ENGINES": str(engines)}
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder.parent / "cache"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        engines.write_text("")
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--color=no", "-p", "no:cacheprovider"]
        command += ["-k", CHOSEN, f"--junitxml={results}", *(tests or [file])]
        with open(stem.with_suffix(".log"), "w") as log:
            subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    outcomes = {}
    for case in ElementTree.parse(results).iter("testcase"):
        kind = str(case.get("classname")).rpartition(".")[2]
        outcomes[f"{file}::{'' if kind == Path(file).stem else kind + '::'}{case.get('name')}"] = outcome_of(case)
    return Outcomes(outcomes, len(set(engines.read_text().splitlines())))


def compare(framework: str, file: str, folder: Path) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return a row of the table of suites, and the rows of the table of failures."""
    start = partial(run, framework, file, folder)
    own, found = start("own"), start("patrickstar", SUBSTITUTE="1")
    lost = own.passed - found.passed
    in_fp32 = set()
    if framework == "trl" and lost:
        in_fp32 = start("fp32", sorted(lost), SUBSTITUTE="1", FP32="1").passed
    reasons = defaultdict(list)
    for test in sorted(lost):
        text = BF16 if test in in_fp32 else reason(found.of_tests.get(test, "the process ended"))
        reasons[text].append(test.rpartition("::")[2].replace("|", "/"))
    counts = {
        "tests": len(own.of_tests),
        "skipped": own.skipped,
        "own pass": len(own.passed),
        "create an engine": found.trained,
        "pass with PatrickStar": len(own.passed & found.passed),
        "fail though own pass": len(lost),
    }
    suite = {"suite": f"{framework}: {Path(file).stem}"}
    failures = [
        suite | {"tests": str(len(tests)), "reason": text, "names": ", ".join(tests)} for text, tests in reasons.items()
    ]
    return suite | {name: str(count) for name, count in counts.items()}, failures


def main() -> None:
    given = options(__doc__, **dict.fromkeys(SUITES, ""), directory=Path, only="")
    checkouts = {name: Path(getattr(given, name)) for name in SUITES if getattr(given, name)}
    suites, failures = [], []
    for framework, checkout in checkouts.items():
        folder = given.directory.resolve() / framework
        if not folder.exists():
            write_folder(framework, checkout, folder)
        for file in SUITES[framework]:
            if re.search(given.only, file):
                row, reasons = compare(framework, file, folder)
                suites.append(row)
                failures += reasons
    versions = ", ".join(f"{name} {version(name)}" for name in (*SUITES, "transformers", "peft"))
    publish(
        "framework-suites",
        "cpu",
        f"The frameworks' own tests ({', '.join(path.name for path in checkouts.values())}) with PatrickStar's classes "
        f"in place of theirs ({versions}), every unused chunk evicted at each access.\n\n{table(suites)}\n\n"
        f"Tests that pass with the framework's own classes and fail with these:",
        failures,
        ["suite", "tests", "reason", "names"],
    )


if __name__ == "__main__":
    main()
