"""Functions are short and every module says what it contains."""

import ast

import pytest

from tests.architecture.sources import PACKAGE, files, shown, tree

MOST_STATEMENTS = 40

Function = ast.FunctionDef | ast.AsyncFunctionDef


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
