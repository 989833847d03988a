"""The site that `make docs` builds: what its navigation, its links and its pages rest on, checked without mkdocs."""

import json
import re

import yaml

from setup.site import ROOT, expand, folder_page, links, moved, notebook_page, place_of, reached, relink, render, slug
from tests.architecture.snippets import DOCUMENTS, SHELL, snippets
from tests.architecture.sources import files, shown

DOCS = ROOT / "docs"
PAGES = sorted(place_of(shown(path)) for path in files(".md", ".ipynb", below=DOCS))
NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
ANCHORED = re.compile(r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)")


def entries(nav):
    """All pages of a navigation, in its order."""
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for below in entry.values():
                yield from entries(below)


def headings(path):
    """The anchors of a document. What is fenced is no heading."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {slug(re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", heading)) for heading in found}


def test_the_navigation_names_every_page_once():
    named = list(entries(expand(NAV, PAGES)))
    assert sorted(named) == sorted([*PAGES, place_of("docs/explain/decisions")])


def test_a_link_to_a_heading_leads_to_one():
    links = [(document, *link) for document in DOCUMENTS for link in ANCHORED.findall(document.read_text())]
    targets = [(document, document.parent / path if path else document, anchor) for document, path, anchor in links]
    assert [(shown(document), anchor) for document, path, anchor in targets if anchor not in headings(path)] == []


def test_every_file_of_the_repository_that_a_document_names_is_a_page():
    documents = {shown(path): path.read_text() for path in files(".md", below=DOCS)}
    pages = reached(documents)
    assert "examples/first_all_reduce.py" in pages
    assert "CONTRIBUTING.md" in pages
    places = {place_of(path) for path in pages} | {place_of("docs/explain/decisions")}
    places |= {place_of(shown(path)) for path in DOCS.rglob("*") if path.is_file()}
    for document, text in {**documents, **pages}.items():
        if document.endswith(".md"):
            for link in links(text):
                place = moved(link, document)
                folder = place_of(document).rpartition("/")[0]
                assert (DOCS / folder / place).resolve().relative_to(DOCS).as_posix() in places, f"{document}: {link}"


def test_the_list_of_examples_names_each_of_them():
    text = (DOCS / "howto" / "examples.md").read_text()
    for example in sorted((ROOT / "examples").glob("*.py")):
        assert f"](../../examples/{example.name})" in text
        command = re.search(r"^ *((?:nexar run|python) .*?examples/\w+\.py)", example.read_text(), re.MULTILINE)
        assert command is not None, f"{example.name} does not say how to run it"
        assert f"`{command[1]}`" in text


def test_a_block_with_a_name_has_it_as_its_title():
    assert render("```python hello.py\n- no list\n```\n```sh\nls\n```") == (
        '```python title="hello.py"\n- no list\n```\n```sh\nls\n```'
    )


def test_a_list_begins_and_nests_as_it_does_on_github():
    assert render("New\n- one\n  - two\n  goes on\n- three") == "New\n\n- one\n    - two\n  goes on\n- three"


def test_links_follow_their_documents():
    assert moved("../../examples/pipeline.py", "docs/tutorial/x.md") == "../repository/examples/pipeline.py.md"
    assert moved("../explain/decisions/", "docs/howto/x.md") == "../explain/decisions/index.md"
    assert moved("docs/explain/map.md", "README.md") == "../explain/map.md"
    assert moved("../notebooks/first-steps.ipynb", "docs/howto/x.md") == "../notebooks/first-steps.md"
    assert relink("[a](b.md#c) [d](https://e) [f](#g)", str.upper) == "[a](B.MD#c) [d](https://e) [f](#g)"


def test_anchors_are_those_of_github():
    assert slug("`nexar run`: what it does, and why") == "nexar-run-what-it-does-and-why"
    assert slug("Größe (4.2)") == "größe-42"


def test_a_notebook_becomes_texts_code_and_what_was_shown():
    cells = [
        {"cell_type": "markdown", "source": ["# One\n", "two"]},
        {"cell_type": "code", "source": ["print(3)"], "outputs": [{"text": ["3\n"]}]},
        {"cell_type": "code", "source": ["x = 4"], "outputs": []},
    ]
    page = notebook_page(json.dumps({"cells": cells}))
    assert page == "# One\ntwo\n\n```python\nprint(3)\n```\n\n```text output\n3\n```\n\n```python\nx = 4\n```\n"


def test_a_folder_is_a_list_of_its_documents():
    assert "- [0005 Links: locking, credit, closing](0005-links.md)" in folder_page(DOCS / "explain" / "decisions")


def test_every_example_is_run_by_a_test():
    typed = [snippet.text for snippet in snippets(*SHELL)]
    tests = [path.read_text() for path in files(".py", below=ROOT / "tests") if path.name.startswith("test_")]
    for example in sorted((ROOT / "examples").glob("*.py")):
        typing = any(f"examples/{example.name}" in text for text in typed)
        assert typing or any(f'"{example.stem}' in text for text in tests), f"nobody runs {example.name}"
