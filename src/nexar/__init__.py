"""nexar: a distributed runtime for Python."""
