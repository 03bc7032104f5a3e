"""JSON that anybody may have written."""

import pytest

from saferun.base import untrusted

NOT_JSON = [None, "", b"", b"{", b"\xff", '{"a": ', "[" * 100_000]


@pytest.mark.parametrize("text", NOT_JSON, ids=range(len(NOT_JSON)))
def test_what_is_no_json_is_nothing(text):
    assert untrusted.value(text) is None


def test_only_objects_are_read_from_lines():
    lines = b'{"a": 1}\n[1]\n\n{"cut": \n\xff\n' + b"[" * 100_000 + b'\n{"b": 2}'
    assert [*untrusted.objects(lines)] == [{"a": 1}, {"b": 2}]


VALUES = [  # value, as number, as count, whether it is a number
    (0, 0.0, 0, True),
    (1.5, 1.5, None, True),
    (-1, None, None, True),
    (True, None, None, False),
    (float("nan"), None, None, False),
    (float("inf"), None, None, True),
    (1 << 31, float(1 << 31), None, True),
    (1e300, None, None, True),
    ("1", None, None, False),
    (None, None, None, False),
]


@pytest.mark.parametrize(("value", "number", "count", "is_number"), VALUES, ids=str)
def test_a_number_is_what_can_be_one(value, number, count, is_number):
    assert (untrusted.number(value), untrusted.count(value)) == (number, count)
    assert untrusted.is_number(value) is is_number


def test_texts_lists_and_objects_are_what_they_say():
    assert [untrusted.text(v) for v in ("a", 1, None)] == ["a", "", ""]
    assert [untrusted.strings(v) for v in (["a", 1, "b"], "ab", None)] == [("a", "b"), (), ()]
    assert [untrusted.mapping(v) for v in ({"a": 1}, [1], None)] == [{"a": 1}, {}, {}]
