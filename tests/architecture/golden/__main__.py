"""`python -m tests.architecture.golden [--change]`: see record.py."""

import sys

from tests.architecture.golden.record import bring_up_to_date

sys.stdout.write(bring_up_to_date(change="--change" in sys.argv[1:]))
