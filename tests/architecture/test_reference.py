"""The reference says what the code says."""

import re

import pytest

import nexar
from tests.architecture.reference import FOLDER, pages
from tests.architecture.sources import shown


@pytest.mark.parametrize("path", list(pages()), ids=shown)
def test_a_page_that_is_made_from_the_code_is_up_to_date(path):
    assert path.read_text() == pages()[path], "write it anew: python -m tests.architecture.reference"


def test_the_pages_describe_every_public_name():
    stated = "".join((FOLDER / page).read_text() for page in ("api.md", "errors.md"))
    named = re.findall(r"^#+ (?:Returns: )?(\w+)$|^- `(\w+)`|^ *- \*\*(\w+)\*\*", stated, re.MULTILINE)
    assert set(nexar.__all__) <= {name for names in named for name in names}
