"""`python -m nexar.testing.simulator`."""

import sys

from nexar.testing.simulator.command import main

if __name__ == "__main__":  # not in the processes that it starts
    sys.exit(main())
