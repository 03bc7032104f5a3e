"""Write src/saferun/inject/hooks/cuda_words.py from the knowledge: `python tools/cuda_words.py`."""

from __future__ import annotations

import pathlib

from saferun.diagnosis import signatures

FILE = pathlib.Path(__file__).parents[1] / "src/saferun/inject/hooks/cuda_words.py"
STICKY = ("device-side-assert", "cuda-illegal-access", "cuda-launch-failure", "cuda-launch-timeout")
HEAD = '''"""The words of CUDA's errors: written by tools/cuda_words.py, not by hand.

From the signs of knowledge/failures.yaml, in their order: the kind; what an error says, as parts
that follow each other; what must be in the same error, if anything; what must not be in it.
"""

# fmt: off
'''


def signs(kinds: tuple[str, ...]) -> list[str]:
    """Return one line of Python for each phrase of the signs of some kinds."""
    found = [sign for sign in signatures.load().signs if sign.kind in kinds]
    rows = [(one.kind, parts, one.near, one.not_near) for one in found for parts in one.says]
    lines = [f"    {row!r}," for row in rows]
    return [line + "  # noqa: E501" * (len(line) > 100) for line in lines]


def text() -> str:
    """Return what the file has to hold."""
    memory = tuple(name for name in signatures.load().kinds if name.startswith("cuda-oom"))
    tables = (("MEMORY", memory), ("STICKY", STICKY))
    parts = [f"{name} = (\n" + "\n".join(signs(kinds)) + "\n)\n" for name, kinds in tables]
    return HEAD + "".join(parts)


if __name__ == "__main__":
    FILE.write_text(text())
