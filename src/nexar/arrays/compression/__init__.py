"""Compression of arrays for all_reduce_compressed."""
