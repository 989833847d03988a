"""Calling functions of other ranks: who serves what, who waits for which answer."""
