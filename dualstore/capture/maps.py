"""A linear map inside a module: its name there, its size, and which of the module's parameters it is made of."""

from dataclasses import dataclass

from dualstore.schema import Place

__all__ = ["Map"]


@dataclass(frozen=True)
class Map:
    """y = W x + b with W of shape (d_out, d_in); parameters are named as the module names them."""

    suffix: str
    """Names it among the maps of the module; empty where it is the only one."""
    d_in: int
    d_out: int
    weight: tuple[Place, ...]
    """What W consists of, side by side."""
    biases: tuple[Place, ...] = ()
    """What b is the sum of."""
