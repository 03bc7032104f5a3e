"""Checks which releases of which libraries print the phrases of `knowledge/failures.yaml`.

    python tools/messages.py add torch==2.16.0     fetch releases with pip and look all phrases up
    python tools/messages.py check                 look all phrases up again, in what is kept
    python tools/messages.py show PHRASE…          which releases print this
    python tools/messages.py unclaimed             phrases without a claim, and who prints them

`add` and `check` write `tests/records/messages.yaml`, and name each phrase whose claim (`says` in
failures.yaml) does not fit. A new release of torch needs `add`. The wheels are gigabytes in total:
they are fetched one at a time into a temporary directory (TMPDIR) and deleted. The texts that were
found in them, some MiB a release, stay in the user's cache directory, never in the project. A new
phrase is looked up there by `check`; what an `add` has not fetched on this machine is not known of
it.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import message_texts
import yaml
from library_releases import fetch, ranges
from message_texts import Texts

from saferun.audit.variable_index import version

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "records" / "messages.yaml"
FAILURES = ROOT / "src" / "saferun" / "knowledge" / "failures.yaml"
KEPT = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
KEPT /= "saferun-messages"
# A library's name in the claims; the project that ships it, and its folder there. Of two libraries
# that print a phrase the first one is claimed.
LIBRARIES = {
    "torch": ("torch", "torch"),
    "nccl": ("nvidia-nccl-cu12", "nvidia/nccl"),
    "triton": ("triton", "triton"),
    "deepspeed": ("deepspeed", "deepspeed"),
    "lightning": ("lightning", "lightning"),
    "accelerate": ("accelerate", "accelerate"),
    "transformers": ("transformers", "transformers"),
    "huggingface_hub": ("huggingface_hub", "huggingface_hub"),
    "tensorflow": ("tensorflow", "tensorflow"),
}
UNCLAIMED = "elsewhere"  # other programs, older releases, and words too plain to prove anything
PLAIN_CHARS = 12  # a phrase whose longest part is shorter is such a word
PER_LINE = 8  # phrases of the record
HEAD = """\
# Which releases print which phrase of src/saferun/knowledge/failures.yaml. Made by
# tools/messages.py from the released wheels; tests/knowledge/test_messages.py compares it with
# what failures.yaml claims. A phrase stands here by the first digits of its SHA-256.
"""


class Record(NamedTuple):
    """The content of messages.yaml."""

    releases: dict[str, list[str]]  # library -> releases looked at, one a minor version, in order
    found: dict[str, dict[str, tuple[str, ...]]]  # phrase's hash -> library -> minor versions


def main(argv: list[str] | None = None) -> int:
    """Run a command; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("add", "check", "show", "unclaimed"))
    parser.add_argument("what", nargs="*", help="PROJECT==VERSION, or a phrase")
    options = parser.parse_args(argv)
    says = claimed(yaml.safe_load(FAILURES.read_text(encoding="utf-8")))
    if options.command == "show":
        for phrase in options.what:
            record = looked_up([phrase], kept())
            print(f"{phrase}: {shown(record.found.get(digest(phrase), {}), record) or 'nowhere'}")
        return 0
    if options.command == "unclaimed":
        print(*unclaimed(says, load()), sep="\n")
        return 0
    if options.command == "add":
        for requirement in options.what:
            _add(requirement)
    record = merged(load(), looked_up(says, kept()), says)
    write(record)
    wrong = misfits(says, record)
    print("\n".join(wrong) or f"{len(says)} phrases: fit")
    return 1 if wrong else 0


# Claims


