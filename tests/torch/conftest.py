"""These tests need torch, which is large: they run with `make test-torch`, in an environment of their own."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
