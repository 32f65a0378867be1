"""Names of an integration, imported when they are first used, with an error that says what they need."""

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from patrickstar.errors import MissingPackageError

# [Note: names on first use]
# The names of an integration need different packages and versions: the Trainer needs accelerate, which model folders do
# not; plans need parts that transformers has since 5.23. So each name is imported when it is first used, and what lacks
# a package, or has an older one, says so. Everything else works meanwhile.

Needs = Mapping[str, str]
"""Least versions by the name of a package."""


def on_first_use(package: str, names: Mapping[str, tuple[str, Needs]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package. See [Note: names on first use].

    Args:
        package: Name of the package.
        names: For each name its module in the package, and what it needs.
    """

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, needs = names[name]
        require(f"{package}.{name}", needs)
        try:
            return getattr(import_module(f"{package}.{module}"), name)
        except ImportError as error:
            found = (error.name or "").partition(".")[0]
            if found not in needs:
                raise
            raise _missing(f"{package}.{name}", found, needs, f"which has no {error.name}") from error

    return __getattr__


def require(what: str, needs: Needs) -> None:
    """Check that packages are installed, in these versions or newer ones.

    Raises:
        MissingPackageError: One is not.
    """
    for name, least in needs.items():
        installed = _installed(name)
        if installed is None or _numbers(installed) < _numbers(least):
            raise _missing(what, name, needs, "an older version" if installed else "")


def _missing(what: str, name: str, needs: Needs, state: str) -> MissingPackageError:
    installed = _installed(name)
    found = f"{name} {installed} is installed, {state}" if installed else f"{name} is not installed"
    return MissingPackageError(
        f"{what} needs {name} {needs[name]} or newer, and {found}: pip install '{name}>={needs[name]}'"
    )


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
