"""IDX files of small pictures that a network can learn, for tests of the image experiments."""

import gzip
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["write_idx", "write_sets"]

SIDE = 6


def write_idx(path: Path, array: NDArray[np.integer], *, packed: bool) -> None:
    """Writes an IDX file of bytes."""
    data = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()
    if packed:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(data))
    else:
        path.write_bytes(data)


def write_sets(folder: Path, train: int = 40, test: int = 12) -> Path:
    """Both image sets, labels in turns; each class has a pattern of its own, under noise."""
    for number, (name, packed) in enumerate((("mnist", True), ("fashion-mnist", False))):
        place = folder / name
        place.mkdir(parents=True)
        generator = np.random.default_rng(number)
        patterns = generator.integers(0, 200, (10, SIDE, SIDE))
        for split, count in (("train", train), ("t10k", test)):
            labels = np.arange(count) % 10
            pictures = patterns[labels] + generator.integers(0, 56, (count, SIDE, SIDE))
            write_idx(place / f"{split}-images-idx3-ubyte", pictures, packed=packed)
            write_idx(place / f"{split}-labels-idx1-ubyte", labels, packed=packed)
    return folder
