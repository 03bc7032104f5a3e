"""What travels inside a bash twin: saferun's own code and what it knows, as text.

A JSON object from path to text, compressed, in base64: reading it back takes three modules of the
standard library, whatever the target has. Modules that twin.py cannot reach stay behind, and so
does the door to the commands; what is known about failures goes as JSON, since the target may have
no YAML parser.
"""

from __future__ import annotations

import base64
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping

from saferun import knowledge

HERE = os.path.dirname(os.path.abspath(__file__))
# For commands, their settings audit and YAML files, which a twin has none of.
AT_HOME = ("audit", "cli", "front", "scriptcalls", "yamldoc")
PACKAGES = ("inject", "knowledge")  # that go as a whole
FIRST = ("__init__", "__main__", "twin", "keeper")  # the keeper is started by its path
LEVEL = 6  # of compression; 9 makes it 1 % smaller and takes twice as long
_DOOR = "from saferun.twin import main\n\nraise SystemExit(main())\n"
# `from saferun.plan import …`, and the names in `from saferun import a, b`, over lines or not.
_IMPORT = re.compile(r"^\s*from saferun(?:\.(\w+)[\w.]* import|\s+import\s+(\([^)]*\)|.*))", re.M)


def pack(environ: Mapping[str, str]) -> str:
    """Return the kit in base64.

    Args:
        environ: for the user's cache directory.
    """
    data = json.dumps(files(environ), sort_keys=True, separators=(",", ":")).encode()
    return base64.b64encode(zlib.compress(data, LEVEL)).decode()


def unpack(text: str) -> dict[str, str] | None:
    """Return the files of a kit; None for what is none."""
    try:
        found = json.loads(zlib.decompress(base64.b64decode(text)))
    except (ValueError, zlib.error):
        return None
    return found if isinstance(found, dict) else None


def template(name: str = "twin.sh") -> str:
    """Return a hand-written part of a twin: in the wheel, or beside src in a checkout."""
    packed = os.path.join(HERE, "data", "shell")
    folder = packed if os.path.isdir(packed) else os.path.join(HERE, "..", "..", "shell")
    return _read(os.path.join(folder, name))


def files(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the kit: path -> text."""
    found = {"__main__.py": _DOOR}
    for name, document in knowledge.load_for_kit(environ).items():
        text = json.dumps(document, separators=(",", ":"))
        found[f"saferun/knowledge/{name}.json"] = text
    for package in PACKAGES:
        found.update(_package(package))
    return {**found, **_rooms()}


def _rooms() -> dict[str, str]:
    """Return the modules that twin.py reaches, whenever it imports them."""
    found: dict[str, str] = {}
    todo = list(FIRST)
    while todo:
        name = todo.pop()
        path = os.path.join(HERE, f"{name}.py")
        if f"saferun/{name}.py" in found or name in AT_HOME or not os.path.isfile(path):
            continue
        text = found[f"saferun/{name}.py"] = _read(path)
        todo += [
            word for pair in _IMPORT.findall(text) for word in re.findall(r"\w+", " ".join(pair))
        ]
    return found


def _package(name: str) -> Iterator[tuple[str, str]]:
    for folder, _, names in os.walk(os.path.join(HERE, name)):
        for file in names:
            if file.endswith(".py"):
                path = os.path.join(folder, file)
                yield f"saferun/{os.path.relpath(path, HERE)}", _read(path)


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
