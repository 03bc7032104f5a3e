"""Probes for values that a mitigation needs: a free port, a newer ptxas, an interface.

They run between attempts, never before the first one. A probe that finds nothing is left out, and a
mitigation that needs its value is not used (mitigation_overlay.refusal). Nothing is sent over the
network.
"""

from __future__ import annotations

import fcntl
import glob
import os
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping

from saferun.system import command
from saferun.system.interfaces import addresses, is_loopback

PTXAS_TIMEOUT_S = 10.0  # `ptxas --version` takes 10 ms, or seconds on a network file system
TOOLKITS = "/usr/local/cuda*/bin"  # where CUDA is installed by default
_FOREIGN = ("192.0.2.1", "2001:db8::1")  # documentation addresses: routed by default, never reached
_PACKAGED = (
    "triton/backends/nvidia/bin/ptxas*",
    "triton/third_party/cuda/bin/ptxas",
    "torch/bin/ptxas",
)


class Probes:
    """The answers for one run. A value that must be fresh is determined once for each attempt.

    `close` removes the directories that were made; the loop calls it at the end of the run.
    """

    def __init__(self, environ: Mapping[str, str], prefix: str | None, directory: str = "") -> None:
        """Store the places to search.

        Args:
            environ: the user's variables: PATH, CUDA_HOME, CUDA_PATH, TMPDIR.
            prefix: sys.prefix of the Python that has torch and triton; None if unknown.
            directory: where caches may lie if the temporary directory cannot be used; may be "".
        """
        self._environ = environ
        self._prefix = prefix
        self._directory = directory
        self._known: dict[tuple[str, int], str | None] = {}
        self._made: list[str] = []
        self._claims: list[int] = []  # locks on created directories while the run lives

    def ask(
        self, questions: Iterable[str], attempt: int, *, host: str = "", nodes: int = 1
    ) -> dict[str, str]:
        """Return the answers that this machine has.

        Args:
            questions: the result of `mitigation_overlay.questions`.
            attempt: number of the attempt that will use the answers.
            host: the rendezvous' host (`mitigation_overlay.meeting_host`); "" is this machine.
            nodes: number of the job's machines; 0 if unknown.

        Returns:
            The answers by question; a question without an answer is missing.
        """
        ways: dict[str, tuple[bool, Callable[[], str | None]]] = {
            "free": (True, free_port),
            "fresh": (True, lambda: f"saferun-{os.urandom(8).hex()}"),  # no other run's id
            "open-files": (False, lambda: raisable(resource.RLIMIT_NOFILE)),
            "processes": (False, lambda: raisable(resource.RLIMIT_NPROC)),
            "fresh-directory": (False, self._fresh_directory),
            "newest-ptxas": (False, lambda: newest_ptxas(self._environ, self._prefix)),
            "reachable-interface": (False, lambda: reachable_interface(host, nodes)),
        }
        found = {}
        for question in questions:
            each_time, way = ways[question]
            key = (question, attempt if each_time else 0)
            if key not in self._known:
                self._known[key] = way()
            answer = self._known[key]
            if answer is not None:
                found[question] = answer
        return found

    def close(self) -> None:
        """Remove the directories that were made. This never raises."""
        made, self._made = self._made, []
        for path in made:
            shutil.rmtree(path, ignore_errors=True)
        claims, self._claims = self._claims, []
        for claim in claims:
            os.close(claim)

    def _fresh_directory(self) -> str | None:
        """Return a private directory for the whole run: a second attempt finds a warm cache."""
        for place in (self._environ.get("TMPDIR") or "/tmp", self._directory):  # noqa: S108 - mkdtemp, 0700
            try:
                path = tempfile.mkdtemp(prefix="saferun-cache-", dir=os.path.abspath(place))
            except OSError:
                continue
            self._made.append(path)
            self._claim(path)
            return path
        return None

    def _claim(self, path: str) -> None:
        """Lock a directory that a run uses: an unlocked one may be removed (gpu/orphans.py)."""
        try:
            claim = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._claims.append(claim)
            fcntl.flock(claim, fcntl.LOCK_SH)
        except OSError:  # no locks on this file system: age and users decide
            return


