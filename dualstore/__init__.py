"""dualstore: record a training run once, then ask exactly which training events drive a prediction.

`record` writes a store while a model trains; `open` reads it. Only what records needs torch, and imports it when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dualstore.coefficients import Average
from dualstore.errors import (
    DamagedError,
    DualstoreError,
    DualstoreWarning,
    InexactError,
    QueryError,
    RecordError,
    StoreError,
)
from dualstore.merge import merge_stores
from dualstore.result import Result
from dualstore.store import Store
from dualstore.store import open_store as open

if TYPE_CHECKING:
    from dualstore.capture import Recorder, indexed, record

__version__ = "0.1.0"

__all__ = [
    "Average",
    "DamagedError",
    "DualstoreError",
    "DualstoreWarning",
    "InexactError",
    "QueryError",
    "RecordError",
    "Recorder",
    "Result",
    "Store",
    "StoreError",
    "indexed",
    "merge_stores",
    "open",
    "record",
]


def __getattr__(name: str) -> Any:
    if name in ("Recorder", "indexed", "record"):
        from dualstore import capture  # brings torch, over a second

        return getattr(capture, name)
    if name in ("hf", "lightning"):
        return import_module(f"dualstore.{name}")  # needs the extra of that name
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
