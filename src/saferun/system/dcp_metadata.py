"""The sizes in torch.distributed.checkpoint's `.metadata`, read without running its pickle."""

from __future__ import annotations

import pickle


class _Inert:
    """A replacement for every class in a pickle, so that nothing of it is imported or called."""

    def __init__(self, *arguments: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            vars(self).update(state)

    def append(self, item: object) -> None:
        pass


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Inert]:
        return _Inert

    def persistent_load(self, pid: object) -> None:
        return None


def sizes(path: str) -> dict[str, int] | None:
    """Return the least size of each file that a `.metadata` names; None if it was cut.

    A file in another format names none.
    """
    found: dict[str, int] = {}
    try:
        with open(path, "rb") as file:
            places = vars(_InertUnpickler(file).load())["storage_data"].values()
        for place in places:
            end = place.offset + place.length
            found[place.relative_path] = max(end, found.get(place.relative_path, 0))
    except (TypeError, KeyError, AttributeError):
        return {}
    except (EOFError, pickle.UnpicklingError):
        return None
    return found
