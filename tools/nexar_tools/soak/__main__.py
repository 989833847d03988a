"""`python -m nexar_tools.soak`."""

import sys

from nexar_tools.soak.command import main

if __name__ == "__main__":
    sys.exit(main())
