"""The options of a recording, checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dualstore.capture.layers import Chosen
from dualstore.errors import RecordError
from dualstore.schema import DTYPES

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """The options of a recording; see `record`."""

    layers: Chosen = None
    keys_only: bool = False
    dtype: str = "float32"
    share: Any = 1.0
    every: int = 1
    positions: Sequence[int] | None = None
    seed: int = 0
    max_bytes: int | None = None
    sampler: Any = None
    resume: bool = False
    queue_bytes: int | None = None
    flush_s: float = 60.0
    index: bool = True
    audit_every: int = 50
    blocks: Chosen = None
    branch: str | None = None
    maker: str = ""

    def check(self) -> None:
        """Raises RecordError for an argument of the wrong kind."""
        if self.dtype not in DTYPES:
            raise RecordError(f"dtype: expected {', '.join(map(repr, DTYPES[:-1]))} or {DTYPES[-1]!r}, found {self.dtype!r}")
        for name, value, kinds in (
            ("flush_s", self.flush_s, (int, float)),
            ("queue_bytes", self.queue_bytes or 0, int),
            ("audit_every", self.audit_every, int),
            ("max_bytes", self.max_bytes or 0, int),
            ("seed", self.seed, int),
            ("maker", self.maker, str),
        ):
            if not isinstance(value, kinds) or value != value:
                raise RecordError(f"{name}: expected a {'text' if kinds is str else 'number'}, found {value!r}")
        for name, number in (("audit_every", self.audit_every), ("max_bytes", self.max_bytes or 0), ("seed", self.seed)):
            if number < 0:
                raise RecordError(f"{name}: expected 0 or more, found {number}")
        for name, chosen in (("layers", self.layers), ("blocks", self.blocks)):
            text = isinstance(chosen, str) or not isinstance(chosen, Sequence | None)
            if text or any(not isinstance(one, str | type) for one in chosen or ()):
                raise RecordError(f"{name}: expected names and types of modules, as in ['encoder.*', nn.Linear], found {chosen!r}")
        if self.branch is not None and not (isinstance(self.branch, str) and self.branch and self.blocks):
            raise RecordError(f"branch: expected the name of a submodule of each of blocks=, found {self.branch!r}")
