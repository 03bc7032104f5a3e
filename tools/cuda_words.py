"""Write src/saferun/inject/hooks/cuda_words.json from the knowledge: `python tools/cuda_words.py`.

The words of CUDA's errors, from the signs of knowledge/failures.yaml, in their order: the kind;
what an error says, as parts that follow each other; what must be in the same error, if anything;
what must not be in it. A rank has no YAML parser, and may lack saferun.
"""

from __future__ import annotations

import json
import pathlib

from saferun.diagnosis import signatures

FILE = pathlib.Path(__file__).parents[1] / "src/saferun/inject/hooks/cuda_words.json"
STICKY = ("device-side-assert", "cuda-illegal-access", "cuda-launch-failure", "cuda-launch-timeout")


def signs(kinds: tuple[str, ...]) -> str:
    """Return a line for each phrase of the signs of some kinds."""
    found = [sign for sign in signatures.load().signs if sign.kind in kinds]
    rows = [(one.kind, parts, one.near, one.not_near) for one in found for parts in one.says]
    return ",\n".join(f"  {json.dumps(row)}" for row in rows)


def text() -> str:
    """Return what the file has to hold."""
    memory = tuple(name for name in signatures.load().kinds if name.startswith("cuda-oom"))
    tables = (("memory", memory), ("sticky", STICKY))
    parts = (f'"{name}": [\n{signs(kinds)}\n]' for name, kinds in tables)
    return "{" + ", ".join(parts) + "}\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
