"""The repository as the architecture tests see it: which files there are, and what they import."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "nexar"
SKIPPED = {"target", "__pycache__", "build", "dist", "node_modules", "site"}


def files(*suffixes: str, below: Path = ROOT) -> list[Path]:
    """Files of these kinds that people wrote: hidden folders and build products left out."""
    return sorted(path for path in _walk(below) if path.suffix in suffixes)


def _walk(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.name.startswith(".") or entry.name in SKIPPED:
            continue
        if entry.is_dir() and not (entry / "pyvenv.cfg").exists():
            yield from _walk(entry)
        elif entry.is_file():
            yield entry


def shown(path: Path) -> str:
    """The path as a reader knows it; also the name of its test case."""
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    """`src/nexar/wire/frame.py` → `nexar.wire.frame`."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(), str(path))


def imports(path: Path, *, running: bool = False) -> set[str]:
    """Full names of all modules a file imports, anywhere in it; `running`: but not those that only annotate."""
    annotating = set(_annotating(tree(path))) if running else set()
    return {name for node in ast.walk(tree(path)) if node not in annotating for name in _imported(node, path)}


def _annotating(module: ast.Module) -> Iterator[ast.AST]:
    """What is read by type checkers only."""
    for block in ast.walk(module):
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING":
            for statement in block.body:
                yield from ast.walk(statement)


def _imported(node: ast.AST, path: Path) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield _absolute(node, path)


def _absolute(node: ast.ImportFrom, path: Path) -> str:
    if not node.level:
        return node.module or ""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)
