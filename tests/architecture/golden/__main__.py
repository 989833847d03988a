"""`python -m tests.architecture.golden [--change]`: see book.py."""

import sys

from tests.architecture.golden.book import bring_up_to_date

sys.stdout.write(bring_up_to_date(change="--change" in sys.argv[1:]))
