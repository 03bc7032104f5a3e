"""The bundle inside a generated bash script: saferun's own code and knowledge, as text.

It is a JSON object from path to text, compressed by bzip2 (smaller and quicker than LZMA for text),
in base85. export/unpack.py reads it where the script runs. The commands, and what only they use,
are left out. Knowledge is packed as JSON, since the target may have no YAML parser.
"""

from __future__ import annotations

import base64
import bz2
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
_MAIN = "from saferun.export.bundle_main import main\n\nraise SystemExit(main())\n"
_PACKAGE = f'__version__ = "{__version__}"\n'  # the Python interface stays behind
# Code with its strings, up to a comment; lines inside of a long string do not match as a whole.
_BEFORE_COMMENT = re.compile(r"""((?:[^"'#]|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')*)#.*""")


def pack(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return what travels in a script: the program that unpacks, and the files; in base85.

    Args:
        environ: names the user's cache directory.
    """
    program = bare(_read(os.path.join(paths.PACKAGE, "export", "unpack.py"))).encode()
    data = json.dumps(files(environ), sort_keys=True, separators=(",", ":")).encode()
    return _packed(program), _packed(data)


def _packed(data: bytes) -> str:
    return base64.b85encode(bz2.compress(data)).decode()


def template(name: str = "run.sh") -> str:
    """Return a file of shell/, the hand-written parts of scripts."""
    return _read(os.path.join(paths.shipped("shell"), name))


def files(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the files that a bundle holds, path -> text."""
    found = {"__main__.py": _MAIN, "saferun/__init__.py": _PACKAGE}
    for name in FILES:
        found[f"saferun/{name}"] = bare(_read(os.path.join(paths.PACKAGE, name)))
    for room in ROOMS:
        found.update(_room(room))
    for name in UNUSED:
        del found[f"saferun/{name}"]
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


def _room(name: str) -> Iterator[tuple[str, str]]:
    for folder, _, names in os.walk(os.path.join(paths.PACKAGE, name)):
        for file in names:
            if file.endswith(".py"):
                path = os.path.join(folder, file)
                yield f"saferun/{os.path.relpath(path, paths.PACKAGE)}", bare(_read(path))


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
