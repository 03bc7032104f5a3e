"""The program inside a bash twin's kit: the live path, begun and paced by the script.

    python3 KIT SHELL VERDICTS ORDERS NAME WORDS...

SHELL is the script's pid, VERDICTS and ORDERS are descriptors of pipes to it, NAME is its own name
and WORDS are torchrun's. Profile, plan, locks, attempts, diagnosis and decision are the very code
of `saferun`; only three things differ. The settings come from the script (settings_codec.py). The
script is told of each step and says when it is to happen: `attempt 2 5.000` (its number, and how
many seconds to wait before it), `preflight`, `recover_cuda_context`. And this process ends when the
script does.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from saferun.export import settings_codec
from saferun.export.settings_codec import Sheet
from saferun.gpu.cuda_errors import AFTER
from saferun.keeper import process_tree
from saferun.model import GpuFacts, LaunchPlan, Request
from saferun.plan import inputs
from saferun.plan.inputs import Gathered
from saferun.plan.request import read_torchrun
from saferun.profile import files as profiles
from saferun.profile.merge import Given, is_for_gpus
from saferun.profile.values import read_value
from saferun.supervise.gpu_gate import GpuCare, Report
from saferun.supervise.loop import ASKING, Pace
from saferun.supervise.start import carry_out
from saferun.system import gpus as gpu
from saferun.system.descriptors import plug_closed_descriptors
from saferun.system.stderr import report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

GO = b"go"
_SET_PDEATHSIG = 1  # linux/prctl.h
# What bash sets itself (its manual, "Shell Variables"), so that a job would find it otherwise than
# under saferun, beside all BASH…; and the script's own words, in the order of shell/run.sh.
OF_BASH = (
    *("_", "COLUMNS", "COMP_WORDBREAKS", "DIRSTACK", "EPOCHREALTIME", "EPOCHSECONDS", "EUID"),
    *("FUNCNAME", "GROUPS", "HISTCMD", "HOSTNAME", "HOSTTYPE", "IFS", "LINENO", "LINES"),
    *("MACHTYPE", "OLDPWD", "OPTARG", "OPTERR", "OPTIND", "OSTYPE", "PIPESTATUS"),
    *("POSIXLY_CORRECT", "PPID", "PS4", "PWD", "RANDOM", "REPLY", "SECONDS", "SHELLOPTS", "SHLVL"),
    *("SRANDOM", "UID"),
)
OF_SCRIPT = (
    *("asked", "conditions", "delay_s", "foreground", "gpu", "group", "job", "kit", "line"),
    *("number", "orders", "origin", "place", "python", "self", "signal", "stat", "status"),
    *("step", "told", "verdicts", "OWN", "SETTINGS", "UNPACK"),
)
_NAME = r"[A-Za-z_][A-Za-z0-9_]*\Z"


def main() -> int:
    """Run the job and return the run's exit status."""
    kit, shell, verdicts, orders, name = os.path.abspath(sys.argv[0]), *sys.argv[1:5]
    try:
        plug_closed_descriptors()
        _end_with(int(shell))
        _hear_what_it_hears(int(shell))
        _keep(kit)
        return _run(kit, name, sys.argv[5:], Script(int(verdicts), int(orders)).pace())
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return report(error)


class Script:
    """The script's side of the loop: it is told of each step and lets it happen, or not."""

    def __init__(self, verdicts: int, orders: int) -> None:
        self._verdicts, self._orders = verdicts, orders
        for fd in (verdicts, orders):
            os.set_inheritable(fd, False)

    def pace(self) -> Pace:
        """Return this for supervise/loop.py."""
        return Pace(self._before, lambda *of: _Care(self, *of))

    def lets(self, step: str) -> bool:
        """Ask for a step by the name of the script's function."""
        os.write(self._verdicts, f"{step}\n".encode())
        return os.read(self._orders, 64).strip() == GO

    def _before(self, number: int, delay_s: float) -> int:
        """Have the script wait and begin the attempt; see supervise.Before."""
        from saferun.system.signalfd import Signals

        with Signals(ASKING) as signals:
            wait = f"{delay_s:.3f}" if delay_s else "0"
            os.write(self._verdicts, f"attempt {number} {wait}\n".encode())
            select.select([signals.fd, self._orders], [], [])
            heard = [signum for signum, _ in signals.read()]
            if heard:
                return heard[0]
            os.read(self._orders, 64)
            return 0


