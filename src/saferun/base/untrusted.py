"""Pure: JSON that anybody may have written, cut or garbled, and guards of its values."""

from __future__ import annotations

import json
import math

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, TypeGuard

_MAX_TIME = 253_402_214_400.0  # the year 9999: later times cannot be shown


def value(text: bytes | str | None) -> Any:  # any JSON value
    """Return the value of a JSON text; None if it is none."""
    try:
        return json.loads(text or b"null")
    except (ValueError, RecursionError):
        return None


def objects(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file with one in each line; other lines are skipped."""
    return (one for one in map(value, content.split(b"\n")) if isinstance(one, dict))


def number(value: object) -> float | None:
    """Return a number that can be a time, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value <= _MAX_TIME and math.isfinite(value) else None


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number other than NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def is_count(value: object, limit: int = 1 << 31) -> TypeGuard[int]:
    """Return whether a value is a whole number from 0 on and below a limit."""
    return type(value) is int and 0 <= value < limit


def count(value: object) -> int | None:
    """Return a whole number from 0 on and below 2**31, else None."""
    return value if is_count(value) else None


def text(value: object) -> str:
    """Return a text, else ""."""
    return value if isinstance(value, str) else ""


def strings(value: object) -> tuple[str, ...]:
    """Return the texts in a list, else ()."""
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, list) else ()


def mapping(value: object) -> dict[str, Any]:
    """Return a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}
