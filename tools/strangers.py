"""Run `make demo` and `make test` as strangers do, each in a fresh clone; print a row for each way.

    python3 tools/strangers.py [--demo-only | --test-only] [WAY...]
    python3 tools/strangers.py --list

Root makes the users, mounts and namespaces; whoever is not root can run the ways that need none. A
way that this machine cannot have is a row with the reason. A way's log, its clone and its home stay
below the printed directory if it failed. Only what has been committed is tried.

The ways with another Python use `python3.N` of PATH, and STRANGERS_TORCH=2.14.1 replaces the pinned
torch. `minimal` needs a directory of Debian's smallest system with four packages, which
STRANGERS_ROOT names: debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,make
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONG = "a-name-that-is-longer-than-most"  # 31 characters; useradd allows 32
# What a way keeps of the caller's environment: how to reach a package index, and the corpus.
KEPT = re.compile(r"PIP_\w+|SSL_\w+|\w+_proxy|\w+_PROXY|SAFERUN_CORPUS|CI")
DOCKER = (  # capabilities(7) that docker leaves to root
    "-all,+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+setpcap,+net_bind_service,"
    "+net_raw,+sys_chroot,+mknod,+audit_write,+setfcap"
)
# A driver's files, its nodes, nvidia-smi and NVML, of a GPU that nobody can compute on.
GPU = """
gpu='{}/gpu' && mkdir -p $gpu/bin $gpu/lib $gpu/dev $gpu/driver/nvidia/gpus/0000:17:00.0
uuid=GPU-0a1b2c3d-1111-2222-3333-444455556666
cc -shared -fPIC -o $gpu/lib/libnvidia-ml.so.1 {}/saferun/tests/lab/fakes/libnvidia-ml.c
printf '%s\\n' '* driver 580.95.05' '* cuda 13000' '* GetCount_v2 1' '0 GetName NVIDIA H200' \\
  "0 GetUUID $uuid" '0 GetPciInfo_v3 00000000:17:00.0' \\
  '0 GetMemoryInfo_v2 150754820096 650117120 150101557248 3145728' > $gpu/lib/answers
: > $gpu/lib/asked && chmod 666 $gpu/lib/asked
printf '#!/bin/sh\\necho "GPU 0: NVIDIA H200 (UUID: %s)"\\n' $uuid > $gpu/bin/nvidia-smi
chmod 755 $gpu/bin/nvidia-smi
cd $gpu/driver/nvidia && printf 'NVRM version: NVIDIA UNIX  580.95.05\\n' > version
printf 'Model: NVIDIA H200\\nGPU UUID: %s\\nDevice Minor: 0\\n' $uuid > information
mv information gpus/*/
mount -t tmpfs -o mode=755 none $gpu/dev
for one in /dev/*; do
  here=$gpu/dev/${one##*/}
  if [ -L $one ]; then cp -P $one $here
  elif [ $one = /dev/ptmx ]; then mknod -m 666 $here c 5 2  # it looks for /dev/pts beside itself
  elif [ -d $one ]; then mkdir $here && mount --rbind $one $here
  else : > $here && mount --bind $one $here; fi
