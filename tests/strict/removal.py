"""Import of a module without one of its statements, which the environment names. See [Note: removed statements].

Importing this module, or `pytest -p removal`, is enough: `PATRICKSTAR_REMOVED` is the module, its path and a line,
separated by spaces.
"""

import ast
import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

VARIABLE = "PATRICKSTAR_REMOVED"


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


if VARIABLE in os.environ:
    _module, _path, _line = os.environ[VARIABLE].split(" ")
    assert _module not in sys.modules, f"{_module} was imported before its statement could be removed"
    sys.meta_path.insert(0, Removal(_module, _path, int(_line)))
