"""List the modules of installed packages that a rank has imported when it joins its group, or ends.

The next start of the script imports them ahead, in this order (start/imports.py).
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENDING = ".imports"  # of the list, beside the rank's receipt
_INSTALLED = ("/site-packages/", "/dist-packages/")


def write(write_file: Callable[[str, bytes], None]) -> None:
    """Write the list, once; the first rank of a node does. Raises OSError.

    Args:
        write_file: makes a file with this ending and content beside the receipt.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            write_file(ENDING, "\n".join(_installed()).encode())
        except FileExistsError:  # written when it joined its group
            pass


def _installed() -> Iterator[str]:
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__dict__", {}).get("__spec__")
        origin = getattr(spec, "origin", None)
        if not isinstance(origin, str) or getattr(spec, "name", "") != name:
            continue
        if any(part in origin for part in _INSTALLED):
            yield name