def claimed(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the claim of each phrase that a sign says: "torch 2.4..2.9", or UNCLAIMED."""
    claims: dict[str, str] = {}
    for sign in document["signs"]:
        says = sign.get("says", [])
        groups = says if isinstance(says, dict) else {UNCLAIMED: says}
        for claim, phrases in groups.items():
            for phrase in phrases:
                if claims.get(phrase, UNCLAIMED) == UNCLAIMED:
                    claims[phrase] = claim
    return claims


def misfits(says: Mapping[str, str], record: Record) -> list[str]:
    """Return what is wrong with the claims, a line each.

    Args:
        says: each phrase and its claim.
        record: which release prints it.
    """
    wrong = []
    for phrase, claim in says.items():
        found = record.found.get(digest(phrase), {})
        if claim == UNCLAIMED:
            continue
        library, ranges = claim.split()
        if not set(minors(ranges, library, record)) <= set(found.get(library, ())):
            wrong.append(f"`{phrase}` claims {claim}, and is in {shown(found, record) or 'none'}")
    return wrong


def unclaimed(says: Mapping[str, str], record: Record) -> list[str]:
    """Return the phrases that claim nothing, each with the releases that print it."""
    found = {
        phrase: shown(record.found.get(digest(phrase), {}), record)
        for phrase, claim in says.items()
        if claim == UNCLAIMED and is_telling(phrase)
    }
    return [f"{phrase}: {where or 'nowhere'}" for phrase, where in found.items()]


def is_telling(phrase: str) -> bool:
    """Return whether a phrase is long enough to be no word that any program may print."""
    return len(max(phrase.split(" ... "), key=len).strip()) >= PLAIN_CHARS


def minors(ranges: str, library: str, record: Record) -> list[str]:
    """Return the minor versions of "2.4..2.6,2.8..", of those that were looked at.

    Raises:
        ValueError: a version was not looked at.
    """
    order = [minor(release) for release in record.releases[library]]
    found: list[str] = []
    for piece in ranges.split(","):
        first, _, last = piece.partition("..")
        if unknown := {first, last or first}.difference(order):
            raise ValueError(f"nobody looked at {library} {', '.join(sorted(unknown))}")
        found += order[order.index(first) : order.index(last) + 1 if last else None]
    return found


def minor(release: str) -> str:
    """Return "2.4" of "2.4.1"."""
    return ".".join(release.split(".")[:2])


def shown(found: Mapping[str, tuple[str, ...]], record: Record) -> str:
    """Return what was found as claims: "torch 2.4.., nccl 2.20..2.25"."""
    return ", ".join(
        f"{library} {ranges(found[library], [minor(r) for r in record.releases[library]])}"
        for library in LIBRARIES
        if library in found
    )


# The record


def digest(phrase: str) -> str:
    """Return the name of a phrase in the record."""
    return hashlib.sha256(phrase.encode()).hexdigest()[:8]


def merged(old: Record, new: Record, says: Iterable[str]) -> Record:
    """Return a record with what was looked up just now in place of what it had on these releases.

    Args:
        old: the record.
        new: what was looked up.
        says: the phrases that there are; others are left out.
    """
    releases: dict[str, list[str]] = {}
    for library in LIBRARIES:
        by_minor = {
            minor(one): one for part in (old, new) for one in part.releases.get(library, ())
        }
        if by_minor:
            releases[library] = sorted(by_minor.values(), key=version)
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for name in map(digest, says):
        for library, order in releases.items():
            fresh = {minor(one) for one in new.releases.get(library, ())}
            kept_ones = set(old.found.get(name, {}).get(library, ())) - fresh
            here = kept_ones | set(new.found.get(name, {}).get(library, ()))
            if here:
                in_order = tuple(minor(one) for one in order if minor(one) in here)
                found.setdefault(name, {})[library] = in_order
    return Record(releases, found)


def load() -> Record:
    """Return the record; an empty one where there is none."""
    if not RECORD.exists():
        return Record({}, {})
    document = yaml.load(RECORD.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # noqa: S506 (it makes strings only)
    record = Record(document["releases"], {})
    for claim, digests in document["found"].items():
        library, spans = claim.split()
        for name in digests:
            by = record.found.setdefault(name, {})
            by[library] = tuple(minors(spans, library, record))
    return record


def write(record: Record) -> None:
    """Write the record; equal ones give equal text."""
    groups: dict[str, list[str]] = {}
    for name, by in record.found.items():
        for library, versions in by.items():
            order = [minor(release) for release in record.releases[library]]
            groups.setdefault(f"{library} {ranges(versions, order)}", []).append(name)
    lines = [HEAD, "releases:"]
    lines += [f"  {library}: [{', '.join(all_of)}]" for library, all_of in record.releases.items()]
    lines += ["", "found:"]
    for claim, digests in sorted(groups.items()):
        names = [f'"{name}"' for name in sorted(digests)]
        rows = [", ".join(names[at : at + PER_LINE]) for at in range(0, len(names), PER_LINE)]
        lines += [f"  {claim}: [", *(f"    {row}," for row in rows), "  ]"]
    RECORD.write_text("\n".join(lines) + "\n", encoding="utf-8")


def looked_up(says: Iterable[str], texts: Mapping[str, Mapping[str, Texts]]) -> Record:
    """Return which releases print which phrases.

    Args:
        says: the phrases.
        texts: library -> release -> what it prints, in order.
    """
    record = Record({library: list(by) for library, by in texts.items()}, {})
    for library, by in texts.items():
        releases, order = message_texts.Releases(list(by.values())), list(by)
        for phrase in filter(is_telling, says):
            if found := releases.that_print(phrase):
                versions = tuple(minor(order[index]) for index in sorted(found))
                record.found.setdefault(digest(phrase), {})[library] = versions
    return record


# What releases print


def kept() -> dict[str, dict[str, Texts]]:
    """Return the texts of every release that was fetched, by library and version, in order."""
    found: dict[str, dict[str, Texts]] = {}
    for library in LIBRARIES:
        names = [path.name.removesuffix(".gz") for path in KEPT.glob(f"{library}-*.gz")]
        for name in sorted(names, key=lambda name: version(name.partition("-")[2])):
            content = gzip.decompress((KEPT / f"{name}.gz").read_bytes()).decode()
            literals, strings = (tuple(part.split("\0")) for part in content.split("\0\0\0"))
            found.setdefault(library, {})[name.partition("-")[2]] = Texts(literals, strings)
    return found


def _add(requirement: str) -> None:
    """Fetch a release and keep what it prints; it replaces others of its minor version."""
    project, _, release = requirement.partition("==")
    library = next(key for key, (name, _) in LIBRARIES.items() if name == project)
    with tempfile.TemporaryDirectory(prefix="messages-") as folder:
        root = pathlib.Path(folder)
        fetch(project, release, root, _may_print)
        texts = message_texts.read(next(root.rglob(LIBRARIES[library][1])))
    KEPT.mkdir(parents=True, exist_ok=True)
    for path in KEPT.glob(f"{library}-{minor(release)}.*gz"):
        path.unlink()
    content = "\0\0\0".join("\0".join(part) for part in texts).encode()
    (KEPT / f"{library}-{release}.gz").write_bytes(gzip.compress(content, 6))
    print(
        f"{requirement}: {len(texts.literals)} literals, {len(texts.strings)} strings", flush=True
    )


def _may_print(name: str) -> bool:
    """Return whether a file of a wheel has texts that are looked for."""
    return name.endswith((".py", ".c")) or ".so" in name


if __name__ == "__main__":
    sys.exit(main())
