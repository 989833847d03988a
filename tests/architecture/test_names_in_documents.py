"""Modules, classes, methods and files that the documents name in backticks exist, and modules that the sources name."""

import ast
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.architecture.snippets import DOCUMENTS, snippets
from tests.architecture.sources import PACKAGE, ROOT, files, module_name, shown, tree

TODAY = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]  # it names what was removed
MODULES = {module_name(path): path for path in files(".py", below=PACKAGE)}
NOT_IN_THE_SOURCE = {
    "nexar.transports",  # groups of entry points
    "nexar.device_adapters",
    "nexar.NAME",  # a placeholder
    "Request.Waitall",  # mpi4py's
}
TREES = ("src/", "tests/", "tools/", "docs/", "benchmarks/", "examples/", "native/", "dashboards/")
PARTS = {name.split(".")[1] for name in MODULES if "." in name} - {"torch"}
"""Of `nexar`; what begins with `torch.` is torch's own."""
EXAMPLES = {"train.py", *(snippet.title for snippet in snippets("python"))}  # files of the reader


def bound(statement: ast.stmt) -> set[str]:
    """The names that a statement binds, also in the blocks of an `if` or a `try`."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return names.union(*(bound(inner) for inner in ast.iter_child_nodes(statement) if isinstance(inner, ast.stmt)))


@cache
def classes() -> dict[str, ast.ClassDef]:
    nodes = (node for path in MODULES.values() for node in tree(path).body)
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


@cache
def attributes(owner: str) -> frozenset[str]:
    """What a class and its bases in nexar define: methods, fields, and attributes that methods assign."""
    node = classes().get(owner)
    if node is None:
        return frozenset()
    own = {name for statement in node.body for name in bound(statement)}
    assigned = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
    own |= {each.attr for each in assigned if isinstance(each.value, ast.Name) and each.value.id == "self"}
    bases = {each.id for base in node.bases for each in ast.walk(base) if isinstance(each, ast.Name)} - {owner}
    return frozenset(own.union(*map(attributes, bases)))


def is_in_the_source(name: str) -> bool:
    """Of `nexar.module.Name.attribute` and `Class.attribute`. Names of other packages' classes count as real."""
    parts = name.split(".")
    if parts[0] == "nexar":
        length = next(n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in MODULES)
        module, parts = ".".join(parts[:length]), parts[length:]
        if parts and not any(parts[0] in bound(statement) for statement in tree(MODULES[module]).body):
            return False
    return len(parts) < 2 or parts[0] not in classes() or parts[1] in attributes(parts[0])


def in_backticks(document: Path) -> list[str]:
    text = re.sub(r"^ *```.*?^ *```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", text)


def names_in(document: Path) -> set[str]:
    found = (re.fullmatch(r"([A-Za-z_]\w*(?:\.\w+)+)(?:\(.*\))?", text) for text in in_backticks(document))
    names = {match[1] for match in found if match} - NOT_IN_THE_SOURCE
    return {name for name in names if not name.endswith((".py", ".json", ".toml"))}


def prose_of(source: Path) -> Iterator[str]:
    """Docstrings and comments."""
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    with source.open("rb") as lines:
        yield from (token.string for token in tokenize.tokenize(lines.readline) if token.type == tokenize.COMMENT)


def modules_in(source: Path) -> set[str]:
    """Dotted names in the prose that begin with a part of nexar, such as `wire.frame`, with `nexar.` in front."""
    dotted = r"(?<![\w./@-])(?:nexar\.)?([a-z_]\w*(?:\.\w+)+)(?!\w*/)"
    found = (match[1] for text in prose_of(source) for match in re.finditer(dotted, text))
    names = {f"nexar.{name}" for name in found if name.split(".")[0] in PARTS}
    return {name for name in names if not name.endswith((".py", ".json", ".toml"))}


def files_in(document: Path) -> set[str]:
    paths = {text for text in in_backticks(document) if re.fullmatch(r"\w[\w./-]*", text)} - EXAMPLES
    return {path for path in paths if path.startswith(TREES) or path.endswith((".py", ".rs"))}


def exists(path: str, document: Path) -> bool:
    return any((place / path).exists() for place in (ROOT, PACKAGE, document.parent))


def test_a_name_in_the_text_is_in_the_source():
    named = [(document, name) for document in TODAY for name in sorted(names_in(document))]
    assert [(shown(document), name) for document, name in named if not is_in_the_source(name)] == []


def test_a_file_in_the_text_exists():
    named = [(document, path) for document in TODAY for path in sorted(files_in(document))]
    assert [(shown(document), path) for document, path in named if not exists(path, document)] == []


def test_a_module_in_a_docstring_or_comment_is_in_the_source():
    sources = files(".py", below=PACKAGE) + files(".py", below=ROOT / "tools")
    named = [(source, name) for source in sources for name in sorted(modules_in(source))]
    assert [(shown(source), name) for source, name in named if not is_in_the_source(name)] == []
