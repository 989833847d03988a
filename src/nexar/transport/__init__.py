"""Transports move frames and payloads between two processes; `base` is their contract."""
