"""Array types with shapes for signatures: jaxtyping's where it is loaded, as while tests run, else stand-ins.

`Float[ndarray, "n d"]` says dtype and shape; tests check both at run time. A command-line query does not pay for that.
"""

import sys
from typing import TYPE_CHECKING, Any

__all__ = ["Bool", "Float", "Float32", "Float64", "Int32", "Int64"]

if TYPE_CHECKING or "jaxtyping" in sys.modules:
    from jaxtyping import Bool, Float, Float32, Float64, Int32, Int64
else:

    class _Shaped:
        def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
            return item[0]

    Bool = Float = Float32 = Float64 = Int32 = Int64 = _Shaped
