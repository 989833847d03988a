"""These tests need torch, which is large: they run with `make test-torch`, in an environment of their own."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


def pytest_configure(config):  # what torch says of its own modules is nothing that we could mend
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script` is deprecated:DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit:DeprecationWarning")
