"""`python -m nexar.testing.soak`."""

import sys

from nexar.testing.soak.command import main

if __name__ == "__main__":
    sys.exit(main())
