"""A base class that stands in for `typing.NamedTuple` in the keeper's process.

`import typing` takes 5 to 10 ms there, which every attempt would pay at its start; making nine
classes with `collections.namedtuple` takes 0.9 ms, and with this class 0.1 ms. A type checker is
shown `typing.NamedTuple` itself:

    TYPE_CHECKING = False
    if TYPE_CHECKING:
        from typing import NamedTuple
    else:
        from saferun.keeper.named_tuple import NamedTuple
"""

from __future__ import annotations

from operator import itemgetter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class NamedTuple(tuple):  # type: ignore[type-arg]
    """A tuple whose items have the names that a subclass annotates.

    Of `typing.NamedTuple` it has the construction, by order and by name, and the fields: no
    defaults, no `_replace`.
    """

    _fields: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        cls._fields = tuple(cls.__annotations__)
        for index, name in enumerate(cls._fields):
            setattr(cls, name, property(itemgetter(index)))

    def __new__(cls, *values: Any, **named: Any) -> NamedTuple:
        """Make one from values in order, then by name.

        Raises:
            TypeError: a field is missing, given twice or unknown.
        """
        rest = cls._fields[len(values) :]
        if len(values) > len(cls._fields) or named.keys() != set(rest):
            raise TypeError(f"{cls.__name__} takes {', '.join(cls._fields)}")
        return tuple.__new__(cls, (*values, *(named[name] for name in rest)))

    def __repr__(self) -> str:
        fields = (f"{name}={value!r}" for name, value in zip(self._fields, self, strict=True))
        return f"{type(self).__name__}({', '.join(fields)})"
