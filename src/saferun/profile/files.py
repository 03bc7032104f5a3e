"""Profile files: how they are found, chosen, read and cached. yaml_reader.py parses them.

A parsed profile is cached together with its text, which is compared at every use, so that a launch
does not have to import a YAML parser.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

from saferun import __version__
from saferun.errors import ProfileError
from saferun.model import GpuFacts
from saferun.named_tuple import NamedTuple
from saferun.profile.schema import KEYS, MAX_BYTES, Doc, Leaf, nearest
from saferun.system import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LOCAL = "saferun.yaml"


class Found(NamedTuple):
    """A profile file, with its path as shown to people."""

    name: str
    path: str
    shown: str  # "profiles/h100.yaml", "./saferun.yaml", "/home/x/.config/saferun/profiles/h.yaml"


class Chosen(NamedTuple):
    """The profile to use, after its ancestors, and what chose it."""

    chain: tuple[Doc, ...]
    named: bool
    origin: str
    remarks: tuple[str, ...] = ()


def user_dir(environ: Mapping[str, str]) -> str:
    """Return the directory of the user's own profiles; it may not exist."""
    return os.path.join(paths.config_dir(environ), "profiles")


def known(environ: Mapping[str, str]) -> list[Found]:
    """Return the user's profiles, then the shipped ones, by name."""
    return [*_listed(user_dir(environ), None), *_listed(paths.shipped("profiles"), "profiles")]


def _listed(directory: str, shown: str | None) -> Iterator[Found]:
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return
    for name in names:
        stem, extension = os.path.splitext(name)
        if extension in (".yaml", ".yml") and not stem.startswith("."):
            path = os.path.join(directory, name)
            yield Found(stem, path, f"{shown}/{name}" if shown else path)


def choose(
    wanted: str | None, wanted_by: str, environ: Mapping[str, str], cwd: str, gpu: GpuFacts
) -> Chosen:
    """Choose a profile: the one asked for, `./saferun.yaml`, or by the GPU's product name.

    Args:
        wanted: a profile's name or file; None or "" if none was named.
        wanted_by: "--profile" or "SAFERUN_PROFILE".
        environ: gives the user's directories.
        cwd: the working directory.
        gpu: the GPUs of the machine.

    Raises:
        ProfileError: the profile is unknown, or its file is unreadable or invalid.
    """
    if wanted:
        found = find(wanted, environ, cwd)
        remarks: tuple[str, ...] = ()
        if found.shown == f"./{LOCAL}":
            remarks = (f"profile {wanted} is ./{LOCAL} of this directory",)
        return Chosen(chain(found, environ, cwd), True, wanted_by, remarks)
    local = os.path.join(cwd, LOCAL)
    if os.path.exists(local):
        return Chosen(chain(Found("", local, f"./{LOCAL}"), environ, cwd), True, f"./{LOCAL}")
    found, remarks = detect(gpu, environ)
    return Chosen(chain(found, environ, cwd), False, "detected", remarks)


def find(name: str, environ: Mapping[str, str], cwd: str) -> Found:
    """Find a profile by path, or by name in ./saferun.yaml, the user's and the shipped ones.

    Args:
        name: a path (with "/" or a YAML suffix) or a profile's name.
        environ: gives the user's directories.
        cwd: the working directory.

    Raises:
        ProfileError: there is none of that name; the fix lists the known ones.
    """
    if "/" in name or name.endswith((".yaml", ".yml")):
        path = os.path.join(cwd, os.path.expanduser(name))
        if not os.path.exists(path):
            raise ProfileError(f"there is no profile file `{name}`", fix=_fix(name, environ, cwd))
        return Found(os.path.splitext(os.path.basename(name))[0], path, name)
    local = os.path.join(cwd, LOCAL)
    if os.path.exists(local) and load(Found("", local, f"./{LOCAL}"), environ).name == name:
        return Found(name, local, f"./{LOCAL}")
    for found in known(environ):
        if found.name == name:
            return found
    raise ProfileError(f"unknown profile `{name}`", fix=_fix(name, environ, cwd))


def _fix(name: str, environ: Mapping[str, str], cwd: str) -> str:
    stem = os.path.splitext(os.path.basename(name))[0]
    here = os.path.join(cwd, f"{stem}.yaml")
    if "/" not in name and not name.endswith((".yaml", ".yml")) and os.path.exists(here):
        return f"./{stem}.yaml is here: --profile ./{stem}.yaml"
    names = list(dict.fromkeys(found.name for found in known(environ)))
    guess = nearest(stem, names)
    listed = f"known: {', '.join(names)}"
    return f"{guess} {listed}" if guess.startswith("did") else listed


def chain(found: Found, environ: Mapping[str, str], cwd: str) -> tuple[Doc, ...]:
    """Load a profile and its ancestors, ancestors first, each once.

    Args:
        found: the profile.
        environ: gives the user's directories.
        cwd: the working directory.

    Raises:
        ProfileError: `extends` has a cycle or names an unknown profile.
    """
    order: list[Doc] = []
    done: set[str] = set()

    def visit(found: Found, path: tuple[str, ...]) -> None:
        identity = os.path.realpath(found.path)
        if identity in path:
            names = " -> ".join(os.path.basename(p) for p in (*path, identity))
            raise ProfileError(
                "profiles extend each other in a circle", where=names, fix="remove one `extends`"
            )
        if identity in done:
            return
        doc = load(found, environ)
        for parent in doc.extends:
            visit(_parent(parent, found, doc, environ), (*path, identity))
        done.add(identity)
        order.append(doc)

    visit(found, ())
    return tuple(order)


