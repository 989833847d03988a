"""The reference says what the code says."""

import pytest

from tests.architecture.reference import pages
from tests.architecture.sources import shown


@pytest.mark.parametrize("path", list(pages()), ids=shown)
def test_a_page_that_is_made_from_the_code_is_up_to_date(path):
    assert path.read_text() == pages()[path], "write it anew: python -m tests.architecture.reference"
