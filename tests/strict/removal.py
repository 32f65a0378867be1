"""Import of a module without one of its statements, which the environment names. See [Note: removed statements].

Importing this module, or `pytest -p removal`, is enough: `PATRICKSTAR_REMOVED` is the module, its path and a line,
separated by spaces. With `PATRICKSTAR_PROBED`, a file of such lines, no statement is removed: `pytest -p removal`
appends to the file what each test ran: a line of JSON with its name, its seconds, and its statements. Forked ranks of
`distributed/ranks.py` are treated alike.
"""

import ast
import atexit
import importlib.abc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Generator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "PATRICKSTAR_REMOVED"
PROBED = "PATRICKSTAR_PROBED"


class Removal(importlib.abc.MetaPathFinder, SourceFileLoader):
    """Importer of a module without the statement that begins in one line."""

    def __init__(self, name: str, path: str, line: int) -> None:
        super().__init__(name, path)
        self.line = line
        self.removed = 0

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Find the module, and leave all others to other importers."""
        return (
            importlib.util.spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None
        )

    def get_code(self, fullname: str) -> Any:
        """Return the module's code with `pass` in place of the statement."""
        tree = ast.parse(Path(self.path).read_text())

        class Remover(ast.NodeTransformer):
            def visit(transformer, node: ast.AST) -> Any:
                if isinstance(node, ast.stmt) and node.lineno == self.line and not hasattr(node, "body"):
                    self.removed += 1
                    return ast.copy_location(ast.Pass(), node)
                return transformer.generic_visit(node)

        code = compile(ast.fix_missing_locations(Remover().visit(tree)), self.path, "exec")
        assert self.removed == 1, f"{self.removed} statements begin in line {self.line} of {self.path}"
        return code


class Probes(importlib.abc.MetaPathFinder):
    """Importer of modules that note which of their statements run."""

    def __init__(self, rows: list[list[str]]) -> None:
        self.rows = rows
        self.ran: set[str] = set()
        """Statements that have run since it was cleared: module, path and line."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Find a module with statements to note, and leave all others to other importers."""
        lines = {int(line): " ".join(row) for *row, line in self.rows if row[0] == fullname}
        if not lines:
            return None
        source = next(row[1] for row in self.rows if row[0] == fullname)
        return importlib.util.spec_from_file_location(
            fullname, source, loader=ProbedModule(fullname, source, lines, self.ran)
        )


class ProbedModule(SourceFileLoader):
    """Loader of a module that notes which statements run."""

    def __init__(self, name: str, path: str, lines: dict[int, str], ran: set[str]) -> None:
        super().__init__(name, path)
        self.lines, self.ran = lines, ran

    def get_code(self, fullname: str) -> Any:
        """Return the module's code with a note before each statement."""

        class Prober(ast.NodeTransformer):
            def visit(prober, node: ast.AST) -> Any:
                if isinstance(node, ast.stmt) and node.lineno in self.lines and not hasattr(node, "body"):
                    note = ast.parse(f"__ran__({self.lines[node.lineno] + f' {node.lineno}'!r})").body[0]
                    return [ast.copy_location(note, node), node]
                return prober.generic_visit(node)

        tree = Prober().visit(ast.parse(Path(self.path).read_text()))
        return compile(ast.fix_missing_locations(tree), self.path, "exec")

    def exec_module(self, module: Any) -> None:
        """Run the module, whose notes go to `ran`."""
        module.__ran__ = self.ran.add
        super().exec_module(module)


if PROBED in os.environ:
    _file = Path(os.environ[PROBED])
    _probes = Probes([row.split(" ") for row in _file.read_text().splitlines() if not row.startswith("[")])
    sys.meta_path.insert(0, _probes)
    _ranks = _file.with_name(_file.name + " in ranks")

    @atexit.register
    def _write() -> None:
        """Write what this process ran, for the test that has forked it."""
        with _ranks.open("a") as file:
            file.write("".join(f"{row}\n" for row in _probes.ran))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
        """Write what a test ran."""
        _probes.ran.clear()
        _ranks.unlink(missing_ok=True)
        began_s = time.perf_counter()
        result = yield
        ran = _probes.ran.union(_ranks.read_text().splitlines() if _ranks.exists() else ())
        with _file.open("a") as file:
            file.write(json.dumps([item.nodeid, time.perf_counter() - began_s, sorted(ran)]) + "\n")
        return result


if VARIABLE in os.environ:
    _module, _path, _line = os.environ[VARIABLE].split(" ")
    assert _module not in sys.modules, f"{_module} was imported before its statement could be removed"
    sys.meta_path.insert(0, Removal(_module, _path, int(_line)))
