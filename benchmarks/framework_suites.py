"""Run the frameworks' own tests with PatrickStar's classes in place of theirs: what still passes, and why not the rest.

python benchmarks/framework_suites.py --trl CHECKOUT --accelerate CHECKOUT --lightning CHECKOUT --directory DIR
Checkouts are of the repositories, at the versions that are installed or the nearest that exist; their packages are not
used. Each file runs with the framework's classes and with PatrickStar's; tests of TRL that fail run once more in fp32.
`framework_hub.py` writes random tiny models and small datasets under the names that tests load from the hub. Results
that are in DIR already are used again. The table names the folders of the checkouts: let these names have versions.
Needs `pip install parameterized pytest-datadir pytest-rerunfailures jmespath cloudpickle tensorboardX`.
"""

import argparse
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
from report import publish

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
        environment = os.environ | {"FRAMEWORK": framework} | variables
        environment |= {"PYTHONPATH": ":".join(filter(None, paths)), "ENGINES": str(engines)}
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder.parent / "cache"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        engines.write_text("")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--tb=short",
            "--color=no",
            "-p",
            "no:cacheprovider",
            "-k",
            CHOSEN,
        ]
        with open(stem.with_suffix(".log"), "w") as log:
            subprocess.run(
                [*command, f"--junitxml={results}", *(tests or [file])],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    outcomes = {}
    for case in ElementTree.parse(results).iter("testcase"):
        kind = str(case.get("classname")).rpartition(".")[2]
        outcomes[f"{file}::{'' if kind == Path(file).stem else kind + '::'}{case.get('name')}"] = outcome_of(case)
    return Outcomes(outcomes, len(set(engines.read_text().splitlines())))


def compare(framework: str, file: str, folder: Path) -> tuple[list[str], list[list[str]]]:
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
    both = own.passed & found.passed
    counts = [len(own.of_tests), own.skipped, len(own.passed), found.trained, len(both), len(lost)]
    name = f"{framework}: {Path(file).stem}"
    failures = [[name, str(len(tests)), text, ", ".join(tests)] for text, tests in reasons.items()]
    return [name, *map(str, counts)], failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for framework in SUITES:
        parser.add_argument(f"--{framework}", type=Path, help=f"checkout of {framework}'s repository")
    parser.add_argument("--directory", type=Path, required=True, help="folder for models, datasets and results")
    parser.add_argument("--only", default="", help="pattern of the files to run")
    options = parser.parse_args()
    suites, failures = [], []
    for framework, files in SUITES.items():
        checkout, folder = getattr(options, framework), options.directory.resolve() / framework
        if checkout is None:
            continue
        if not folder.exists():
            write_folder(framework, checkout, folder)
        for file in files:
            if re.search(options.only, file):
                row, reasons = compare(framework, file, folder)
                suites.append(row)
                failures += reasons
    columns = [
        "suite",
        "tests",
        "skipped",
        "own pass",
        "create an engine",
        "pass with PatrickStar",
        "fail though own pass",
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *suites])
    versions = ", ".join(f"{name} {version(name)}" for name in (*SUITES, "transformers", "peft"))
    checkouts = ", ".join(path.name for path in map(partial(getattr, options), SUITES) if path is not None)
    publish(
        "framework-suites",
        "cpu",
        f"The frameworks' own tests ({checkouts}) with PatrickStar's classes in place of theirs ({versions}), every "
        f"unused chunk evicted at each access.\n\n{table}\n\n"
        f"Tests that pass with the framework's own classes and fail with these:",
        ["suite", "tests", "reason", "names"],
        failures,
    )


if __name__ == "__main__":
    main()