class _Care(GpuCare):
    """The GPUs' care, each part of it at the script's word."""

    def __init__(self, script: Script, *of: Any) -> None:
        super().__init__(*of)
        self._script = script

    def cleared(self, kind: str, report: Report) -> bool:
        if self.waits and not self._script.lets("preflight"):
            return True
        return super().cleared(kind, report)

    def recover(
        self, plan: LaunchPlan, kind: str, *, again: bool, pause: Callable[[float], int]
    ) -> int:
        if kind in AFTER and not self._script.lets("recover_cuda_context"):
            return 0
        return super().recover(plan, kind, again=again, pause=pause)


def environment(now: Mapping[str, str], before: bytes) -> dict[str, str]:
    """Return the environment as the script got it, with what it has exported itself.

    Args:
        now: what bash has handed on.
        before: /proc/<pid>/environ of the script: what it was given.
    """
    pairs = (entry.partition(b"=") for entry in before.split(b"\0") if b"=" in entry)
    given = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    kept = {n: v for n, v in given.items() if _is_changed(n) or not re.match(_NAME, n)}
    return {**{n: v for n, v in now.items() if not _is_changed(n)}, **kept}


def _is_changed(name: str) -> bool:
    return name.startswith("BASH") or name in OF_BASH or name in OF_SCRIPT


def _run(kit: str, name: str, words: Sequence[str], pace: Pace) -> int:
    with open(os.path.join(kit, "environ"), "rb") as file:
        environ = environment(os.environ, file.read())
    with open(os.path.join(kit, "settings"), "rb") as file:
        told = file.read().split(b"\0")
    sheet = settings_codec.read([os.fsdecode(word) for word in told], name)
    request = read_torchrun(words, environ)
    gathered = gathered_for(sheet, request, environ, name)
    if request.dry_run:
        from saferun.plan.view import as_text

        sys.stdout.write(as_text(gathered.plan()) + "\n")
        return 0
    return carry_out(gathered, inputs.working_directory(), pace)


def gathered_for(sheet: Sheet, request: Request, environ: Mapping[str, str], name: str) -> Gathered:
    """Return what the plans of a twin's attempts are computed from.

    Args:
        sheet: the script's settings.
        request: torchrun's words; its `sets` and `retries` come from the environment.
        environ: the user's.
        name: the script's, for messages.

    Raises:
        SaferunError: the user's mistake, or a torchrun that is not there.
    """
    sets = [Given(k, read_value(k, text, by), by) for k, text, by in request.sets]
    sets = [*sheet.sets, *sets, *inputs.retries(request)]
    origin = name if sheet.named else settings_codec.DETECTED
    asks = not sheet.named or is_for_gpus(sheet.chain)
    gpus = gpu.detect(environ) if asks else GpuFacts()
    remarks = tuple(_remarks(sheet, request, gpus))
    chosen = profiles.Chosen(sheet.chain, sheet.named, origin, remarks)
    cwd = inputs.working_directory()
    selection = inputs.Selection(chosen, sets, gpus)
    return inputs.assemble(request, selection, environ, cwd, starting=not request.dry_run)


def _remarks(sheet: Sheet, request: Request, gpus: GpuFacts) -> list[str]:
    """Say where the script is not for this machine, or is asked to be for another profile."""
    said = []
    if request.profile and request.profile != sheet.profile:
        said.append(
            f"SAFERUN_PROFILE={request.profile} changes nothing: this script is profile "
            f"{sheet.profile}; make another with saferun gen-shell"
        )
    here = sorted({one.name for one in gpus.gpus if one.name})
    foreign = [n for n in here if not any(profiles.matches(f, n) for f in sheet.made_for)]
    if foreign and (sheet.made_for or not sheet.named):
        meant = " or ".join(sheet.made_for) or "a machine whose GPU no profile names"
        said.append(
            f"this script is made for {meant} (profile {sheet.profile}), and here is "
            f"{', '.join(foreign)}"
        )
    return said


# --- the process ---------------------------------------------------------------------------------


def _end_with(shell: int) -> None:
    """Have the kernel kill this process when the script dies; the keeper then ends the job."""
    process_tree.prctl(_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if process_tree.read_stat(shell) is None:
        raise KeyboardInterrupt  # it died before we asked


def _hear_what_it_hears(shell: int) -> None:
    """Undo what a shell does to what it starts with `&`: SIGINT and SIGQUIT ignored.

    Not where the script itself was started so.
    """
    with open(f"/proc/{shell}/status", encoding="ascii") as file:
        ignored = next(int(line.split()[1], 16) for line in file if line.startswith("SigIgn:"))
    if not ignored >> (signal.SIGINT - 1) & 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not ignored >> (signal.SIGQUIT - 1) & 1:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def _keep(kit: str) -> None:
    """Lock the kit for as long as this process lives: systemd-tmpfiles, which removes what is old
    from /tmp, spares a directory that somebody has locked.
    """
    descriptor = os.open(kit, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