done
mknod -m 666 $gpu/dev/nvidia0 c 195 0 && mknod -m 666 $gpu/dev/nvidiactl c 195 255
mount --rbind $gpu/dev /dev && mount --bind $gpu/driver /proc/driver"""
PROCESS_1 = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@dataclass(frozen=True)
class Way:
    """One way to run the two commands."""

    what: str
    user: str = (
        ""  # who runs them: a user made for it; "" for the caller; "4242" for one without a name
    )
    source: str = (
        "clone"  # or "archive" (no .git), "crlf" (core.autocrlf), "others" (another's clone)
    )
    folder: str = "saferun"  # below the user's home
    umask: str = "022"
    environ: Mapping[str, str] = field(default_factory=dict)  # {} in a value is the home
    around: Sequence[str] = ()  # command that runs them
    mounts: str = ""  # shell commands in a mount namespace of its own; {} is the home
    python: str = "python3"
    needs: Sequence[str] = ()  # programs


WAYS = {
    "user": Way("an ordinary user", "stranger", folder="a folder/saferun", umask="002"),
    "private": Way(
        "umask 077, path and TMPDIR with blanks and an umlaut, tmpfs, no terminal",
        "stranger",
        folder="my räume/saferun",
        umask="077",
        environ={"TMPDIR": "{}/tmp as long as those of pam_tmpdir", "TERM": "dumb"},
        mounts="mount -t tmpfs none '{}/tmp as long as those of pam_tmpdir'",
        around=("setsid", "--wait"),
    ),
    "tarball": Way(
        "git archive, a long user name, LANG=POSIX, TMPDIR without execution",
        LONG,
        "archive",
        environ={"LANG": "POSIX", "TMPDIR": "{}/tmp"},
        mounts="mount -t tmpfs -o noexec none {}/tmp",
    ),
    "container": Way(
        "docker's rights, process 1, /dev/shm of 64 MiB, another user's clone, in German",
        source="others",
        environ={"LANG": "de_DE.UTF-8", "LC_ALL": "de_DE.UTF-8", "LANGUAGE": "de"}
        | {"PYTHONUTF8": "0", "TZ": "Asia/Kolkata"},
        mounts="mount -t tmpfs -o size=64m none /dev/shm",
        around=(*PROCESS_1, "setpriv", "--bounding-set", DOCKER),
    ),
    "nobody": Way(
        "a uid without a line in passwd, core.autocrlf=true, no LANG, fish",
        "4242",
        "crlf",
        environ={"HOME": "/", "LANG": "", "SHELL": "/usr/bin/fish"},
    ),
    "gpu": Way(
        "a machine with a GPU, as its driver's files, nvidia-smi and NVML tell",
        "stranger",
        environ={"PATH": "{}/gpu/bin:/usr/local/bin:/usr/bin:/bin"}
        | {"LD_LIBRARY_PATH": "{}/gpu/lib"},
        mounts=GPU,
        needs=("cc",),
    ),
    "minimal": Way(
        "Debian's smallest system: no git, gcc, curl, procps",
        "stranger",
        "archive",
        mounts="cd $STRANGERS_ROOT && mount -t proc none proc && mount -t tmpfs none dev/shm"
        " && mount -t devpts none dev/pts",
    ),
    **{f"python3.{n}": Way(f"Python 3.{n}", python=f"python3.{n}") for n in range(10, 15)},
}


def main(argv: Sequence[str]) -> int:
    """Try the ways, and print the table; the status is 1 where a command failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ways", nargs="*", metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--list", action="store_true", help="print the ways, and run none")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--demo-only", action="store_true")
    only.add_argument("--test-only", action="store_true")
    asked = parser.parse_args(argv)
    if unknown := set(asked.ways) - set(WAYS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(WAYS)}")
    if asked.list:
        print("\n".join(f"{name:12} {way.what}" for name, way in WAYS.items()))
        return 0
    commands = ["demo"] * (not asked.test_only) + ["test"] * (not asked.demo_only)
    print("| way | Python, torch | result | minutes |\n| --- | --- | --- | --- |", flush=True)
    return max(tried(name, commands, is_named=bool(asked.ways)) for name in asked.ways or WAYS)


def tried(name: str, commands: Sequence[str], *, is_named: bool) -> int:
    """Try one way, and print its row; one that was named and cannot be had has failed."""
    way = WAYS[name]
    versions, minutes, status = "", 0.0, 0
    if result := missing(name, way):
        result, status = f"skipped: {result}", int(is_named)
    else:
        began = time.monotonic()
        with home_of(name, way) as home:
            results = []
            for command in commands:
                done = make(name, way, home, command)
                results.append(f"{command}: {done}")
                status |= not done.startswith("passed")
            versions = asked_versions(name, way, home)
            if status:
                keep(home)
        result, minutes = ", ".join(results), (time.monotonic() - began) / 60
    print(f"| {name}: {way.what} | {versions} | {result} | {minutes:.0f} |", flush=True)
    return status


def missing(name: str, way: Way) -> str:
    """Return what this machine lacks for a way; "" if nothing."""
    programs = ["make", "git", *way.around[:1], *(["unshare"] if way.mounts else [])]
    if absent := [program for program in programs if not shutil.which(program)]:
        return f"no {', '.join(absent)}"
    if name == "minimal":
        place = os.environ.get("STRANGERS_ROOT", "")
        return "" if os.path.isdir(f"{place}/usr/bin") and place else "no STRANGERS_ROOT"
    if not shutil.which(way.python):
        return f"no {way.python}"
    started = subprocess.run([way.python, "-c", "import venv"], capture_output=True)
    if started.returncode:  # a shim without its program, or Debian's Python without its venv
        return f"{way.python} does not run, or has no venv"
    rights = way.user or way.mounts or way.source == "others"
    return "needs root" if rights and os.geteuid() else ""


@contextmanager
def home_of(name: str, way: Way) -> Iterator[Path]:
    """Give a home with a fresh clone in it, both of the way's user."""
    with ExitStack() as stack:
        base = f"{os.environ['STRANGERS_ROOT']}/home" if name == "minimal" else "/home"
        if os.geteuid():
            base = None  # type: ignore[assignment]
        home = Path(tempfile.mkdtemp(prefix=f"{way.user or name}-", dir=base))
        stack.callback(lambda: (home / "kept").exists() or shutil.rmtree(home, ignore_errors=True))
        owner = user_id(way.user or ("stranger" if way.source == "others" else ""), stack)
        (home / "tmp").mkdir()
        (home / "tmp as long as those of pam_tmpdir").mkdir()
        fetch(way, home / way.folder)
        for place in (home, *home.rglob("*")):
            os.chown(place, owner, owner, follow_symlinks=False)
        yield home


