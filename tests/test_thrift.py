"""thrift: a struct comes back as it was written, and damaged bytes end in an IndexError, never in anything else."""

import struct
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualstore.thrift import BINARY, BYTE, DOUBLE, FALSE, I16, I32, I64, LIST, MAP, STRUCT, TRUE, Decoder, Field, encode, varint

ENDS = "out of bounds|ends inside|unknown thrift type"

Typed = tuple[int, Any]
"""A type and a value as the encoder takes it."""


def decode(data: bytes) -> dict[int, Any]:
    return Decoder(memoryview(data)).struct()


def plain(kind: int, value: Any) -> Any:
    """What the decoder gives for a value that the encoder was given."""
    if kind == BINARY:
        return value.encode() if isinstance(value, str) else value
    if kind == LIST:
        return [plain(value[0], item) for item in value[1]]
    if kind == STRUCT:
        return plain_struct(value)
    return value


def plain_struct(fields: Sequence[Field]) -> dict[int, Any]:
    return {number: plain(kind, value) for number, kind, value in fields}


def whole(kind: int, bits: int) -> st.SearchStrategy[Typed]:
    return st.tuples(st.just(kind), st.integers(-(1 << bits - 1), (1 << bits - 1) - 1))


def structs(values: st.SearchStrategy[Typed], gaps: st.SearchStrategy[int]) -> st.SearchStrategy[list[Field]]:
    """Structs of such values, field ids ascending by such gaps."""

    def number(pairs: list[tuple[int, Typed]]) -> list[Field]:
        fields: list[Field] = []
        last = 0
        for gap, (kind, value) in pairs:
            last += gap
            fields.append((last, kind, value))
        return fields

    return st.lists(st.tuples(gaps, values), max_size=5).map(number)


def lists(scalars: Sequence[st.SearchStrategy[Typed]]) -> st.SearchStrategy[Typed]:
    """Lists of one kind of scalar, shorter and longer than the 15 where the head changes its form."""

    def build(pairs: list[Typed]) -> Typed:
        return LIST, (pairs[0][0] if pairs else I32, [value for _, value in pairs])

    return st.one_of([st.lists(scalar, max_size=18).map(build) for scalar in scalars])


def nest(values: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    inner = structs(values, st.integers(1, 15))
    listed = st.lists(inner, max_size=4).map(lambda items: (LIST, (STRUCT, items)))
    return inner.map(lambda fields: (STRUCT, fields)) | listed


SCALARS = [whole(I16, 16), whole(I32, 32), whole(I64, 64), st.tuples(st.just(BINARY), st.binary(max_size=20) | st.text(max_size=8))]
VALUES = st.recursive(st.one_of(SCALARS) | lists(SCALARS), nest, max_leaves=8)
STRUCTS = structs(VALUES, st.integers(1, 15))


@settings(max_examples=40, deadline=None)
@given(STRUCTS)
def test_what_is_encoded_is_decoded_again(fields: list[Field]) -> None:
    decoder = Decoder(memoryview(encode(fields) + b"what follows"))
    assert decoder.struct() == plain_struct(fields)
    assert bytes(decoder.data[decoder.at :]) == b"what follows"


@settings(max_examples=20, deadline=None)
@given(STRUCTS, st.data())
def test_a_truncated_struct_is_an_index_error(fields: list[Field], data: st.DataObject) -> None:
    whole_struct = encode(fields)
    cut = data.draw(st.integers(0, len(whole_struct) - 1))
    with pytest.raises(IndexError, match=ENDS):
        decode(whole_struct[:cut])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_struct_or_an_index_error(data: bytes) -> None:
    try:
        found = decode(data)
    except IndexError:
        return
    assert isinstance(found, dict)


@pytest.mark.parametrize("gap", [1, 14, 15, 16, 17, 127, 128, 1000, 32_000])
def test_field_ids_may_lie_far_apart(gap: int) -> None:
    fields: list[Field] = [(gap, I32, -7), (gap + 1, BINARY, b"next")]
    assert decode(encode(fields)) == {gap: -7, gap + 1: b"next"}


@pytest.mark.parametrize("size", [0, 1, 14, 15, 16, 127, 128, 1000])
def test_lists_of_every_length_come_back(size: int) -> None:
    values = list(range(-size // 2, size - size // 2))[:size]
    assert decode(encode([(1, LIST, (I64, values)), (2, I32, 5)])) == {1: values, 2: 5}


@pytest.mark.parametrize("value", [0, 1, -1, 63, -64, 64, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)])
def test_whole_numbers_come_back_at_their_limits(value: int) -> None:
    assert decode(encode([(3, I64, value)])) == {3: value}


def test_the_bytes_are_those_of_the_specification() -> None:
    """Worked by hand from the protocol's text: delta and type in one byte, zigzag varints, a stop byte."""
    assert encode([(1, I32, 1), (3, I64, -1), (4, BINARY, "ab")]) == bytes([0x15, 0x02, 0x26, 0x01, 0x18, 0x02, 0x61, 0x62, 0x00])
    assert varint(300) == bytes([0xAC, 0x02])


def test_types_that_only_others_write_are_read() -> None:
    number = 0.1
    head = bytes([0x10 | TRUE, 0x10 | FALSE, 0x10 | BYTE, 0x7F, 0x10 | DOUBLE])
    assert decode(head + struct.pack("<d", number) + b"\0") == {1: True, 2: False, 3: 0x7F, 4: number}


def test_a_field_id_in_its_long_form_is_read() -> None:
    assert decode(bytes([I32]) + varint(300 << 1) + bytes([0x0A, 0x10 | I32, 0x0C, 0x00])) == {300: 5, 301: 6}


def test_booleans_in_a_list_take_a_byte_each() -> None:
    assert decode(bytes([0x10 | LIST, 0x20 | TRUE, 1, 2, 0x10 | I32, 0x0C, 0x00])) == {1: [True, False], 2: 6}


def test_a_struct_nested_without_end_is_an_index_error() -> None:
    with pytest.raises(IndexError, match=r"nested|out of bounds"):
        decode(bytes([0x10 | STRUCT]) * 60_000)


def test_a_number_of_more_bits_than_the_format_has_is_an_index_error() -> None:
    assert decode(bytes([0x10 | I64]) + b"\xff" * 9 + b"\x01\x00") == {1: -(2**63)}
    with pytest.raises(IndexError, match=r"number|varint|bits|bytes"):
        decode(bytes([0x10 | I64]) + b"\xff" * 10 + b"\x01\x00")


def test_a_map_is_an_index_error() -> None:
    with pytest.raises(IndexError, match="unknown thrift type 11"):
        decode(bytes([0x10 | MAP, 0x00, 0x00]))


@pytest.mark.parametrize("kind", [TRUE, FALSE, BYTE, DOUBLE, MAP])
def test_types_that_no_header_needs_are_not_written(kind: int) -> None:
    with pytest.raises(ValueError, match=f"no thrift values of type {kind}"):
        encode([(1, kind, 1)])
