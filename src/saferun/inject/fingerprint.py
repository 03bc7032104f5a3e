"""A digest of a batch or of a dataset's own fields, which ranks compare instead of their data.

Nested tensors, arrays, text, bytes and numbers count (of large ones only the ends); of any other
object only the type counts. Content that does not identify its source (a single repeated value, as
in synthetic data) gives no fingerprint.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from typing import Any

ENDS = 2048  # elements of a tensor, or characters of a text, used at each end
ITEMS = 64  # items of a list or mapping used at each end
DEPTH = 6


def fingerprint(value: object) -> str | None:
    """Return a digest that equal values share; None if the value does not identify data.

    Args:
        value: a batch, or the `vars` of a dataset, which is not changed. A tensor on a GPU is
            waited for. If a part raises, because of its own type's methods, the result is None.
    """
    walk = _Walk(hashlib.blake2b(digest_size=12))
    try:
        walk.add(value, 0)
    except Exception:
        return None
    return walk.hash.hexdigest() if walk.tells else None


class _Walk:
    """Feed a value to a hash, and note whether there was anything to compare."""

    def __init__(self, hash_: Any) -> None:
        self.hash = hash_
        self.tells = False
        self._seen: set[int] = set()  # containers being visited: a value may contain itself

    def add(self, value: Any, depth: int) -> None:
        torch = sys.modules.get("torch")
        self.hash.update(type(value).__name__.encode() + b"\0")
        if torch is not None and isinstance(value, torch.Tensor):
            self._add_tensor(torch, value)
        elif hasattr(value, "__array_interface__") and hasattr(value, "reshape"):
            flat = value.reshape(-1)
            head = repr((value.shape, str(value.dtype))).encode()
            content = head + flat[:ENDS].tobytes() + flat[-ENDS:].tobytes()
            self._add_bytes(content, len(set(flat[:ENDS].tolist())) > 1)
        elif isinstance(value, (str, bytes, bytearray)):
            text = value.encode("utf-8", "replace") if isinstance(value, str) else bytes(value)
            self._add_bytes(
                b"%d" % len(text) + text[:ENDS] + text[-ENDS:], len(set(text[:ENDS])) > 1
            )
        elif isinstance(value, (bool, int, float, complex)):
            self.hash.update(repr(value).encode())
        elif depth < DEPTH and id(value) not in self._seen:
            self._seen.add(id(value))
            self._add_container(value, depth)

    def _add_container(self, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            items = list(value.items())
        elif isinstance(value, (list, tuple)):
            items = list(enumerate(value)) if len(value) <= 2 * ITEMS else _ends(value)
        elif hasattr(value, "_fields") or hasattr(value, "__dataclass_fields__"):
            items = list(vars(value).items())
        else:
            return
        self.hash.update(b"%d" % len(value) if hasattr(value, "__len__") else b"")
        numbers = {item for _, item in items if isinstance(item, (int, float))}
        self.tells |= len(numbers) > 1
        for key, item in items[: 2 * ITEMS]:
            self.hash.update(str(key).encode("utf-8", "replace"))
            self.add(item, depth + 1)

    def _add_tensor(self, torch: Any, value: Any) -> None:
        if value.is_meta or value.layout is not torch.strided or value.is_quantized:
            return
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return
        flat = value.detach().reshape(-1)
        ends = torch.cat([flat[:ENDS], flat[-ENDS:]]).cpu()  # contiguous
        content = ctypes.string_at(ends.data_ptr(), ends.numel() * ends.element_size())
        tells = ends.numel() > 1 and bool((ends != ends[0]).any())
        self._add_bytes(repr((tuple(value.shape), str(value.dtype))).encode() + content, tells)

    def _add_bytes(self, content: bytes, tells: bool) -> None:
        self.hash.update(content)
        self.tells |= tells


def _ends(value: Any) -> list[tuple[int, Any]]:
    size = len(value)
    places = (*range(ITEMS), *range(size - ITEMS, size))
    return [(place, value[place]) for place in places]
