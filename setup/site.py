"""mkdocs hooks that adapt the documents, which are written for GitHub and for tests.

- ```` ```python hello.py ```` becomes a block with a title; lists and anchors work as on GitHub.
- A notebook becomes a page with its text, code and output.
- A linked file of the repository becomes a page; a folder of documents becomes a list.
- `folder/*` in the navigation means all pages of a folder that are not listed.

The rewriting functions are pure and tested without mkdocs.
"""

import json
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOREIGN = "repository"  # folder of the site for files from outside docs/
FOLDERS = ("docs/explain/decisions",)  # folders that get a list

_FENCE = re.compile(r"^(```+)(\w*) ?([^\n]*)$")
_LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)((?:#[^)\s]*)?\))")
_ITEM = re.compile(r"^( *)(?:[-*]|\d+\.) ")


def slug(heading: str, separator: str = "-") -> str:
    """The anchor of a heading, as on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def render(markdown: str) -> str:
    """The document for mkdocs: block titles and lists. Links stay."""
    return "\n".join(_rendered(markdown.split("\n")))


def _rendered(lines: list[str]) -> Iterator[str]:
    fence, before = "", ""
    for line in lines:
        opened = _FENCE.match(line)
        if fence:
            fence = "" if line == fence else fence
            yield line
        elif opened:
            fence = opened[1]
            yield f'{opened[1]}{opened[2]} title="{opened[3]}"' if opened[3] else line
        else:
            yield from _item(line, before)
        before = line


def _item(line: str, before: str) -> Iterator[str]:
    """A list needs an empty line before it, and four spaces per level."""
    found = _ITEM.match(line)
    if found and before.strip() and not before.startswith(" ") and not _ITEM.match(before):
        yield ""
    yield found[1] + line if found else line


def links(markdown: str) -> list[str]:
    """The paths that a document links to."""
    return [found[2] for found in _LINK.finditer(markdown)]


def relink(markdown: str, change: Callable[[str], str]) -> str:
    """Replaces the link paths."""
    return _LINK.sub(lambda found: found[1] + change(found[2]) + found[3], markdown)


def place_of(path: str) -> str:
    """The path in the site of a file of the repository."""
    if path.startswith("docs/") and (ROOT / path).is_dir():
        path = f"{path}/index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/").removesuffix(".ipynb") + (".md" if path.endswith(".ipynb") else "")
    return f"{FOREIGN}/{path.removesuffix('.md')}.md"


def moved(link: str, document: str) -> str:
    """A link of a document, translated to paths in the site."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(document), link))
    return posixpath.relpath(place_of(target), posixpath.dirname(place_of(document)))


def foreign_page(path: str) -> str:
    """A file from outside docs/ as a page."""
    text = (ROOT / path).read_text()
    return text if path.endswith(".md") else f"# {path}\n\n````{_language(path)}\n{text}````\n"


def folder_page(folder: Path) -> str:
    """The list of a folder's documents by heading."""
    documents = [(each, each.read_text().partition("\n")[0].lstrip("# ")) for each in sorted(folder.glob("*.md"))]
    title = folder.name.capitalize()
    return "\n".join([f"# {title}", "", *(f"- [{heading}]({each.name})" for each, heading in documents), ""])


def expand(nav: list[Any], pages: list[str]) -> list[Any]:
    """The navigation with `folder/*` replaced by pages."""
    named = set(_named(nav))
    return [each for entry in nav for each in _expanded(entry, [page for page in pages if page not in named])]


def _named(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for each in entry.values() if isinstance(entry, dict) else entry:
            yield from _named(each)


def _expanded(entry: Any, others: list[str]) -> Iterator[Any]:
    if isinstance(entry, dict):
        yield {title: [each for entry in below for each in _expanded(entry, others)] for title, below in entry.items()}
    elif entry.endswith("/*"):
        yield from (page for page in others if posixpath.dirname(page) == entry.removesuffix("/*"))
    else:
        yield entry


def notebook_page(text: str) -> str:
    """A notebook as Markdown."""
    return "\n\n".join(part for cell in json.loads(text)["cells"] for part in _cell(cell)) + "\n"


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
    shown = "".join(line for output in cell.get("outputs", ()) for line in output["text"])
    if shown:
        yield f"```text output\n{shown}```"


def _language(path: str) -> str:
    return {".py": "python", ".sh": "bash", ".toml": "toml", ".json": "json"}.get(Path(path).suffix, "text")


def reached(documents: dict[str, str]) -> dict[str, str]:
    """Pages of all files outside docs/ that are linked to, directly or indirectly, by path."""
    found: dict[str, str] = {}
    waiting = dict(documents)
    while waiting:
        document, text = waiting.popitem()
        for link in links(text):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(document), link))
            if not target.startswith("docs") and target not in found and (ROOT / target).is_file():
                found[target] = foreign_page(target)
                if target.endswith(".md"):
                    waiting[target] = found[target]
    return found


# -- mkdocs hooks ------------------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Sets anchors as on GitHub."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds notebooks, folders and linked files, then expands the navigation."""
    from mkdocs.structure.files import File, InclusionLevel  # noqa: PLC0415 - installed only in .venv-docs

    for each in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(each)
        files.append(
            File.generated(config, place_of(f"docs/{each.src_uri}"), content=notebook_page(each.content_string))
        )
    for folder in FOLDERS:
        files.append(File.generated(config, place_of(folder), content=folder_page(ROOT / folder)))
    documents = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for path, text in reached(documents).items():
        page = File.generated(config, place_of(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV)
        page.edit_uri = path  # used for its links
        files.append(page)
    config.nav = expand(config.nav, sorted(file.src_uri for file in files.documentation_pages()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Adapts links first: they are relative to the document's place in the repository."""
    uri = page.file.src_uri
    document = page.file.edit_uri if uri.startswith(f"{FOREIGN}/") else f"docs/{uri}"
    return render(relink(markdown, lambda link: moved(link, document)))
