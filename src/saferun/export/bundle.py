"""The bundle inside a generated bash script: saferun's own code and knowledge, as text.

It is a JSON object from path to text, compressed by bzip2 (smaller and quicker than LZMA for text),
in base85. export/unpack.py reads it where the script runs. The commands, and what only they use,
are left out. Knowledge is packed as JSON, since the target may have no YAML parser.

Packing takes 0.3 s, so the user's cache directory keeps the last bundle, under a hash of all that
it was made of.
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
from saferun.knowledge import loader
from saferun.system import paths

# The rooms that a running script needs; of this room, only the files that it imports.
ROOMS = (
    *("supervise", "gpu", "keeper", "journal", "planning", "profile"),
    *("diagnosis", "knowledge", "system", "inject"),
)
FILES = (
    *("model.py", "settings.py", "errors.py"),
    *("export/__init__.py", "export/bundle_main.py", "export/settings_codec.py"),
)
UNUSED = (
    "diagnosis/explaining/explain.py",
    "diagnosis/foreign/__init__.py",
    "diagnosis/foreign/broken_lines.py",
    "diagnosis/foreign/front.py",
    "diagnosis/foreign/log_file.py",
    "diagnosis/foreign/long_log.py",
    "diagnosis/foreign/panics.py",
    "diagnosis/foreign/windows_status.py",
    "journal/attempts.py",
    "journal/cleanup.py",
    "journal/rank_report.py",
    "journal/reader.py",
    "journal/report.py",
    "journal/run_notes.py",
    "journal/tail_excerpt.py",
    "journal/time_spent.py",
    "supervise/watch/live_run.py",
    # Imported by a function that a script never calls: its settings come from no profile file.
    "profile/yaml_nodes.py",
    "profile/yaml_reader.py",
)
_PROGRAM = os.path.join(paths.PACKAGE, "export", "unpack.py")
_MAIN = "from saferun.export.bundle_main import main\n\nraise SystemExit(main())\n"
_PACKAGE = f'__version__ = "{__version__}"\n'  # the Python interface stays behind
# Code with its strings, up to a comment; lines inside of a long string do not match as a whole.
_BEFORE_COMMENT = re.compile(r"""((?:[^"'#]|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')*)#.*""")


def pack(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return what travels in a script: the program that unpacks, and the files; in base85.

    Args:
        environ: names the user's cache directory.
    """
    program, sources = _read(_PROGRAM), _sources(environ)
    made_of = "\0".join((_read(__file__), program, *sources, *sources.values()))
    key = hashlib.sha256(made_of.encode()).hexdigest()
    entry = os.path.join(paths.cache_dir(environ), "kit")
    kept = (paths.read_private(entry) or b"").decode("ascii", "replace").split("\n")
    if len(kept) != 3 or kept[0] != key:
        data = json.dumps(_bare(sources), sort_keys=True, separators=(",", ":"))
        kept = [key, _packed(bare(program)), _packed(data)]
        paths.write_private(entry, "\n".join(kept).encode())
    return kept[1], kept[2]


def _packed(text: str) -> str:
    return base64.b85encode(bz2.compress(text.encode())).decode()


def template(name: str = "run.sh") -> str:
    """Return a file of shell/, the hand-written parts of scripts."""
    return _read(os.path.join(paths.shipped("shell"), name))


def files(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the files that a bundle holds, path -> text."""
    return _bare(_sources(environ))


def _bare(sources: Mapping[str, str]) -> dict[str, str]:
    return {path: bare(text) if path.endswith(".py") else text for path, text in sources.items()}


def _sources(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the files of a bundle with their comments."""
    found = {"__main__.py": _MAIN, "saferun/__init__.py": _PACKAGE}
    for name in (*FILES, *(file for room in ROOMS for file in _room(room))):
        if name not in UNUSED:
            found[f"saferun/{name}"] = _read(os.path.join(paths.PACKAGE, name))
    for name, document in loader.load_for_bundle(environ).items():
        text = json.dumps(document, separators=(",", ":"))
        found[f"saferun/knowledge/{name}.json"] = text
    return found


def bare(text: str) -> str:
    """Return a module without comments and docstrings; all else keeps the number of its line.

    It knows Python as ruff formats it: a docstring begins a line below one that ends with a colon.
    """
    lines, within, is_doc, before = [], False, False, ":"
    for line in text.split("\n"):
        word, odd = line.strip(), line.count('"""') % 2 == 1
        if within:
            within = not odd
            lines.append("" if is_doc else line)
        elif is_doc := word.startswith('"""') and before.endswith(":"):
            lines.append(line[: len(line) - len(line.lstrip())] + '""')
            within, before = odd, word
        else:
            code = None if odd else _BEFORE_COMMENT.fullmatch(line)
            lines.append(code[1].rstrip() if code else line)
            within, before = odd, lines[-1].strip() or before
    return "\n".join(lines)


def _room(name: str) -> Iterator[str]:
    for folder, _, names in os.walk(os.path.join(paths.PACKAGE, name)):
        place = os.path.relpath(folder, paths.PACKAGE)
        yield from (f"{place}/{file}" for file in names if file.endswith(".py"))


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
