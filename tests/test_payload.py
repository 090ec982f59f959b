"""What a person sees of a sample: images survive as PNG, texts as UTF-8, and both come back from the store by SQL."""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import dualstore
from dualstore.capture.payload import encode_payloads
from dualstore.errors import RecordError

GREY = np.arange(20, dtype=np.uint8).reshape(4, 5) * 12
COLOUR = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)


def decode_png(data: bytes) -> NDArray[np.uint8]:
    """(H, W) or (H, W, 3) pixels of an 8-bit PNG whose lines are unfiltered. Checks signature and checksums."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks: list[tuple[bytes, bytes]] = []
    at = 8
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", data, at + 8 + size) == (zlib.crc32(name + body),)
        chunks.append((name, body))
        at += 12 + size
    assert [name for name, _ in chunks] == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, colour, *rest = struct.unpack(">IIBBBBB", chunks[0][1])
    assert (depth, rest) == (8, [0, 0, 0])
    channels = {0: 1, 2: 3}[colour]
    lines = np.frombuffer(zlib.decompress(chunks[1][1]), np.uint8).reshape(height, 1 + width * channels)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape((height, width) if channels == 1 else (height, width, 3))


def images(payloads: Any) -> list[NDArray[np.uint8]]:
    encoded = encode_payloads(payloads)
    assert {mime for _, mime in encoded} == {"image/png"}
    return [decode_png(data) for data, _ in encoded]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (GREY, GREY),
        (GREY[None], GREY),
        (GREY[..., None], GREY),
        (COLOUR, COLOUR),
        (np.moveaxis(COLOUR, -1, 0), COLOUR),
        (GREY[:1, :1], GREY[:1, :1]),
    ],
    ids=["(H, W)", "(1, H, W)", "(H, W, 1)", "(H, W, 3)", "(3, H, W)", "one pixel"],
)
def test_bytes_come_back_as_they_were(given: NDArray[np.uint8], shown: NDArray[np.uint8]) -> None:
    for found in images([given, given]):
        np.testing.assert_array_equal(found, shown)
    np.testing.assert_array_equal(images(np.stack([given]))[0], shown)
    np.testing.assert_array_equal(images(torch.from_numpy(np.stack([given])))[0], shown)


def test_floats_are_scaled_from_the_smallest_to_the_largest_value_of_all_images() -> None:
    dark, bright = np.array([[-1.0, 0.0]]), np.array([[1.0, 3.0]])
    first, second = images([dark, bright])
    np.testing.assert_array_equal(first, [[0, 64]])
    np.testing.assert_array_equal(second, [[128, 255]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, bool])
def test_two_values_become_black_and_white_whatever_their_type(dtype: Any) -> None:
    (found,) = images([np.array([[0, 1], [1, 0]], dtype)])
    np.testing.assert_array_equal(found, [[0, 255], [255, 0]])


def test_floats_of_three_channels_are_scaled_together() -> None:
    (found,) = images(torch.tensor([[[[0.0, 0.5]], [[1.0, 0.0]], [[0.0, 0.2]]]]))
    np.testing.assert_array_equal(found, [[[0, 255, 0], [128, 0, 51]]])


def test_a_constant_image_is_black() -> None:
    np.testing.assert_array_equal(images([np.full((2, 2), 7.5)])[0], np.zeros((2, 2)))


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_pixels_that_are_no_numbers_do_not_darken_the_others(odd: float) -> None:
    (found,) = images([np.array([[0.0, 1.0, odd]])])
    np.testing.assert_array_equal(found[:, :2], [[0, 255]])


def test_text_is_stored_as_utf_8_and_bytes_as_they_are() -> None:
    assert encode_payloads(["käse", ""]) == [("käse".encode(), "text/plain"), (b"", "text/plain")]
    assert encode_payloads([b"\x00\xff"]) == [(b"\x00\xff", "application/octet-stream")]
    assert encode_payloads(np.array(["a", "b"])) == [(b"a", "text/plain"), (b"b", "text/plain")]


def test_no_payloads_are_no_payloads() -> None:
    assert encode_payloads([]) == []


@pytest.mark.parametrize(
    "wrong",
    [np.zeros(4), np.zeros((2, 4, 5)), np.zeros((4, 5, 2)), np.zeros((1, 2, 3, 4)), np.zeros((0, 5)), np.zeros((4, 0, 3))],
    ids=lambda image: str(image.shape),
)
def test_shapes_that_are_no_image_are_refused(wrong: NDArray[np.float64]) -> None:
    with pytest.raises(RecordError, match="expected images of"):
        encode_payloads([wrong])


@pytest.mark.parametrize("wrong", [None, "one text for all", b"bytes", 5, np.float32(3)], ids=repr)
def test_one_payload_for_all_samples_is_refused(wrong: Any) -> None:
    with pytest.raises(RecordError, match="expected one payload a sample"):
        encode_payloads(wrong)


def test_texts_and_images_in_one_call_are_refused() -> None:
    with pytest.raises(RecordError, match="samples"):
        encode_payloads(["text", GREY])
    with pytest.raises(RecordError, match="samples"):
        encode_payloads([GREY, "text"])


def recorder(path: Path) -> dualstore.Recorder:
    model = nn.Linear(2, 2)
    return dualstore.record(model, torch.optim.SGD(model.parameters(), lr=0.1), path)


@pytest.mark.parametrize("queue_bytes", [0, 1 << 20])
def test_samples_come_back_from_sql_with_label_and_task(tmp_path: Path, queue_bytes: int) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualstore.record(model, optimizer, tmp_path / "store", queue_bytes=queue_bytes) as recording:
        recording.samples([7, 3], [1, 0], torch.from_numpy(np.stack([GREY, GREY + 1])), task="pictures")
        recording.samples(np.array([9]), None, ["ein Satz"])
        recording.samples([11], [4], [b"raw"], task=["bytes"])
    store = dualstore.open(tmp_path / "store")
    rows = store.sql("SELECT sample_id, task, label, payload, mime FROM samples ORDER BY sample_id").to_dicts()
    assert [(row["sample_id"], row["task"], row["label"], row["mime"]) for row in rows] == [
        (3, "pictures", 0, "image/png"),
        (7, "pictures", 1, "image/png"),
        (9, None, -1, "text/plain"),
        (11, "bytes", 4, "application/octet-stream"),
    ]
    np.testing.assert_array_equal(decode_png(rows[0]["payload"]), GREY + 1)
    np.testing.assert_array_equal(decode_png(rows[1]["payload"]), GREY)
    assert [row["payload"] for row in rows[2:]] == [b"ein Satz", b"raw"]
    assert store.info()["samples"] == 4


def test_images_that_carry_a_gradient_are_stored(tmp_path: Path) -> None:
    with recorder(tmp_path / "store") as recording:
        recording.samples([0], [0], torch.ones(1, 2, 2, requires_grad=True))
    assert dualstore.open(tmp_path / "store").info()["samples"] == 1


def test_a_store_without_samples_answers_with_no_rows(tmp_path: Path) -> None:
    recorder(tmp_path / "store").close()
    assert len(dualstore.open(tmp_path / "store").sql("SELECT * FROM samples")) == 0


def test_as_many_payloads_as_ids_are_expected(tmp_path: Path) -> None:
    with recorder(tmp_path / "store") as recording:
        with pytest.raises(RecordError, match=r"samples\(\): expected 2 payloads, one for each id, found 1"):
            recording.samples([1, 2], [0, 0], ["one"])
        with pytest.raises(RecordError, match=r"samples\(\): expected 2 labels"):
            recording.samples([1, 2], [0], ["one", "two"])
        with pytest.raises(RecordError, match=r"samples\(\): ids: expected whole numbers"):
            recording.samples(["a"], [0], ["one"])
    assert dualstore.open(tmp_path / "store").info()["samples"] == 0
