"""A replacement of `typing.NamedTuple` that is cheap to import, for launch path and keeper.

`import typing` takes 4 ms, which every keeper would spend again, and each class made with it 0.2 ms
(benchmarks/imports.py). A class of this base takes 0.02 ms. Type checkers see
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

        _make = classmethod(tuple.__new__)  # from all values, unchecked

        def __new__(cls, *values: Any, **named: Any) -> NamedTuple:
            """Return an instance from positional values, named values and defaults, in this order.

            Raises:
                TypeError: a field is missing, given twice or unknown.
            """
            if len(values) == len(cls._fields) and not named:
                return tuple.__new__(cls, values)
            rest = cls._fields[len(values) :]
            if rest or named:
                found = {**cls._field_defaults, **named}
                missing = [name for name in rest if name not in found]
                if missing or not named.keys() <= set(rest):
                    wrong = [*missing, *(name for name in named if name not in rest)]
                    raise TypeError(f"{cls.__name__}: {', '.join(wrong)}; has {cls._fields}")
                values = (*values, *(found[name] for name in rest))
            elif len(values) > len(cls._fields):
                raise TypeError(f"{cls.__name__} takes {len(cls._fields)} values: {cls._fields}")
            return tuple.__new__(cls, values)

        def _replace(self, **named: Any) -> NamedTuple:
            """Return a copy with some fields changed.

            Raises:
                ValueError: a field is unknown.
            """
            if unknown := named.keys() - set(self._fields):
                raise ValueError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
            return type(self)(**{**self._asdict(), **named})

        def _asdict(self) -> dict[str, Any]:
            """Return the fields by name."""
            return dict(zip(self._fields, self, strict=True))

        def __getnewargs__(self) -> tuple[Any, ...]:
            return tuple(self)

        def __repr__(self) -> str:
            fields = (f"{name}={value!r}" for name, value in self._asdict().items())
            return f"{type(self).__name__}({', '.join(fields)})"
