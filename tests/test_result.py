"""An answer shows itself as text and as HTML and turns into data frames and dicts without losing anything."""

import re

import polars
import pyarrow as pa
import pytest

from dualstore.result import Result, format_value


@pytest.fixture
def result() -> Result:
    table = pa.table({"rank": [1, 2], "alpha": [1 / 3, -1e-9], "task": pa.array(["a<b>&\"c'", None])})
    return Result(table, "top 2 where task = '<i>'")


def numbers(count: int) -> Result:
    return Result(pa.table({"n": list(range(count))}), "numbers")


def test_an_answer_is_an_arrow_table_with_named_columns(result: Result) -> None:
    assert result.to_arrow() is result.table
    assert result.columns == ["rank", "alpha", "task"]
    assert len(result) == 2


def test_rows_come_as_dicts_in_order(result: Result) -> None:
    expected = [{"rank": 1, "alpha": 1 / 3, "task": "a<b>&\"c'"}, {"rank": 2, "alpha": -1e-9, "task": None}]
    assert result.to_dicts() == expected
    assert list(result) == expected


def test_a_polars_frame_holds_the_same_values_and_types(result: Result) -> None:
    frame = result.to_polars()
    assert frame.to_dicts() == result.to_dicts()
    assert frame.schema == {"rank": polars.Int64, "alpha": polars.Float64, "task": polars.String}
    vectors = Result(pa.table({"x": pa.array([[1, 2]], pa.list_(pa.float32(), 2))}), "vectors")
    assert vectors.to_polars().to_dicts() == [{"x": [1.0, 2.0]}]


def test_text_has_the_title_and_aligned_columns(result: Result) -> None:
    assert repr(result).splitlines() == [
        "top 2 where task = '<i>'",
        "rank     alpha      task",
        "   1  0.333333  a<b>&\"c'",
        "   2    -1e-09          ",
    ]


def test_html_is_escaped(result: Result) -> None:
    shown = result._repr_html_()
    assert "<caption>top 2 where task = &#x27;&lt;i&gt;&#x27;</caption>" in shown
    assert "<td>a&lt;b&gt;&amp;&quot;c&#x27;</td>" in shown
    assert re.findall("<th>(.*?)</th>", shown) == ["rank", "alpha", "task"]
    assert "<td></td>" in shown
    odd = Result(pa.table({"<script>": ["</table>"]}), "t")._repr_html_()
    assert "<script>" not in odd
    assert odd.count("</table>") == 1


@pytest.mark.parametrize("count", [0, 1, 99, 100, 101, 1234])
def test_long_answers_are_shown_shortened_and_say_so(count: int) -> None:
    result = numbers(count)
    lines, shown = repr(result).splitlines(), result._repr_html_()
    assert len(lines) == 2 + min(count, 100) + (count > 100)
    assert shown.count("<tr><td>") == min(count, 100)
    if count > 100:
        assert re.fullmatch(rf"… and {count - 100} more rows?", lines[-1])
        assert f"… and {count - 100} more row" in shown
    assert len(result.to_dicts()) == len(result) == count


def test_an_answer_without_columns_is_only_its_title() -> None:
    empty = Result(pa.table({}), "nothing")
    assert repr(empty).strip() == "nothing"
    assert "<td>" not in empty._repr_html_()
    assert empty.to_dicts() == []


def test_columns_of_the_same_name_are_all_shown() -> None:
    twice = Result(pa.table([[1], [2]], names=["a", "a"]), "twice")
    assert repr(twice).splitlines()[-1].split() == ["1", "2"]
    assert re.findall("<td>(.*?)</td>", twice._repr_html_()) == ["1", "2"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""),
        (0.1 + 0.2, "0.3"),
        (123456789.0, "1.23457e+08"),
        (float("nan"), "nan"),
        (-0.0, "-0"),
        (7, "7"),
        (True, "True"),
        ("text", "text"),
        (b"ab", "b'ab'"),
        (b"a" * 33, "33 bytes"),
        ([1, 2], "[1, 2]"),
        ([0.5] * 100, "[0.5, 0.5, 0.5, … 100 values]"),
    ],
)
def test_cells_are_short(value: object, shown: str) -> None:
    assert format_value(value) == shown
