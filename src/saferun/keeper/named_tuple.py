"""A base for the keeper's values in place of `typing.NamedTuple`, which type checkers see.

`import typing` takes a third of a keeper's start, for which each attempt waits.
"""

from collections import namedtuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:

    class _Kind(type):
        def __new__(cls, name, _, body):
            fields = getattr(type(name, (), dict(body)), "__annotations__", {})
            defaults = [body.pop(field) for field in fields if field in body]
            values = namedtuple(name, fields, defaults=defaults)
            return type(name, (values,), {"__slots__": (), **body})

    NamedTuple = type.__new__(_Kind, "NamedTuple", (), {})
