"""The few lines of Thrift's compact protocol that Parquet's page headers and footers need.

A struct to write is a list of `(field id, type, value)` in ascending order of id; a struct read is a dict
from field id to value. Source: Apache Thrift, `doc/specs/thrift-compact-protocol.md`.
"""

import struct
from collections.abc import Iterable
from typing import Any

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)

Field = tuple[int, int, Any]
"""(id, type, value); the value of a LIST is `(element type, values)`, that of a STRUCT a list of fields."""


def varint(value: int) -> bytes:
    """`value` >= 0 in base 128, least significant digits first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode(fields: Iterable[Field]) -> bytes:
    """The struct's bytes, closing stop byte included."""
    out, last = bytearray(), 0
    for number, kind, value in fields:
        gap = number - last
        out += bytes([gap << 4 | kind]) if gap < 16 else bytes([kind]) + varint(number << 1)
        out += _encode_value(kind, value)
        last = number
    return bytes(out) + b"\0"


def _encode_value(kind: int, value: Any) -> bytes:
    if kind in (I16, I32, I64):
        return varint(value << 1 if value >= 0 else (-value << 1) - 1)
    if kind == BINARY:
        data = value.encode() if isinstance(value, str) else value
        return varint(len(data)) + data
    if kind == STRUCT:
        return encode(value)
    if kind == LIST:
        element, items = value
        short = len(items) < 15
        head = bytes([len(items) << 4 | element]) if short else bytes([0xF0 | element]) + varint(len(items))
        return head + b"".join(_encode_value(element, item) for item in items)
    raise ValueError(f"dualstore writes no thrift values of type {kind}")


_MAX_DEPTH = 16


class Decoder:
    """Reads structs from `data`; `at` is the offset of the next unread byte."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0
        self._depth = 0

    def struct(self) -> dict[int, Any]:
        """The struct that starts at `at`. Raises IndexError where `data` ends too early."""
        if self._depth == _MAX_DEPTH:
            raise IndexError("structs are nested too deep")
        self._depth += 1
        fields: dict[int, Any] = {}
        last = 0
        while head := self._byte():
            last = last + (head >> 4) if head >> 4 else self._zigzag()
            fields[last] = self._value(head & 0x0F)
        self._depth -= 1
        return fields

    def _value(self, kind: int) -> Any:
        if kind in (TRUE, FALSE):
            return kind == TRUE
        if kind == BYTE:
            return self._byte()
        if kind in (I16, I32, I64):
            return self._zigzag()
        if kind == DOUBLE:
            return struct.unpack("<d", self._bytes(8))[0]
        if kind == BINARY:
            return self._bytes(self._varint())
        if kind in (LIST, SET):
            head = self._byte()
            size = head >> 4 if head >> 4 < 15 else self._varint()
            kind = head & 0x0F
            if kind in (TRUE, FALSE):
                return [self._byte() == TRUE for _ in range(size)]
            return [self._value(kind) for _ in range(size)]
        if kind == STRUCT:
            return self.struct()
        raise IndexError(f"unknown thrift type {kind}")

    def _byte(self) -> int:
        value: int = self.data[self.at]
        self.at += 1
        return value

    def _bytes(self, size: int) -> bytes:
        value = bytes(self.data[self.at : self.at + size])
        if len(value) < size:
            raise IndexError("the data ends inside a thrift value")
        self.at += size
        return value

    def _varint(self) -> int:
        value = shift = 0
        while shift < 70:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise IndexError("a number has more than 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
