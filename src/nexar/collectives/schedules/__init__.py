"""Collective algorithms: pure generators of steps, one file per family."""
