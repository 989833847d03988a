"""The native part of nexar. `quic`: QUIC with mutual TLS. `reduce`: element-wise reductions.

The submodules are parts of one extension module. Registering them here makes `import nexar_native.quic` work.
"""

import sys

from nexar_native._native import __version__, quic, reduce

sys.modules[quic.__name__] = quic
sys.modules[reduce.__name__] = reduce

__all__ = ["__version__", "quic", "reduce"]
