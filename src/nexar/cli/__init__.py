"""The `nexar` command."""
