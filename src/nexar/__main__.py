"""`python -m nexar` is the command `nexar`."""

from nexar.cli.main import main

if __name__ == "__main__":
    main()
