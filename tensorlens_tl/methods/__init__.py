"""Attribution methods, one file each; importing this package registers them."""

from tensorlens_tl.methods.tensorlens import tensorlens

__all__ = ["tensorlens"]
