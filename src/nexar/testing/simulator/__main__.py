"""`python -m nexar.testing.simulator`."""

import sys

from nexar.testing.simulator.command import main

if __name__ == "__main__":  # not in the worker processes it starts
    sys.exit(main())
