"""The image sets of the paper's runs (IDX files) and the digits that scikit-learn brings along."""

import gzip
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dualstore.errors import DualstoreError

__all__ = ["ImageSet", "data_folder", "load_digits", "load_idx"]


@dataclass(frozen=True)
class ImageSet:
    """Grey images (n, height, width) of bytes and labels (n,), for training and for testing."""

    name: str
    train: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test: NDArray[np.uint8]
    test_labels: NDArray[np.int64]


_MIRRORS = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion-mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
}

# SHA-256 of the compressed files as the mirrors serve them.
_HASHES = {
    "mnist": {
        "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
    "fashion-mnist": {
        "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
        "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
        "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
        "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
    },
}


def load_idx(name: str, folder: Path | None = None) -> ImageSet:
    """The set "mnist" or "fashion-mnist" from IDX files, plain or gzip.

    Looked for in `folder`, else in $DUALSTORE_DATA: there itself or in a folder named like the set. Without either they
    are downloaded once into the user's cache and their checksums verified (needs the extra `demo`).

    Raises DualstoreError where a file is missing or is not IDX.
    """
    given = data_folder(folder)
    paths = {file: _download(name, file) if given is None else _find(name, file, given) for file in _HASHES[name]}
    arrays = [_read(path) for path in paths.values()]
    for (images, labels), split in zip((arrays[:2], arrays[2:]), ("training", "test"), strict=True):
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise DualstoreError(
                f"{name}: {split} files: expected images and as many labels, found {images.shape} and {labels.shape}"
            )
    return ImageSet(name, arrays[0], arrays[1].astype(np.int64), arrays[2], arrays[3].astype(np.int64))


def data_folder(given: Path | None) -> Path | None:
    """Where data is looked for: the folder that is given, else $DUALSTORE_DATA; None without either."""
    return given or (Path(os.environ["DUALSTORE_DATA"]) if os.environ.get("DUALSTORE_DATA") else None)


def load_digits() -> ImageSet:
    """scikit-learn's 1,797 digits of 8 x 8; every fifth is a test image. Raises DualstoreError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits as bundled  # optional
    except ImportError as error:
        raise DualstoreError("the digits need scikit-learn; install it with: pip install 'dualstore[demo]'") from error
    found = bundled()
    images, labels = (found.images * 255 / 16).astype(np.uint8), found.target.astype(np.int64)
    test = np.arange(len(labels)) % 5 == 4
    return ImageSet("digits", images[~test], labels[~test], images[test], labels[test])


def _find(name: str, file: str, folder: Path) -> Path:
    for place in (folder / name, folder):
        for path in (place / file, place / file.removesuffix(".gz")):
            if path.is_file():
                return path
    raise DualstoreError(
        f"{folder}: expected {file} (or without .gz) there or in {name}/, found neither; give --data or $DUALSTORE_DATA"
    )


def _download(name: str, file: str) -> Path:
    try:
        import pooch  # optional
    except ImportError as error:
        raise DualstoreError(
            f"{name}: give --data or $DUALSTORE_DATA, or let it be downloaded: pip install 'dualstore[demo]'"
        ) from error
    try:
        cache = pooch.os_cache("dualstore") / name
        return Path(pooch.retrieve(_MIRRORS[name] + file, f"sha256:{_HASHES[name][file]}", fname=file, path=cache))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DualstoreError(f"{name}: download of {file} failed: {reason}; give a folder that has it with --data") from error


def _read(path: Path) -> NDArray[np.uint8]:
    """The array of an IDX file of bytes. Source: the format's description on the MNIST page, LeCun et al."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        raise DualstoreError(f"{path}: expected an IDX file, found {error}") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise DualstoreError(f"{path}: expected an IDX file of bytes, found the first bytes {data[:4]!r}")
    header = 4 + 4 * data[3]
    shape = tuple(np.frombuffer(data[4:header], ">u4").tolist())
    if len(data) - header != int(np.prod(shape)):
        raise DualstoreError(f"{path}: expected {shape} bytes behind the header, found {len(data) - header}")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)