def user_id(user: str, stack: ExitStack) -> int:
    """Return the uid of a user, who is made if there is none and goes with the stack."""
    if not user:
        return os.geteuid()
    if user.isdigit():
        return int(user)
    run = subprocess.run
    if run(["id", "-u", user], capture_output=True).returncode:
        run(["useradd", "--no-create-home", "--user-group", user], check=True)
        stack.callback(run, ["userdel", user], capture_output=True)
    return int(subprocess.check_output(["id", "-u", user]))


def fetch(way: Way, folder: Path) -> None:
    """Put what is committed, and the corpus if there is one, where the way wants it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    before = os.umask(int(way.umask, 8))
    git = ["git", "-c", f"safe.directory={ROOT}", "-c", f"safe.directory={ROOT}/.git"]
    if way.source == "archive":
        folder.mkdir()
        packed = subprocess.check_output([*git, "-C", str(ROOT), "archive", "HEAD"])
        subprocess.run(["tar", "-x", "-C", str(folder)], input=packed, check=True)
    else:
        options = ["-c", "core.autocrlf=true"] if way.source == "crlf" else []
        subprocess.run([*git, "clone", "--quiet", *options, str(ROOT), str(folder)], check=True)
    if (corpus := ROOT.parent / "shared" / "corpus").is_dir():
        shutil.copytree(corpus, folder.parent / "shared" / "corpus")
    if torch := os.environ.get("STRANGERS_TORCH"):
        pins = folder / "constraints.txt"
        pins.write_text(re.sub(r"(?m)^torch==.*$", f"torch=={torch}", pins.read_text("utf-8")))
    os.umask(before)


def make(name: str, way: Way, home: Path, target: str) -> str:
    """Run one of the two commands; return its outcome in a few words."""
    log = home / f"{target}.log"
    with log.open("w") as file:
        words = as_stranger(name, way, home, "make", target, f"PYTHON={way.python}")
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    lines = [line.strip("= \n") for line in log.open(encoding="utf-8", errors="replace")]
    counted = [line for line in lines if re.search(r"\d+ (passed|failed).* in [\d.]+s", line)]
    outcome = "failed" if done.returncode else "passed"
    return f"{outcome} ({counted[-1].rpartition(' in ')[0]})" if counted else outcome


def as_stranger(name: str, way: Way, home: Path, *command: str) -> list[str]:
    """Return the words that run a command in a way's clone."""
    inside = str(home)
    words = ["env", "-i", *environment(way, home, name)]
    if name == "minimal":
        root = os.environ["STRANGERS_ROOT"]
        inside = "/" + os.path.relpath(home, root)
        words = ["chroot", f"--userspec={user_id(way.user, ExitStack())}", root, *words]
    elif way.user:
        uid = str(user_id(way.user, ExitStack()))
        words = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *words]
    place = shlex.quote(f"{inside}/{way.folder}")
    run = shlex.join(["exec", *way.around, *command])
    words += ["sh", "-c", f"umask {way.umask} && cd {place} && {run}"]
    if way.mounts:
        mounts = way.mounts.replace("{}", inside)
        words = ["unshare", "--mount", "sh", "-ec", f'{mounts}; exec "$@"', "-", *words]
    return words


def environment(way: Way, home: Path, name: str) -> list[str]:
    """Return the variables of a new login, and the way's own, as words for `env`."""
    inside = f"/home/{home.name}" if name == "minimal" else str(home)
    own = {"HOME": inside, "LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin"}
    if not way.user:
        own["PATH"] = os.environ["PATH"]
    kept = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
    wanted = {**kept, **own, **{n: v.replace("{}", inside) for n, v in way.environ.items()}}
    return [f"{name}={value}" for name, value in wanted.items() if value]


def asked_versions(name: str, way: Way, home: Path) -> str:
    """Return the versions that a clone was tried with."""
    code = "import platform, torch; print(platform.python_version(), torch.__version__, sep=', ')"
    words = as_stranger(name, way, home, ".venv/bin/python", "-c", code)
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def keep(home: Path) -> None:
    """Leave a way's files, and say where, with the end of its logs."""
    (home / "kept").touch()
    for log in sorted(home.glob("*.log")):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        sys.stderr.writelines(lines[-60:])
    print(f"{home}: the logs and the clone", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
