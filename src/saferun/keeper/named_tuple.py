"""A base for the keeper's values in place of `typing.NamedTuple`.

`import typing` takes 4 ms, which every attempt would wait for. Type checkers see
`typing.NamedTuple` itself.
"""

from __future__ import annotations

from operator import itemgetter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any
    from typing import NamedTuple as NamedTuple
else:

    class NamedTuple(tuple):
        """A tuple whose items are named, and have defaults, as the subclass annotates."""

        __slots__ = ()
        _fields: tuple[str, ...] = ()
        _field_defaults: dict[str, Any] = {}  # noqa: RUF012 - ClassVar would import typing

        def __init_subclass__(cls) -> None:
            cls._fields = tuple(cls.__annotations__)
            cls._field_defaults = {n: vars(cls)[n] for n in cls._fields if n in vars(cls)}
            for index, name in enumerate(cls._fields):
                setattr(cls, name, property(itemgetter(index)))

        def __new__(cls, *values: Any, **named: Any) -> NamedTuple:
            """Return an instance from positional values, named values and defaults, in this order.

            Raises:
                TypeError: a field is missing or unknown.
            """
            found = {**cls._field_defaults, **named, **dict(zip(cls._fields, values, strict=False))}
            if len(values) > len(cls._fields) or found.keys() != set(cls._fields):
                raise TypeError(f"{cls.__name__} has the fields {', '.join(cls._fields)}")
            return tuple.__new__(cls, map(found.__getitem__, cls._fields))

        def _replace(self, **named: Any) -> NamedTuple:
            """Return a copy with some fields changed."""
            return type(self)(**{**dict(zip(self._fields, self, strict=True)), **named})
