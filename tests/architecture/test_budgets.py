"""Sizes that keep the code readable, and names that say something."""

import ast
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGE, ROOT, files, shown, tree

MOST_LINES = 400
MOST_STATEMENTS = 40
FORBIDDEN_WORDS = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "core", "impl", "v2"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@pytest.mark.parametrize("path", files(".py", ".pyi", ".rs", ".sh"), ids=shown)
def test_a_file_is_short_enough_to_be_read(path):
    lines = path.read_text().count("\n")
    assert lines <= MOST_LINES


@pytest.mark.parametrize("path", files(".py", ".pyi", ".rs", ".sh"), ids=shown)
def test_a_name_says_what_is_inside(path):
    words = {word for part in path.relative_to(ROOT).parts for word in Path(part).stem.lower().split("_")}
    assert words & FORBIDDEN_WORDS == set()


@pytest.mark.parametrize("path", files(".py", below=PACKAGE), ids=shown)
def test_a_function_is_short_enough_to_be_seen(path):
    functions = [node for node in ast.walk(tree(path)) if isinstance(node, Function)]
    long = {node.name: count for node in functions if (count := _statements(node)) > MOST_STATEMENTS}
    assert long == {}


@pytest.mark.parametrize("path", files(".py", below=PACKAGE), ids=shown)
def test_a_file_says_what_it_is_for(path):
    assert ast.get_docstring(tree(path)), "no module docstring"


def _statements(function: Function) -> int:
    """Statements in the body, nested ones included, its docstring left out."""
    inside = sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1
    return inside - (ast.get_docstring(function) is not None)
