"""The native part of nexar. `quic`: QUIC with mutual TLS. `bulk`: large transfers over TCP. `exit_watch`: the end of
local processes. `reduce`: element-wise reductions. `shm`: collectives through shared memory.

The submodules are parts of one extension module. Registering them here makes `import nexar_native.quic` work.
"""

import sys

from nexar_native._native import __version__, bulk, exit_watch, quic, reduce, shm

for _module in (bulk, exit_watch, quic, reduce, shm):
    sys.modules[_module.__name__] = _module
del _module

__all__ = ["__version__", "bulk", "exit_watch", "quic", "reduce", "shm"]
