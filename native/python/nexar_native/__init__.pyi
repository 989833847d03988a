from nexar_native import bulk as bulk
from nexar_native import exit_watch as exit_watch
from nexar_native import quic as quic
from nexar_native import reduce as reduce
from nexar_native import shm as shm

__version__: str
__all__ = ["__version__", "bulk", "exit_watch", "quic", "reduce", "shm"]
