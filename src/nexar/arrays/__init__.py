"""Arrays: dtypes, bytes, reductions, devices and compression."""
