"""No code compares the text of a cause, a reason or an error: kinds, codes and classes decide.

A scan by name finds the forms that the code once had. It does not find a text that was given another name first.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGE, files, shown, tree

_TEXTS = {"cause", "detail", "explanation", "problem", "reason", "why"}
"""Attributes, and names of variables, that hold text for people."""
_TEXT_ATTRIBUTES = _TEXTS | {"current_operation", "doing", "last_operation", "missing", "text", "waiting_for"}
"""As attributes only: variables of these names are often lists, or input that is parsed."""
_ERRORS = {"error", "exc", "exception", "failed", "failure", "fault", "late", "lost", "loss", "raised", "refused"}
"""Variables that hold exceptions."""
_READS = {"startswith", "endswith", "find", "index", "count", "partition", "rpartition", "split", "rsplit"}
_PATTERNS = {"match", "search", "fullmatch", "findall", "finditer"}


def decisions(module: ast.Module) -> Iterator[int]:
    """Line numbers of tests on texts for people."""
    for node in ast.walk(module):
        if (isinstance(node, ast.Compare) and _compares_text(node)) or (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _reads_text(node, node.func)
        ):
            yield node.lineno


def _compares_text(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    return any(_is_text(side) for side in sides) and any(_is_phrase(side) for side in sides)


def _reads_text(call: ast.Call, method: ast.Attribute) -> bool:
    reads = method.attr in _READS and _is_text(method.value)
    return reads or (method.attr in _PATTERNS and any(_is_text(each) for each in call.args))


def _is_text(node: ast.expr) -> bool:
    match node:
        case ast.Attribute(attr=name):
            return name in _TEXT_ATTRIBUTES
        case ast.Name(id=name):
            return name in _TEXTS
        case ast.Call(func=ast.Name(id="str" | "error_text"), args=[ast.Name(id=name)]):
            return name in _ERRORS
    return False


def _is_phrase(node: ast.expr) -> bool:
    """A text that is not empty, or a constant, which may be one."""
    match node:
        case ast.Constant(value=str() as text):
            return text != ""
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.isupper()
    return False


@pytest.mark.parametrize("path", files(".py", below=PACKAGE), ids=shown)
def test_no_module_decides_by_the_text_of_an_error(path: Path) -> None:
    assert list(decisions(tree(path))) == []


@pytest.mark.parametrize(
    "line",
    [
        "if cause.startswith(SEED_CONNECTION_BROKE): pass",
        "if error.reason == 'timed out': pass",
        "if reach.problem != NOT_OFFERED: pass",
        "if 'refused' in str(error): pass",
        "if PATTERN.search(loss.text): pass",
        "if re.search('refused', why): pass",
        "operation = awaited[0].missing.partition(' #')[0]",
        "first, last = report.doing.split(' for ')",
    ],
)
def test_the_scan_finds_what_it_looks_for(line: str) -> None:
    assert list(decisions(ast.parse(line))) == [1]


@pytest.mark.parametrize(
    "line",
    [
        "if loss.kind is LossKind.ENDED: pass",
        "if refused.code == 'nobody_left': pass",
        "if error.reason == '': pass",
        "shown = cause if hint.text == self.text else f'{hint.text}; {cause}'",
        "if str(dtype) in NAMES: pass",
        "shown = problem.removeprefix(f'{scheme}: ')",
    ],
)
def test_the_scan_leaves_other_comparisons_alone(line: str) -> None:
    assert list(decisions(ast.parse(line))) == []
