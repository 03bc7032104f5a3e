"""Profile files: how they are found, chosen and read. yaml_reader.py parses them."""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from saferun.errors import ProfileError
from saferun.knowledge.variable_names import loads_code
from saferun.model import GpuFacts
from saferun.profile import cache
from saferun.profile.merge import Conditions, Given, resolve
from saferun.profile.schema import MAX_BYTES, Doc, nearest
from saferun.settings import KEYS
from saferun.system import paths, trust

LOCAL = "saferun.yaml"
_STREAMS = ("/dev/", "/proc/")  # paths of `--profile <(command)` and /dev/stdin


class Found(NamedTuple):
    """A profile file, with its path as shown to people."""

    name: str
    path: str
    shown: str  # "profiles/h100.yaml", "./saferun.yaml", "/home/x/.config/saferun/profiles/h.yaml"
    guarded: bool = False  # nobody named it, so only we or root may have written it


class Chosen(NamedTuple):
    """The profile to use, why it was chosen, and what else the plan depends on.

    `chain` has its ancestors first and the profile itself last.
    """

    chain: tuple[Doc, ...]
    named: bool
    origin: str
    remarks: tuple[str, ...] = ()
    sets: tuple[Given, ...] = ()  # the user's settings, which override it
    gpus: GpuFacts = GpuFacts()  # the machine's GPUs; not detected for a profile without GPUs


def user_dir(environ: Mapping[str, str]) -> str:
    """Return the directory of the user's own profiles; it may not exist."""
    return os.path.join(paths.config_dir(environ), "profiles")


def known(environ: Mapping[str, str]) -> list[Found]:
    """Return the user's profiles, then the shipped ones, by name.

    Profiles that others can write are left out (HOME may be another user's).
    """
    own = (found._replace(guarded=True) for found in _listed(user_dir(environ), None))
    trusted = (found for found in own if not trust.problem(found.path))
    return [*trusted, *_listed(paths.shipped("profiles"), "profiles")]


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
    """Choose a profile: the wanted one, else `./saferun.yaml`, else by the GPU's product name.

    Args:
        wanted: a profile's name or file; None or "" if none was named.
        wanted_by: "--profile" or "SAFERUN_PROFILE".
        environ: variables that give the user's directories.
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
        return Chosen(chain(found, environ), True, wanted_by, remarks)
    local, refusal = local_profile(cwd)
    if local is not None:
        docs, dropped = _without_recovery(chain(local, environ))
        return Chosen(docs, True, local.shown, (*_code_loading(local, docs), *dropped))
    found, remarks = detect(gpu, environ)
    docs, dropped = _without_recovery(chain(found, environ))
    return Chosen(docs, False, "detected", (*refusal, *remarks, *dropped))


def local_profile(cwd: str) -> tuple[Found | None, tuple[str, ...]]:
    """Return `./saferun.yaml` if it exists and can be trusted, else why it is not used."""
    path = os.path.join(cwd, LOCAL)
    if not os.path.exists(path):
        return None, ()
    if problem := trust.problem(path):
        use = f"if you trust it: --profile ./{LOCAL}"
        return None, (f"./{LOCAL} is not used: {problem}; {use}",)
    return Found("", path, f"./{LOCAL}", guarded=True), ()


def _code_loading(local: Found, docs: Iterable[Doc]) -> Iterator[str]:
    """Warn about variables that load code into programs, in a file that nobody named."""
    names = {key.partition(".")[2] for doc in docs for key in doc.leaves if key.startswith("env.")}
    if found := sorted(filter(loads_code, names)):
        yield f"{local.shown} sets {', '.join(found)}, which can make programs load code"


def _without_recovery(docs: tuple[Doc, ...]) -> tuple[tuple[Doc, ...], tuple[str, ...]]:
    """Drop `recover.*`: a GPU is reset only if the user has named the profile that asks for it."""
    keys = [key for key in KEYS if key.startswith("recover.")]
    asked = [f"{key} of {doc.path}" for doc in docs for key in keys if key in doc.leaves]
    if not asked:
        return docs, ()
    kept = tuple(
        doc._replace(leaves={k: leaf for k, leaf in doc.leaves.items() if k not in keys})
        for doc in docs
    )
    return kept, (f"{', '.join(asked)} is not used: name the profile with --profile",)


def find(name: str, environ: Mapping[str, str], cwd: str) -> Found:
    """Find a profile by path, or by name in ./saferun.yaml, the user's and the shipped ones.

    Args:
        name: a path (with "/" or a YAML suffix) or a profile's name.
        environ: variables that give the user's directories.
        cwd: the working directory.

    Raises:
        ProfileError: no profile has that name; the fix lists the known ones.
    """
    if _is_path(name):
        path = os.path.join(cwd, os.path.expanduser(name))
        if not os.path.exists(path):
            raise ProfileError(f"there is no profile file `{name}`", fix=_fix(name, environ, cwd))
        return Found(_stem(name), path, name)
    local, refusal = local_profile(cwd)
    if local is not None and load(local, environ).name == name:
        return local._replace(name=name)
    for found in known(environ):
        if found.name == name:
            return found
    fix = "; ".join((*_untrusted(name, environ), *refusal, _fix(name, environ, cwd)))
    raise ProfileError(f"unknown profile `{name}`", fix=fix)


def _untrusted(name: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield why a profile of this name in the user's directory is not used."""
    for found in _listed(user_dir(environ), None):
        if found.name == name and (problem := trust.problem(found.path)):
            yield f"{found.path} is not used: {problem}"


