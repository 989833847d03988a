"""`nexar doctor`: finds problems of this machine, or between machines, and says what to change."""
