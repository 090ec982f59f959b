"""Fixtures shared by all tests: shape checks while tests run, small recorded stores, the folder of real data."""

import os
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side; spinning threads would slow each other
HOOKED = (
    "capture", "coefficients", "experiments", "kernels", "keys", "log", "parameters", "part", "probes", "ranking", "rows", "scan",
    "sharing", "steps", "totals", "weights",
)  # fmt: skip
"""Modules whose signatures are checked while tests run: those that take arrays."""
install_import_hook([f"dualstore.{name}" for name in HOOKED], "beartype.beartype")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data sets: $DUALSTORE_DATA or ../shared/data. Skips where there is none."""
    root = Path(__file__).resolve().parents[1]
    for place in (os.environ.get("DUALSTORE_DATA"), root / ".." / "shared" / "data"):
        if place and (Path(place) / "mnist").is_dir():
            return Path(place).resolve()
    pytest.skip("needs MNIST in $DUALSTORE_DATA or ../shared/data")
