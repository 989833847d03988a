"""Bytes ⇄ meaning. Pure: nothing here performs I/O, reads a clock or holds a lock."""
