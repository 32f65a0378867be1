"""Every public name is in the API reference."""

import re

import pytest

import patrickstar as ps
from patrickstar import optim, testing
from patrickstar.integrations import accelerate, lightning, transformers, trl

from .pages import DOCS

REFERENCE = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))
MODULES = ("errors", "testing")
"""Names of the package that are modules."""


def documented(name: str) -> bool:
    return re.search(rf"^::: {re.escape(name)}$", REFERENCE, re.M) is not None


def test_each_name_of_the_package_is_documented():
    missing = [name for name in ps.__all__ if name not in MODULES and not documented(f"patrickstar.{name}")]
    assert not missing


def test_modules_are_documented():
    assert documented("patrickstar.errors") and documented("patrickstar.testing")
    assert set(optim.__all__) <= set(ps.__all__)
    missing = [name for name in testing.__all__ if not re.search(rf"\b{name}\b", REFERENCE)]
    assert not missing


@pytest.mark.parametrize("library", [accelerate, lightning, transformers, trl], ids=lambda library: library.__name__)
def test_each_integration_is_documented(library):
    unmentioned = [name for name in library.__all__ if f"`{name}`" not in REFERENCE]
    assert not [name for name in unmentioned if not documented(f"{library.__name__}.{name}")]
