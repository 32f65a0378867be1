"""Integrations without the packages that they need: each name says what is missing, and which version to install."""

import subprocess
import sys
import tomllib
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest

from patrickstar.errors import MissingPackageError
from patrickstar.integrations import _on_first_use

TRANSFORMERS = ["from_pretrained", "parallelize", "stack_experts", "Trainer"]
TRL = ["DPOTrainer", "GRPOTrainer", "KTOTrainer", "RLOOTrainer", "RewardTrainer", "SFTTrainer"]
LIGHTNING = ["PatrickStarFabricStrategy", "PatrickStarStrategy"]
NAMES = {"transformers": TRANSFORMERS, "accelerate": ["Accelerator"], "lightning": LIGHTNING, "trl": TRL}
NEWER_PARTS = ["transformers.distributed.expert_parallel", "transformers.distributed.parallel_utils"]
"""Modules that transformers 5.17 does not have."""
OLD = "0.1.0"

USE = """
import importlib, importlib.metadata, sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden!r} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
real = importlib.metadata.version

def version(name):
    if name in {hidden!r}:
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)

importlib.metadata.version = version
for name in {removed!r}:
    import transformers.modeling_utils  # imports them itself, in versions that have them
    sys.modules[name] = None
from patrickstar.errors import MissingPackageError
for library, names in {names!r}.items():
    package = importlib.import_module("patrickstar.integrations." + library)
    for name in names:
        try:
            value = getattr(package, name)
        except MissingPackageError as error:
            assert isinstance(error, ImportError)
            print(f"{{library}}.{{name}}: {{error}}")
        else:
            print(f"{{library}}.{{name}} works")
"""


def used(hidden=(), removed=(), names=NAMES):
    """Use every name of every integration in a new process; return what came of it by name.

    Args:
        hidden: Packages that are not installed.
        removed: Modules that packages do not have.
        names: Names by the integration.
    """
    script = USE.format(hidden=list(hidden), removed=list(removed), names=names)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(line.replace(" works", ": works").split(": ", 1) for line in done.stdout.splitlines())


def test_without_any_of_the_packages_every_name_says_what_to_install():
    results = used(hidden=["transformers", "accelerate", "lightning", "trl", "peft"])
    needed = {"transformers": "transformers 5.17", "accelerate": "accelerate 1.15", "lightning": "lightning 2.6"}
    for name, text in results.items():
        library, _, entry = name.partition(".")
        package = {"trl": "trl 1.16"}.get(library) or needed[library]
        if entry in ("parallelize", "stack_experts"):
            package = "transformers 5.23"
        distribution, version = package.split()
        assert text == (
            f"patrickstar.integrations.{name} needs {package} or newer, and {distribution} is not installed: "
            f"pip install '{distribution}>={version}'"
        )
    assert len(results) == sum(map(len, NAMES.values()))


def test_what_needs_parts_of_newer_versions_is_refused_without_them(monkeypatch):
    """In this process; the slow test has one in which nothing was imported before."""
    package = import_module("patrickstar.integrations.transformers")
    for name in [name for name in sys.modules if name.startswith(f"{package.__name__}._")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(package, name.rpartition(".")[2])
    import_module("transformers.modeling_utils")  # imports them itself, in versions that have them
    for name in NEWER_PARTS:
        monkeypatch.setitem(sys.modules, name, None)
    for name in TRANSFORMERS:
        refused = pytest.raises(MissingPackageError, match=r"5\.23 or newer.*which has no transformers\.distributed\.")
        with refused if name in ("parallelize", "stack_experts") else nullcontext():
            getattr(package, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "removed", "names"),
    [
        (["peft", "trl"], (), {}),
        (["peft", "trl"], NEWER_PARTS, {}),
        ([], NEWER_PARTS, {"trl": ["SFTTrainer"]}),
    ],
)
def test_without_some_packages_or_parts_of_newer_versions_only_what_needs_them_is_refused(hidden, removed, names):
    results = used(hidden=hidden, removed=removed, names={"transformers": TRANSFORMERS} | names)
    refused = {name: text for name, text in results.items() if text != "works"}
    assert set(refused) == ({"transformers.parallelize", "transformers.stack_experts"} if removed else set())
    for text in refused.values():
        assert "needs transformers 5.23 or newer, and transformers" in text
        assert "which has no transformers.distributed." in text


@pytest.mark.parametrize(
    ("least", "installed", "refused"),
    [("5.17", "5.17.0", False), ("5.17", "6.0", False), ("5.17", "5.16.9", True), ("5.17", "4.57.1", True)],
)
def test_versions_are_compared_by_their_numbers(monkeypatch, least, installed, refused):
    monkeypatch.setattr(_on_first_use, "version", lambda name: installed)
    if not refused:
        _on_first_use.require("it", {"transformers": least})
        return
    with pytest.raises(MissingPackageError) as error:
        _on_first_use.require("it", {"transformers": least})
    assert str(error.value) == (
        f"it needs transformers {least} or newer, and transformers {installed} is installed, an older version: "
        f"pip install 'transformers>={least}'"
    )


def test_older_versions_are_named_for_every_name(monkeypatch):
    monkeypatch.setattr(_on_first_use, "version", lambda name: OLD)
    for library, name in ((library, name) for library, names in NAMES.items() for name in names):
        older = rf"integrations\.{library}\.{name} needs .* {OLD} is installed, an older"
        with pytest.raises(MissingPackageError, match=older):
            getattr(import_module(f"patrickstar.integrations.{library}"), name)


def test_least_versions_are_those_of_the_package():
    """The package installs the versions with which its integrations work."""
    from patrickstar.integrations import lightning, transformers

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    for name, version in (transformers.TRAINER | lightning.LIGHTNING).items():
        listed = {each for extra, packages in optional.items() for each in packages if each.startswith(f"{name}>=")}
        assert listed == {f"{name}>={version}"}


def test_a_name_that_no_integration_has_is_an_attribute_error():
    from patrickstar.integrations import trl

    with pytest.raises(AttributeError, match=r"'patrickstar\.integrations\.trl' has no attribute 'PPOTrainer'"):
        trl.PPOTrainer  # noqa: B018
