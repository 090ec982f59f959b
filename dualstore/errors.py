"""Every error dualstore raises on purpose.

    DualstoreError
    ├── StoreError        the files: missing, foreign, truncated, too new, already there
    │   └── DamagedError  a file that says one thing and holds another
    ├── QueryError        the question: unknown layer, test id, column, bad vector, bad SQL
    ├── RecordError       recording: wrong ids, a gradient outside `batch()`, a failed writer
    └── InexactError      values were asked of a run whose optimiser has no exact coefficients yet, or that lacks patterns

A message says where, what was expected, what was found and what to do, in one line.
"""

__all__ = [
    "DamagedError",
    "DualstoreError",
    "DualstoreWarning",
    "InexactError",
    "QueryError",
    "RecordError",
    "StoreError",
]


class DualstoreError(Exception):
    """Base of all errors that dualstore raises on purpose."""


class StoreError(DualstoreError):
    """The store's files are missing, foreign, incomplete or of a newer format."""


class DamagedError(StoreError):
    """A file of the store is truncated or contradicts itself."""


class QueryError(DualstoreError):
    """The question does not fit the store."""


class RecordError(DualstoreError):
    """Recording cannot go on without losing or mislabelling rows."""


class InexactError(DualstoreError):
    """Values were asked of a run whose optimiser has no exact coefficients, or of which only a share was recorded."""


class DualstoreWarning(UserWarning):
    """Something the user should know; the answers given stay exact, unless it says that they are estimated."""
