"""Updates `src/saferun/knowledge/variables.yaml`: which library reads which variable.

    python tools/variables.py show FOLDER          what an installed or unpacked package reads
    python tools/variables.py add torch==2.16.0    fetch a release with pip and add it, with the
                                                   NCCL and Triton that it asks for
    python tools/variables.py add FOLDER VERSION   the same from a folder, such as kept/torch 2.16.0
    python tools/variables.py check                after a change of variable_effects.yaml: take its
                                                   lists over, check that it agrees with the data

A new release of torch needs the second line and nothing else. The wheels are gigabytes in total:
they are fetched one at a time into a temporary directory (TMPDIR) and deleted.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
import tempfile
from typing import NamedTuple

import environment_readers
import yaml
from library_releases import fetch, ranges

from saferun.audit.variable_index import NOBODY, Reader, parse
from saferun.audit.variable_index import version as _version

HERE = pathlib.Path(__file__).resolve().parent
KNOWLEDGE = HERE.parent / "src" / "saferun" / "knowledge"
DATA = KNOWLEDGE / "variables.yaml"
EFFECTS = KNOWLEDGE / "variable_effects.yaml"
# A library's name in the data; the projects that ship it; its folder in their wheels.
LIBRARIES = {
    "torch": (("torch",), "torch"),
    "nccl": (("nvidia-nccl-cu12", "nvidia-nccl-cu13"), "nvidia/nccl"),
    "triton": (("triton",), "triton"),
    "tensorflow": (("tensorflow-cpu", "tensorflow"), "tensorflow"),
    "iomp": (("intel-openmp",), "."),
}
FILES = 3  # of a variable's readers; more would only lengthen the data
HEAD = """\
# Which library reads which environment variable, in which of its releases, and where.
# Made by tools/variables.py from the released wheels: Python by its syntax, libraries by their
# strings. A line reads: NAME: LIBRARY FIRST..LAST FILE…; a range without LAST goes on to the newest
# release looked at. What the settings do is in variable_effects.yaml, by hand.
# One line for each name: a launch looks a name up without parsing the rest.
"""


class Data(NamedTuple):
    """The content of variables.yaml."""

    releases: dict[str, list[str]]  # library -> releases looked at, oldest first
    brings: dict[str, str]  # torch release -> "nccl 2.27.5, triton 3.4.0"
    variables: dict[str, dict[str, Reader]]  # name -> library -> reader
    nobody: tuple[str, ...] = ()  # names of variable_effects.yaml that none of them reads
    owned: tuple[str, ...] = ()  # prefixes of torch alone: an unknown name there is dead
    driver: tuple[str, ...] = ()  # what the CUDA driver reads
    others: tuple[str, ...] = ()  # names, and prefixes with *, that other programs read


def main(argv: list[str] | None = None) -> int:
    """Run a command; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("show", "add", "check"))
    parser.add_argument("what", nargs="*", help="a folder, or NAME==VERSION")
    options = parser.parse_args(argv)
    if options.command == "show":
        for name, files in sorted(
            environment_readers.readers(pathlib.Path(options.what[0])).items()
        ):
            print(name, *sorted(files))
        return 0
    if options.command == "check":
        _write(load())
        return _check()
    if len(options.what) == 2 and "==" not in options.what[0]:
        _add_folder(pathlib.Path(options.what[0]), options.what[1])
    else:
        for requirement in options.what:
            _add_release(requirement)
    return _check()


# Reading and writing the data


def load() -> Data:
    """Return the data; empty where there are none."""
    if not DATA.exists():
        return Data({}, {}, {})
    document = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    releases = {key: list(map(str, value)) for key, value in document["releases"].items()}
    variables = {
        name: {part.split()[0]: parse(part, releases[part.split()[0]]) for part in text.split("; ")}
        for name, text in document["variables"].items()
        if text != NOBODY
    }
    variables = {name: found for name, by in variables.items() if (found := _readers(name, by))}
    nobody = tuple(name for name, text in document["variables"].items() if text == NOBODY)
    return Data(releases, dict(document["brings"] or {}), variables, nobody)


def _readers(name: str, by: dict[str, Reader]) -> dict[str, Reader]:
    """Return a variable's readers without those that only record it."""
    recorded = environment_readers.RECORDED
    return {library: one for library, one in by.items() if name not in recorded.get(library, ())}


def render(data: Data) -> str:
    """Return the text of the data; equal data give equal text."""
    lines = [HEAD, "releases:"]
    lines += [f"  {lib}: [{', '.join(all_of)}]" for lib, all_of in sorted(data.releases.items())]
    lines += ["", "# What pip installs beside a torch.", "brings:"]
    brings = sorted(data.brings.items(), key=_by_version)
    lines += [f'  "{torch}": {text}' for torch, text in brings]
    lines += ["", "# From variable_effects.yaml: what only torch, the CUDA driver and others read."]
    for key in ("owned", "driver", "others"):
        lines.append(f"{key}: [{', '.join(getattr(data, key))}]")
    lines += ["", "variables:"]
    shown = {name: _line(readers, data.releases) for name, readers in data.variables.items()}
    shown |= dict.fromkeys(data.nobody, NOBODY)
    lines += [f"  {name}: {text}" for name, text in sorted(shown.items())]
    return "\n".join(lines) + "\n"


