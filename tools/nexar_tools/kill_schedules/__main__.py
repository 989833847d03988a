"""`python -m nexar_tools.kill_schedules`."""

import sys

from nexar_tools.kill_schedules.command import main

if __name__ == "__main__":
    sys.exit(main())
