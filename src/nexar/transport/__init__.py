"""Frames between two processes, on whatever the two share. `base` is the contract, each folder one way to keep it."""
