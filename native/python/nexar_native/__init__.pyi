from nexar_native import quic as quic
from nexar_native import reduce as reduce

__version__: str
__all__ = ["__version__", "quic", "reduce"]
