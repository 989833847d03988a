"""Transports move frames and payloads between two processes. `base` is the contract; each subpackage implements it."""
