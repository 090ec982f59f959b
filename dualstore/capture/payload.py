"""What a person wants to see of a sample: an image as PNG, a text as UTF-8."""

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualstore.errors import RecordError

__all__ = ["encode_payloads"]


def encode_payloads(payloads: Any) -> list[tuple[bytes, str]]:
    """(bytes, MIME type) of each payload: strings, bytes, or images of (H, W), (C, H, W) or (H, W, C), C = 1 or 3.

    Images of floats are scaled together so that their smallest value is black and their largest white.
    """
    if isinstance(payloads, str | bytes) or not np.iterable(payloads):
        raise RecordError(f"samples: expected one payload a sample (images or texts), found {type(payloads).__name__}")
    payloads = list(payloads) if not hasattr(payloads, "shape") else payloads
    if len(payloads) and isinstance(payloads[0], str | bytes):
        return [_text(item) for item in payloads]
    images = [_image(item) for item in payloads]
    finite = [image[np.isfinite(image)] for image in images]
    low = min((float(values.min()) for values in finite if values.size), default=0.0)
    high = max((float(values.max()) for values in finite if values.size), default=0.0)
    return [(_png(_pixels(image, low, high)), "image/png") for image in images]


def _text(item: Any) -> tuple[bytes, str]:
    if not isinstance(item, str | bytes):
        raise RecordError(f"samples: expected texts or images, found a text and a {type(item).__name__}")
    try:
        return (item, "application/octet-stream") if isinstance(item, bytes) else (item.encode(), "text/plain")
    except UnicodeEncodeError as error:
        raise RecordError(f"samples: expected texts that can be written as UTF-8, found {item!r:.60}") from error


def _image(item: Any) -> NDArray[Any]:
    """(H, W) or (H, W, 3) numbers."""
    image = np.asarray(item)
    if image.ndim == 3 and image.shape[0] in (1, 3):
        image = np.moveaxis(image, 0, -1)  # (H, W, C)
    if image.ndim == 3 and image.shape[-1] == 1:
        image = image[..., 0]
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[-1] != 3) or not image.size:
        raise RecordError(f"samples: expected images of (H, W), (1 or 3, H, W) or (H, W, 1 or 3), found {image.shape}")
    if image.dtype.kind not in "biuf":
        raise RecordError(f"samples: expected images of numbers, found {image.dtype}")
    return image


def _pixels(image: NDArray[Any], low: float, high: float) -> NDArray[np.uint8]:
    if image.dtype == np.uint8:
        return image
    shown = np.nan_to_num(image.astype(np.float64), nan=low, posinf=high, neginf=low)
    scaled = (shown - low) * (255 / (high - low) if high > low else 0.0)
    return scaled.round().astype(np.uint8)


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """Source: PNG specification (ISO/IEC 15948), sections 5 and 9; every line unfiltered."""
    height, width = pixels.shape[:2]
    lines = np.zeros((height, 1 + pixels[0].size), np.uint8)
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if pixels.ndim == 2 else 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
