"""The field's words are used, and those that they replaced do not return: in code, docstrings and documentation."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import patrickstar as ps
from patrickstar import errors, runtime, testing

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for room in ("src", "benchmarks", "examples") for path in (ROOT / room).rglob("*.py"))
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])

OPENINGS = re.compile(r"(What|Who|Have|Whether|The same|How|Where|That|Those|Says|Tells|So many)\b")
"""A docstring begins with an imperative verb or a noun."""
IDENTIFIERS = frozenset(
    """
    about_to_change adopt bring bring_back come cuts early follow_moves give give_way go_on_saving hand_over
    hasten here homes kept land lane lanes let_keep meet mover movers moves promote put_gradient
    rehearsal rehearse rounds_of scheme settle slab slot slots stuck survey take_back tick tide told transit
    uncover watched
    """.split()  # noqa: SIM905
)
CLASSES = frozenset(
    """
    Clock Document EarlyUpdate Forecast Fused Homes Kept Lane Listed Movers Moves Native PageBank Peers Piece
    Rehearsal Ring Rounds Scheme ScratchFile SharedModelData Slab Slot Stored Survey Transit Uninterrupted Want
    Word
    """.split()  # noqa: SIM905
)
WORDS = {
    "rehearsal": "dry run",
    "rehearse": "simulate",
    "scratch file": "swap file",
    "slab": "host arena",
    "mover": "worker thread",
    "gives? way": "is moved out",
    "hasten": "prioritize",
    r"slots?(?!=)": "managed parameter",
}
"""Replaced words of the prose, with what to write."""


def named(paths: list[Path]) -> list:
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


def docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield name and docstring of the module and everything defined in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "name", "the module"), text


def identifiers(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines: classes, functions, arguments, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


@pytest.mark.parametrize("path", named(SOURCES))
def test_docstrings_begin_as_sentences_of_the_field(path):
    tree = ast.parse(path.read_text())
    wrong = [f"{name}: {text.splitlines()[0]}" for name, text in docstrings(tree) if OPENINGS.match(text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", named(SOURCES))
def test_replaced_names_do_not_return(path):
    defined = set(identifiers(ast.parse(path.read_text())))
    replaced = {name for name in defined if name.lstrip("_") in IDENTIFIERS | CLASSES}
    if "_kernels" in path.parts:
        replaced -= {"lane", "lanes"}  # of vector registers
    if "_dry_run" in path.parts:
        replaced -= {"lane", "lanes", "Lane"}  # busy intervals over a step; a channel is not called so
    assert not replaced


@pytest.mark.parametrize("path", named([*SOURCES, *PAGES]))
def test_replaced_words_do_not_return(path):
    text = path.read_text()
    for word, better in WORDS.items():
        found = re.search(rf"(?i)(?<![\w_`/.-]){word}(?![\w_])", text)
        assert found is None, f"{found[0]!r} at character {found.start()}: write {better!r}"


@pytest.mark.parametrize("path", named(PAGES))
def test_files_that_the_documentation_names_exist(path):
    roots = (ROOT, ROOT / "src/patrickstar", ROOT / "tests", ROOT / "benchmarks", ROOT / "docs")
    files = set(re.findall(r"`([a-z_][a-z0-9_./-]*/[a-z0-9_.-]+\.(?:py|md|toml|cpp|h))`", path.read_text()))
    files |= {link for link in re.findall(r"\]\(([^)#:]+?\.\w+)\)", path.read_text())}
    missing = [file for file in files if not any((root / file).exists() for root in (path.parent, *roots))]
    assert not missing, f"{path.name} names {', '.join(sorted(missing))}"


def public_objects() -> Iterator[tuple[str, object]]:
    """Yield what users may import, with the public methods of classes."""
    roots = {name: getattr(ps, name) for name in ps.__all__ if name not in ("errors", "testing")}
    for module in (testing, runtime, errors):
        for name, value in vars(module).items():
            if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__:
                roots[f"{module.__name__}.{name}"] = value
    for name, value in roots.items():
        yield name, value
        if inspect.isclass(value):
            for key, member in vars(value).items():
                if not key.startswith("_") and (
                    inspect.isfunction(member) or isinstance(member, property | classmethod)
                ):
                    yield f"{name}.{key}", member


def overrides_documented(name: str, value: object) -> bool:
    """Return True for a method whose base class documents it."""
    owner, _, method = name.rpartition(".")
    kind = getattr(ps, owner, None) or getattr(testing, owner.rpartition(".")[2], None)
    bases = kind.__mro__[1:] if inspect.isclass(kind) else ()
    return any(method in vars(base) and inspect.getdoc(vars(base)[method]) for base in bases)


@pytest.mark.parametrize(("name", "value"), [pytest.param(*pair, id=pair[0]) for pair in public_objects()])
def test_public_docstrings_say_what_the_signature_needs(name, value):
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    text = inspect.getdoc(function)
    assert text or overrides_documented(name, value), f"{name} has no docstring"
    if inspect.isclass(function) or isinstance(value, property) or overrides_documented(name, value):
        return
    signature = inspect.signature(function)
    arguments = [key.lstrip("*") for key in signature.parameters if key not in ("self", "cls")]
    missing = [key for key in arguments if not re.search(rf"\b{key}\b", text)]
    assert not missing, f"{name} does not document {', '.join(missing)}"
    assert len(arguments) < 2 or "Args:" in text, f"{name} has no section Args"
    returns = signature.return_annotation
    if returns not in (None, "None", inspect.Signature.empty):
        assert re.search(r"Returns:|[Rr]eturn|Yield", text), f"{name} does not say what it returns"
    raised = re.findall(r"^ +raise (\w+Error)\(", inspect.getsource(function), re.M)
    missing = [kind for kind in raised if kind not in text]
    assert not missing, f"{name} raises {', '.join(missing)}, which its docstring does not say"


@pytest.mark.parametrize("path", named([*SOURCES, *(ROOT / "tests").rglob("*.py")]))
def test_no_file_is_longer_than_400_lines(path):
    assert len(path.read_text().splitlines()) <= 400


def test_only_the_probes_reach_into_an_engine():
    paths = {path for folder in ("tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")}
    users = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted(paths - {ROOT / "tests/probes.py"})
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "_core"
    ]
    assert not users, f"read engine.inspect(), or add a function to tests/probes.py: {', '.join(users)}"