def _line(readers: dict[str, Reader], releases: dict[str, list[str]]) -> str:
    return "; ".join(
        " ".join((library, ranges(reader.releases, releases[library]), *reader.files))
        for library, reader in sorted(readers.items(), key=lambda item: (item[0] != "torch", item))
    )


def _by_version(item: tuple[str, str]) -> tuple[int, ...]:
    return _version(item[0])


# Adding a release


def merge(data: Data, library: str, release: str, readers: environment_readers.Readers) -> Data:
    """Return the data with a release added; adding it again replaces its readers.

    Args:
        data: as they are.
        library: its name in the data.
        release: of the library, "2.16.0".
        readers: what this release reads.
    """
    releases = {lib: list(known) for lib, known in data.releases.items()}
    order = sorted({*releases.get(library, []), release}, key=_version)
    variables = {name: dict(by) for name, by in data.variables.items()}
    readers = {
        n: files
        for n, files in readers.items()
        if n not in environment_readers.RECORDED.get(library, ())
    }
    for name in {*variables, *readers}:
        old = variables.get(name, {}).get(library, Reader(library, (), ()))
        kept = {*old.releases} - {release} | ({release} if name in readers else set())
        found = tuple(each for each in order if each in kept)
        newest = bool(found) and found[-1] == release
        files = tuple(_most_relevant(readers[name])) if newest else old.files
        by_library = variables.setdefault(name, {})
        by_library.pop(library, None)
        if found:
            by_library[library] = Reader(library, found, files)
    kept_variables = {name: by for name, by in variables.items() if by}
    return Data({**releases, library: order}, data.brings, kept_variables)


def _most_relevant(files: set[str]) -> list[str]:
    """Return the library's own code before its tests and vendored parts, Python before C++."""

    def rank(file: str) -> tuple[bool, bool, str]:
        return ("test" in file or "_vendor" in file, not file.endswith(".py"), file)

    return sorted(files, key=rank)[:FILES]


def _add_folder(folder: pathlib.Path, version: str) -> None:
    library = next(
        key for key, (_, where) in LIBRARIES.items() if folder.as_posix().endswith(where)
    )
    data = merge(load(), library, version, environment_readers.readers(folder))
    _write(data)


def _add_release(requirement: str) -> None:
    """Fetch one release and add it; with a torch also its NCCL and Triton."""
    project, _, version = requirement.partition("==")
    library = next(key for key, (projects, _) in LIBRARIES.items() if project in projects)
    with tempfile.TemporaryDirectory(prefix="variables-") as folder:
        root = pathlib.Path(folder)
        fetch(project, version, root)
        found = environment_readers.readers(root / LIBRARIES[library][1])
        needs = _needs(root) if library == "torch" else {}
    data = merge(load(), library, version, found)
    if needs:
        text = ", ".join(f"{_called(name)} {release}" for name, release in sorted(needs.items()))
        data = data._replace(brings={**data.brings, version: text})
    _write(data)
    for name, release in sorted(needs.items()):
        if release not in data.releases.get(_called(name), []):
            _add_release(f"{name}=={release}")


def _called(project: str) -> str:
    return next(key for key, (projects, _) in LIBRARIES.items() if project in projects)


def _needs(root: pathlib.Path) -> dict[str, str]:
    """Return the NCCL and Triton that a torch requires, by project, from its metadata."""
    metadata = next(root.glob("torch-*.dist-info/METADATA")).read_text(encoding="utf-8")
    pattern = r"(?m)^Requires-Dist: (nvidia-nccl-cu\d+|triton) ?\(?[=~]=([\d.]+)"
    return dict(re.findall(pattern, metadata))


# The hand-written part


def _check() -> int:
    """Print where variable_effects.yaml and the data disagree; return 1 if they do."""
    data, settings = load(), yaml.safe_load(EFFECTS.read_text(encoding="utf-8"))["settings"]
    wrong = [
        f"{name}: {EFFECTS.name} calls it dead, and {', '.join(data.variables[name])} reads it"
        for name, entry in settings.items()
        if entry.get("dead") and not entry.get("until") and name in data.variables
    ]
    wrong += [
        f"{name}: has no `dead`, and no library of the data and no `reader` of its own reads it"
        for name, entry in settings.items()
        if not entry.get("dead") and name not in data.variables and not entry.get("reader")
    ]
    print("\n".join(wrong) or f"{len(data.variables)} variables, {len(settings)} with effects: fit")
    return 1 if wrong else 0


def _write(data: Data) -> None:
    """Write the data, with the names that variable_effects.yaml declares dead."""
    written = yaml.safe_load(EFFECTS.read_text(encoding="utf-8"))
    settings = written["settings"].items()
    dead = {
        name
        for name, entry in settings
        if entry.get("dead") and not (entry.get("quiet") or entry.get("until"))
    }
    text = render(
        data._replace(
            nobody=tuple(sorted(dead - {*data.variables})),
            owned=tuple(written["owned"]),
            driver=tuple(written["driver"]),
            others=tuple(written["others"]),
        )
    )
    DATA.write_text(text, encoding="utf-8")
    sizes = {library: len(known) for library, known in data.releases.items()}
    print(f"{DATA.name}: {len(text)} bytes, {len(data.variables)} variables, releases {sizes}")


if __name__ == "__main__":
    sys.exit(main())
