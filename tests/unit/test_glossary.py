"""The field's words are used, and those that they replaced do not return: in code, docstrings and documentation."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import patrickstar as ps
from patrickstar import errors, functional, runtime, testing

ROOT = Path(__file__).parents[2]
CODE = sorted(path for folder in ("src", "benchmarks", "examples", "tests") for path in (ROOT / folder).rglob("*.py"))
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])

OPENINGS = re.compile(r"(What|Who|Have|Whether|The same|How|Where|That|Those|Says|Tells|So many)\b")
"""A docstring begins with an imperative verb or a noun."""
IDENTIFIERS = frozenset(
    """
    about_to_change adopt bring bring_back come cuts early follow_moves give give_way go_on_saving hand_over
    hasten here homes kept land lane lanes let_keep meet mover movers moves promote put_gradient rehearsal
    rehearse ring rounds_of scheme slab slot slots stuck survey take_back taken tick tide told transit
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
LANES = (
    re.compile(r"_kernels/|test_grad_norm"),  # of vector registers
    re.compile(r"_dry_run/|cli/test_plan|unit/test_lanes|laws/test_dry_run"),  # a step's busy intervals
)
"""Files in which a lane is another thing than a channel."""
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


@dataclass(frozen=True)
class Module:
    """Facts of a Python file that the rules read, with their lines."""

    docstrings: list[tuple[int, str]]
    names: list[tuple[int, str]]
    """Defined names: classes, functions, arguments, variables, attributes and imports under other names."""
    private: list[int]
    """Lines that reach into an engine."""


@cache
def parsed(path: Path) -> Module:
    docstrings, names, private = [], [], []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if (text := ast.get_docstring(node)) is not None:
                docstrings.append((node.body[0].lineno, text))
            if not isinstance(node, ast.Module):
                names.append((node.lineno, node.name))
        elif isinstance(node, ast.arg):
            names.append((node.lineno, node.arg))
        elif isinstance(node, ast.alias) and node.asname:
            names.append((node.lineno, node.asname))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append((node.lineno, node.id))
        elif isinstance(node, ast.Attribute):
            if isinstance(node.ctx, ast.Store):
                names.append((node.lineno, node.attr))
            if node.attr == "_core":
                private.append(node.lineno)
    return Module(docstrings, names, private)


def check(offenders: Iterator[tuple[Path, int, str]]) -> None:
    """Fail with the place of each offender."""
    found = [f"{path.relative_to(ROOT)}:{line}: {text}" for path, line, text in offenders]
    assert not found, "\n".join(["", *found])


def test_docstrings_begin_as_sentences_of_the_field():
    texts = ((path, line, text) for path in CODE for line, text in parsed(path).docstrings)
    check((path, line, text.splitlines()[0]) for path, line, text in texts if OPENINGS.match(text))


def test_replaced_names_do_not_return():
    check(
        (path, line, name)
        for path in CODE
        for line, name in parsed(path).names
        if name.lstrip("_") in IDENTIFIERS | CLASSES
        if name.lower() not in ("lane", "lanes") or not any(files.search(str(path)) for files in LANES)
    )


def test_replaced_words_do_not_return():
    replaced = re.compile(rf"(?i)(?<![\w_`/.-])(?:{'|'.join(WORDS)})(?![\w_])")
    check(
        (path, text.count("\n", 0, found.start()) + 1, f"{found[0]!r}, write {better!r}")
        for path in [*CODE, *PAGES]
        if path != Path(__file__)
        for text in [path.read_text()]
        for found in replaced.finditer(text)
        for word, better in WORDS.items()
        if re.fullmatch(f"(?i){word}", found[0])
    )


def test_files_that_the_documentation_names_exist():
    folders = (ROOT, ROOT / "src/patrickstar", ROOT / "tests", ROOT / "benchmarks", ROOT / "docs")
    pattern = re.compile(r"`([a-z_][a-z0-9_./-]*/[a-z0-9_.-]+\.(?:py|md|toml|cpp|h))`|\]\(([^)#:]+?\.\w+)\)")
    check(
        (path, line, found[0])
        for path in PAGES
        for line, text in enumerate(path.read_text().splitlines(), 1)
        for found in pattern.finditer(text)
        if not any((folder / (found[1] or found[2])).exists() for folder in (path.parent, *folders))
    )


def public_objects() -> Iterator[tuple[str, object]]:
    """Yield what users may import, with the public methods of classes."""
    roots = {name: getattr(ps, name) for name in ps.__all__ if name not in ("errors", "functional", "testing")}
    for module in (testing, runtime, errors, functional):
        for name, value in vars(module).items():
            if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__:
                roots[f"{module.__name__}.{name}"] = value
    for name, value in roots.items():
        yield name, value
        if inspect.isclass(value):
            for key, member in vars(value).items():
                documented = inspect.isfunction(member) or isinstance(member, property | classmethod)
                if documented and not key.startswith("_"):
                    yield f"{name}.{key}", member


def overrides_documented(name: str, value: object) -> bool:
    """Return True for a method whose base class documents it."""
    owner, _, method = name.rpartition(".")
    kind = getattr(ps, owner, None) or getattr(testing, owner.rpartition(".")[2], None)
    bases = kind.__mro__[1:] if inspect.isclass(kind) else ()
    return any(method in vars(base) and inspect.getdoc(vars(base)[method]) for base in bases)


def complaints(name: str, value: object) -> Iterator[str]:
    """Yield what the docstring of a public object lacks."""
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    text, inherited = inspect.getdoc(function), overrides_documented(name, value)
    if not text and not inherited:
        yield f"{name} has no docstring"
    if not text or inherited or inspect.isclass(function) or isinstance(value, property):
        return
    signature = inspect.signature(function)
    arguments = [key.lstrip("*") for key in signature.parameters if key not in ("self", "cls")]
    if missing := [key for key in arguments if not re.search(rf"\b{key}\b", text)]:
        yield f"{name} does not document {', '.join(missing)}"
    if len(arguments) > 1 and "Args:" not in text:
        yield f"{name} has no section Args"
    returns = signature.return_annotation not in (None, "None", inspect.Signature.empty)
    if returns and not re.search(r"Returns:|[Rr]eturn|Yield", text):
        yield f"{name} does not say what it returns"
    raised = re.findall(r"^ +raise (\w+Error)\(", inspect.getsource(function), re.M)
    if missing := [kind for kind in raised if kind not in text]:
        yield f"{name} raises {', '.join(missing)}, which its docstring does not say"


def test_public_docstrings_say_what_the_signature_needs():
    found = [complaint for name, value in public_objects() for complaint in complaints(name, value)]
    assert not found, "\n".join(["", *found])


ONE_CLASS = {"_autograd/interceptor.py", "_chunks/device_cache.py", "_engine/engine.py", "_params/model_data.py"}
"""Files of up to 600 lines: each is one class with one state, which a second file would only slice."""


def test_no_file_is_longer_than_400_lines():
    lengths = ((path, len(path.read_text().splitlines())) for path in CODE)
    limits = ((path, length, 600 if "/".join(path.parts[-2:]) in ONE_CLASS else 400) for path, length in lengths)
    check((path, length, "the last line") for path, length, limit in limits if length > limit)


def test_only_the_probes_reach_into_an_engine():
    check(
        (path, line, "read engine.inspect(), or add a function to tests/probes.py")
        for path in CODE
        if not path.is_relative_to(ROOT / "src") and path != ROOT / "tests/probes.py"
        for line in parsed(path).private
    )
