from nexar_native import quic as quic

__version__: str
__all__ = ["__version__", "quic"]