def _fix(name: str, environ: Mapping[str, str], cwd: str) -> str:
    stem = _stem(name)
    if not _is_path(name) and os.path.exists(os.path.join(cwd, f"{stem}.yaml")):
        return f"./{stem}.yaml is here: --profile ./{stem}.yaml"
    names = _known_names(environ)
    guess = nearest(stem, names)
    listed = f"known: {', '.join(names)}"
    return f"{guess} {listed}" if guess.startswith("did") else listed


def _is_path(name: str) -> bool:
    """Return whether a text that names a profile is a path rather than a name."""
    return "/" in name or name.endswith((".yaml", ".yml"))


def _stem(path: str) -> str:
    return os.path.splitext(os.path.basename(path))[0]


def _known_names(environ: Mapping[str, str]) -> list[str]:
    return list(dict.fromkeys(found.name for found in known(environ)))


def chain(found: Found, environ: Mapping[str, str]) -> tuple[Doc, ...]:
    """Load a profile and its ancestors, ancestors first, each once.

    Args:
        found: the profile.
        environ: variables that give the user's directories.

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
    """Find the profile that `extends` names: a file in its folder, or another known profile."""
    if _is_path(name):
        path = os.path.join(os.path.dirname(child.path), os.path.expanduser(name))
        if os.path.exists(path):
            _check_parent(path, child)
            return Found(_stem(name), path, path, child.guarded)
    own = os.path.realpath(child.path)
    for found in known(environ):
        if found.name == name and os.path.realpath(found.path) != own:
            return found
    if name == doc.name:
        raise ProfileError(
            f"`{name}` extends itself", where=child.shown, fix="remove it from `extends`"
        )
    fix = nearest(name, _known_names(environ))
    raise ProfileError(f"extends an unknown profile `{name}`", where=child.shown, fix=fix)


def _check_parent(path: str, child: Found) -> None:
    """Refuse a parent that others can write if nobody named the child.

    Raises:
        ProfileError: the parent cannot be trusted.
    """
    if child.guarded and (problem := trust.problem(path)):
        raise ProfileError(
            f"extends {path}, which is not used: {problem}",
            where=child.shown,
            fix=f"if you trust both: --profile {child.shown}",
        )


def check_chain(docs: tuple[Doc, ...]) -> None:
    """Check a profile together with its ancestors, under each combination of its conditions.

    Raises:
        ProfileError: values exclude each other.
    """
    versions = {None, *(v for doc in docs for v in _versions(doc))}
    for torch in versions:
        for gpus in (0, 1, 8):
            for distributed, named in itertools.product((False, True), repeat=2):
                at = Conditions(torch, gpus, distributed, named)
                resolve(docs, (), at, origin=docs[-1].path)


def _versions(doc: Doc) -> Iterator[str]:
    """Yield the torch versions that a profile's `when: torch:` clauses name."""
    for leaf in doc.leaves.values():
        for name, wanted in leaf.when:
            if name == "torch":
                yield from re.findall(r"\d+(?:\.\d+)*", str(wanted))


def detect(gpu: GpuFacts, environ: Mapping[str, str]) -> tuple[Found, tuple[str, ...]]:
    """Choose a profile by the product names of the visible GPUs; the longest `match` wins.

    Returns:
        The profile, and remarks. It is `cpu` without GPUs, and `cuda` if no profile matches or the
        GPUs differ.

    Raises:
        ProfileError: the shipped ones are not there, or not for this user.
    """
    profiles = known(environ)
    by_name = {found.name: found for found in reversed(profiles)}
    if not {"cpu", "cuda"} <= by_name.keys():
        place = paths.shipped("profiles")
        raise ProfileError("no profile can be read", where=place, fix="install saferun anew")
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
    """Return whether a product name contains a fragment as whole words: "GH100" has no "H100"."""
    words = f" {' '.join(product.upper().replace('-', ' ').split())} "
    return f" {' '.join(fragment.upper().replace('-', ' ').split())} " in words


def load(found: Found, environ: Mapping[str, str]) -> Doc:
    """Read one profile file, from the cache if its text is unchanged.

    Raises:
        ProfileError: the file is unreadable or not a profile.
    """
    text = read(found.path, found.shown, guarded=found.guarded)
    doc = cache.read(found.path, found.shown, text, environ)
    if doc is None:
        from saferun.profile import yaml_reader  # a script has no YAML, a launch has the cache

        doc = yaml_reader.parse(text, found.shown)
        cache.write(found.path, doc, text, environ)
    return doc


def read(path: str, shown: str, *, guarded: bool = False) -> str:
    """Return a profile's text.

    Args:
        path: the file's path.
        shown: the profile's name in messages.
        guarded: check the open file again: only we or root may have written it.

    Raises:
        ProfileError: the file is unreadable, too large or not UTF-8.
    """
    try:
        with open(path, "rb", opener=_opener) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) and not path.startswith(_STREAMS):
                raise OSError(errno.EINVAL, "not a regular file")
            if guarded and (problem := trust.of_file(file.fileno())):
                raise OSError(errno.EPERM, problem)
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


def _opener(path: str, flags: int) -> int:
    """Open a file without waiting for the writer of a FIFO, except for `<(command)`.

    On a regular file O_NONBLOCK has no effect (open(2)).
    """
    return os.open(path, flags if path.startswith(_STREAMS) else flags | os.O_NONBLOCK)
