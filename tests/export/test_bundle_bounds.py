"""A bundle that unpacks to more than ours could ever be is no bundle."""

from __future__ import annotations

import base64
import json
import zlib

import pytest

from saferun.export import bundle


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize(
    "data",
    [
        json.dumps({"a": " " * bundle.MOST_BYTES}).encode(),
        b"[" * 1_000_000,
        b"[]",
        b"",
    ],
    ids=["large", "deep", "no object", "empty"],
)
def test_what_is_too_large_or_no_object_is_refused(data):
    assert bundle.unpack(packed(data)) is None


def test_a_cut_bundle_is_refused():
    assert bundle.unpack(packed(json.dumps({"a": "b" * 1000}).encode())[:-8]) is None


def test_a_bundle_is_read_back():
    assert bundle.unpack(packed(b'{"a": "b"}')) == {"a": "b"}
