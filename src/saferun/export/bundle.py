"""The bundle inside a generated bash script: saferun's own code and knowledge, as text.

Paths and texts alternate, with zero bytes between them; the whole is compressed with bzip2 (more
Pythons lack LZMA than bzip2) and written in base85. export/unpack.py
reads it on the script's machine. Modules that a script does not import are left out, and so are the
parts of the code that only readers need (export/bare_code.py). Knowledge is packed as JSON, since
the target may have no YAML parser.

Packing takes 2 s, so the user's cache directory keeps the last bundle, under a hash of all its
sources.
"""

from __future__ import annotations

import base64
import bz2
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping

from saferun import __version__
from saferun.export import bare_code
from saferun.export.bare_code import bare
from saferun.knowledge import loader
from saferun.system import content_cache, paths

# Programs that a script starts; all files that they import, directly or not, are packed with them.
_STARTED = ("export/bundle_main.py", "system/descriptors.py", "gpu/ask_nvml.py")
_ON_SLURM = "export/slurm_node.sh"
_WHOLE = ("base", "inject", "keeper")  # rooms whose files find each other by name
# Imported only by functions that a script never calls: it reads no profile file, and has no audit.
_UNCALLED = ("profile/yaml_reader.py", "audit/collect.py")
_IMPORT = re.compile(r"^ *from saferun([.\w]*) import (?:\(([^)]*)\)|([\w, ]*))", re.MULTILINE)
_PROGRAM = os.path.join(paths.PACKAGE, "export", "unpack.py")
_MADE_BY = (__file__, bare_code.__file__)
_MAIN = """from saferun.system.descriptors import plug_closed_descriptors
plug_closed_descriptors()
from saferun.export.bundle_main import main
raise SystemExit(main())
"""
_PACKAGE = f'__version__ = "{__version__}"\n'  # the Python interface is left out


def pack(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the two parts of a bundle, in base85: the program that unpacks, and the files.

    Args:
        environ: variables that name the user's cache directory.
    """
    program, sources = _read(_PROGRAM), _sources()
    made_of = "\0".join((*map(_read, _MADE_BY), program, *sources, *sources.values()))
    key = hashlib.sha256(made_of.encode()).hexdigest()
    kept = content_cache.read("kit", key, environ)
    if kept is None:
        parts = (part for file in _bare(sources).items() for part in file)
        kept = _packed(bare(program)), _packed("\0".join(parts))
        content_cache.write("kit", key, kept, environ)
    return kept[0], kept[1]


def _packed(text: str) -> str:
    return base64.b85encode(bz2.compress(text.encode())).decode()


def template(name: str = "run.sh") -> str:
    """Return a file of shell/, which has the hand-written parts of scripts."""
    return _read(os.path.join(paths.shipped("shell"), name))


def packed_files() -> dict[str, str]:
    """Return the files of a bundle, path -> text."""
    return _bare(_sources())


def _bare(sources: Mapping[str, str]) -> dict[str, str]:
    return {path: bare(text) if path.endswith(".py") else text for path, text in sources.items()}


def _sources() -> dict[str, str]:
    """Return the files of a bundle, with their comments."""
    found = {"__main__.py": _MAIN, "saferun/__init__.py": _PACKAGE}
    found[f"saferun/{_ON_SLURM}"] = _read(os.path.join(paths.PACKAGE, _ON_SLURM))
    waiting = [*_STARTED, *(file for room in _WHOLE for file in _room(room))]
    while waiting:
        name = waiting.pop()
        path = os.path.join(paths.PACKAGE, name)
        if f"saferun/{name}" in found or name in _UNCALLED or not os.path.isfile(path):
            continue
        text = found[f"saferun/{name}"] = _read(path)
        for module, lines, line in _IMPORT.findall(text):
            place = module[1:].replace(".", "/")
            files = (os.path.join(place, one.strip()) for one in (lines or line).split(","))
            waiting += (f"{file}.py" for file in (place, *files))
    for name, document in loader.load_for_bundle().items():
        text = json.dumps(document, separators=(",", ":"))
        found[f"saferun/knowledge/{name}.json"] = text
    return dict(sorted(found.items()))


def _room(name: str) -> Iterator[str]:
    for folder, _, names in os.walk(os.path.join(paths.PACKAGE, name)):
        place = os.path.relpath(folder, paths.PACKAGE)
        yield from (f"{place}/{file}" for file in names if file.endswith((".py", ".json")))


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