def free_port() -> str | None:
    """Return a port that no process listens on, on any address of this machine.

    torch's store listens on all addresses, of both families if both exist. Another process may take
    the port before, but the kernel assigns other ports first.
    """
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):  # noqa: S104 (is it free?)
        try:
            with socket.socket(family, socket.SOCK_STREAM) as trial:
                if family == socket.AF_INET6:
                    trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                trial.bind((address, 0))
                return str(trial.getsockname()[1])
        except OSError:
            continue
    return None


def raisable(limit: int) -> str | None:
    """Return a limit's hard value (`resource.RLIMIT_…`) if the soft one is lower, else None."""
    soft, hard = resource.getrlimit(limit)
    if hard == resource.RLIM_INFINITY:
        hard = 1 << 20
    return str(hard) if soft != resource.RLIM_INFINITY and soft < hard else None


# --- ptxas ---------------------------------------------------------------------------------------


def newest_ptxas(environ: Mapping[str, str], prefix: str | None) -> str | None:
    """Return the newest ptxas of the installed CUDA toolkits if newer than the packaged ones.

    Triton and torch package a ptxas, which is found without importing them. The result is None if
    they have none to compare with.
    """
    packaged = [ptxas_version(path) for path in _packaged(prefix)]
    newest = max((version for version in packaged if version), default=None)
    found = [(ptxas_version(path), path) for path in _toolkits(environ)]
    version, path = max(((v, p) for v, p in found if v), default=((), ""))
    return path if newest is not None and version > newest else None


def ptxas_version(path: str) -> tuple[int, ...]:
    """Return the version that a ptxas prints, such as (12, 8); () if it prints none."""
    answer = command.run((path, "--version"), os.environ, PTXAS_TIMEOUT_S)
    found = re.search(r"release (\d+)\.(\d+)", answer.out)
    return (int(found[1]), int(found[2])) if found else ()


def _toolkits(environ: Mapping[str, str]) -> Iterator[str]:
    homes = [environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    folders = [os.path.join(home, "bin") for home in homes]
    folders += sorted(glob.glob(TOOLKITS))
    folders += [folder for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    seen = set()
    for path in (os.path.join(folder, "ptxas") for folder in folders):
        real = os.path.realpath(path)
        if real not in seen and os.access(path, os.X_OK):
            seen.add(real)
            yield os.path.abspath(path)


def _packaged(prefix: str | None) -> list[str]:
    if prefix is None:
        return []
    lib = os.path.join(glob.escape(prefix), "lib*", "python3*", "*-packages")
    paths = [path for end in _PACKAGED for path in glob.glob(os.path.join(lib, end))]
    return [path for path in paths if os.access(path, os.X_OK)]


# --- network -------------------------------------------------------------------------------------


def reachable_interface(host: str, nodes: int) -> str | None:
    """Return the network interface that reaches the other ranks; None if there is none.

    It is the interface towards the rendezvous host; on one machine, the one with the default route,
    or else the loopback. The local address of a connected UDP socket identifies it; connecting
    sends nothing.

    Args:
        host: the rendezvous' host; "" if unknown.
        nodes: number of the job's machines; 0 if unknown.
    """
    interfaces = {address: name for name, address in addresses()}
    alone = nodes == 1
    for target in ([] if alone or not host else [host], _FOREIGN):
        for name in target:
            address = _own_address(name)
            found = interfaces.get(address or "")
            if found and (alone or not is_loopback(address or "")):
                return found
    return "lo" if alone and "127.0.0.1" in interfaces else None


def _own_address(host: str) -> str | None:
    """Return this machine's address in a connection to a host; None if there is no route."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, target in found:
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.connect(target)
                return str(trial.getsockname()[0])
        except OSError:
            continue
    return None