def _parent(name: str, child: Found, doc: Doc, environ: Mapping[str, str]) -> Found:
    """Find what a profile extends: a file in its folder, or a known profile other than itself."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        path = os.path.join(os.path.dirname(child.path), os.path.expanduser(name))
        if os.path.exists(path):
            return Found(os.path.splitext(os.path.basename(name))[0], path, path)
    own = os.path.realpath(child.path)
    for found in known(environ):
        if found.name == name and os.path.realpath(found.path) != own:
            return found
    if name == doc.name:
        raise ProfileError(
            f"`{name}` extends itself", where=child.shown, fix="remove it from `extends`"
        )
    names = list(dict.fromkeys(f.name for f in known(environ)))
    raise ProfileError(
        f"extends an unknown profile `{name}`", where=child.shown, fix=nearest(name, names)
    )


def check_chain(docs: tuple[Doc, ...]) -> None:
    """Check a profile together with its ancestors, under each combination of its conditions.

    Raises:
        ProfileError: values exclude each other.
    """
    from saferun.profile.merge import Conditions, resolve

    versions = {None, *(v for doc in docs for v in _versions(doc))}
    for torch in versions:
        for gpus in (0, 1, 8):
            for distributed in (False, True):
                at = Conditions(torch, gpus, distributed)
                resolve(docs, (), at, named=True, origin=docs[-1].path)


def _versions(doc: Doc) -> Iterator[str]:
    """Yield the torch versions that a profile's `when: torch:` clauses name."""
    import re

    for leaf in doc.leaves.values():
        for name, wanted in leaf.when:
            if name == "torch":
                yield from re.findall(r"\d+(?:\.\d+)*", str(wanted))


def detect(gpu: GpuFacts, environ: Mapping[str, str]) -> tuple[Found, tuple[str, ...]]:
    """Choose a profile by the product names of the visible GPUs; the longest `match` wins.

    Returns:
        The profile, and remarks: `cpu` without GPUs, `cuda` if no profile matches or GPUs differ.
    """
    profiles = known(environ)
    by_name = {found.name: found for found in reversed(profiles)}
    if not gpu.gpus:
        return by_name["cpu"], ()
    products = sorted({g.name for g in gpu.gpus})
    picks = {product: _pick(product, profiles, environ) for product in products}
    names = {found.name for found in picks.values() if found}
    if len(names) == 1 and all(picks.values()):
        return by_name[names.pop()], ()
    remarks: tuple[str, ...] = ()
    if len(products) > 1:
        remarks = (f"GPUs differ ({', '.join(products)}): profile cuda for all of them",)
    return by_name["cuda"], remarks


def _pick(product: str, profiles: Iterable[Found], environ: Mapping[str, str]) -> Found | None:
    best: tuple[int, Found | None] = (0, None)
    for found in profiles:
        for fragment in load(found, environ).match:
            if matches(fragment, product) and len(fragment) > best[0]:
                best = (len(fragment), found)
    return best[1]


def matches(fragment: str, product: str) -> bool:
    """Return whether a product name contains a fragment as whole words: not "H100" in "GH100"."""
    words = f" {' '.join(product.upper().replace('-', ' ').split())} "
    return f" {' '.join(fragment.upper().replace('-', ' ').split())} " in words


def load(found: Found, environ: Mapping[str, str]) -> Doc:
    """Read one profile file, from the cache if its text is unchanged.

    Raises:
        ProfileError: the file is unreadable or not a profile.
    """
    text = read(found.path, found.shown)
    entry = _cache_entry(found, environ)
    doc = _cached(entry, text, found.shown)
    if doc is None:
        from saferun.profile import yaml_reader

        doc = yaml_reader.parse(text, found.shown)
        _write_cache(entry, text, doc)
    return doc


def read(path: str, shown: str) -> str:
    """Return a profile's text.

    Raises:
        ProfileError: the file is unreadable, too large or not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ProfileError(
            f"cannot be read: {error.strerror}", where=shown, fix="check the path and its mode"
        ) from None
    if len(raw) > MAX_BYTES:
        raise ProfileError(
            f"larger than {MAX_BYTES // 1024} KiB, the limit of a profile", where=shown, fix=""
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ProfileError(
            f"not UTF-8 text (byte {error.start})", where=shown, fix="save it as UTF-8"
        ) from None


def _cache_entry(found: Found, environ: Mapping[str, str]) -> str:
    from binascii import crc32

    key = crc32(f"{found.path}\0{found.shown}".encode("utf-8", "surrogateescape"))
    return os.path.join(paths.cache_dir(environ), "profiles", f"{key:08x}.json")


def _format() -> str:
    """Return what a cached entry depends on besides its text: version and table of keys."""
    from binascii import crc32

    return f"{__version__} {crc32(repr(KEYS).encode()):08x}"


def _cached(entry: str, text: str, shown: str) -> Doc | None:
    import json

    raw = paths.read_private(entry)
    if raw is None:
        return None
    try:
        cached: Any = json.loads(raw)
        if (cached["format"], cached["path"], cached["text"]) != (_format(), shown, text):
            return None
        name, description, extends, match, leaves = cached["doc"]
        return Doc(
            shown,
            name,
            description,
            tuple(extends),
            tuple(match),
            {key: _leaf(*leaf) for key, leaf in leaves.items()},
        )
    except (ValueError, KeyError, TypeError):
        return None


def _leaf(value: Any, why: str, source: str, when: list[list[Any]], line: int) -> Leaf:
    value = tuple(value) if isinstance(value, list) else value
    return Leaf(value, why, source, tuple((name, wanted) for name, wanted in when), line)


def _write_cache(entry: str, text: str, doc: Doc) -> None:
    import json

    content = {"format": _format(), "path": doc.path, "text": text, "doc": doc[1:]}
    paths.write_private(entry, json.dumps(content).encode())
