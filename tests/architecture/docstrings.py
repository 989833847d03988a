"""What the code says of itself, as Markdown: texts, and the names that have one."""

import ast
import inspect
import re
from collections.abc import Iterator


def fields_of(body: list[ast.stmt], before: str = "") -> Iterator[tuple[str, str]]:
    """Public names with an annotation, and the text below each; of attributes only those that have one."""
    for statement, below in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.With):
            yield from fields_of(statement.body, before)
        if isinstance(statement, ast.AnnAssign):
            name = ast.unparse(statement.target)
            text = text_of(below.value.value) if _is_text(below) else ""  # type: ignore[attr-defined]
            public = name.startswith(before) and not name.removeprefix(before).startswith("_")
            if public and (text or not before):
                yield name.removeprefix(before), text


def text_of(doc: str | None) -> str:
    """Angle brackets are no tags, a lone star is no emphasis."""
    return re.sub(r"(?<!`)([<*])", r"\\\1", inspect.cleandoc(doc or ""))


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
