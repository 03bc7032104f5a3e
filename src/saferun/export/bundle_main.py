"""The program inside a generated script's bundle: a run whose steps the script orders.

    python3 KIT SHELL VERDICTS ORDERS NAME ARGUMENTS...

KIT is the unpacked bundle, SHELL is the script's pid, VERDICTS and ORDERS are descriptors of pipes
to it, NAME is the script's name and ARGUMENTS are torchrun's. Profile, plan, locks, attempts,
diagnosis and decision are the code of `saferun`. Three things differ: the settings come from the
script (settings_codec.py); the script gets the name of each step and orders it, or leaves it out
(`attempt 2 5.000`: its number, and the seconds to wait before it; `preflight`;
`recover_cuda_context`); and this process ends when the script ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from saferun.export import settings_codec
from saferun.export.settings_codec import Sheet
from saferun.gpu.cuda_errors import AFTER
from saferun.keeper import process_tree
from saferun.model import GpuFacts, LaunchPlan, Request
from saferun.planning import inputs
from saferun.planning.inputs import Gathered
from saferun.planning.request import read_torchrun
from saferun.planning.view import as_text
from saferun.profile import files as profiles
from saferun.profile.merge import Given, is_for_gpus
from saferun.profile.values import read_value
from saferun.supervise.gpu_gate import GpuCare, Report
from saferun.supervise.ground import Pace
from saferun.supervise.start import carry_out
from saferun.system import gpus as gpu
from saferun.system.descriptors import plug_closed_descriptors
from saferun.system.stderr import report, settle

if TYPE_CHECKING:
    from typing import Any

GO = b"go"
_SET_PDEATHSIG = 1  # linux/prctl.h
# What bash sets itself (its manual, "Shell Variables") beside all BASH…, so that a job would find
# other values than under saferun; and the script's own variables, in the order of shell/run.sh.
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
        _restore_interrupts(int(shell))
        _protect(kit)
        status = _run(kit, name, sys.argv[5:], Script(int(verdicts), int(orders)).pace())
        settle()
        return status
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return report(error)


class Script:
    """The script, which orders each step of the loop or leaves it out.

    Args:
        verdicts: the descriptor to which the names of steps are written.
        orders: the descriptor from which the script's orders are read.
    """

    def __init__(self, verdicts: int, orders: int) -> None:
        self._verdicts, self._orders = verdicts, orders
        for fd in (verdicts, orders):
            os.set_inheritable(fd, False)

    def pace(self) -> Pace:
        """Return how the loop starts attempts and cares for the GPUs under this script."""
        return Pace(self._before, lambda *of: _Care(self, *of))

    def allows(self, step: str) -> bool:
        """Return whether the script orders a step, which has the name of its function."""
        os.write(self._verdicts, f"{step} .\n".encode())
        return os.read(self._orders, 64).strip() == GO

    def _before(self, number: int, delay_s: float) -> None:
        """Have the script wait and start the attempt; see `Before` in supervise/loop.py."""
        wait = f"{delay_s:.3f}" if delay_s else "0"
        os.write(self._verdicts, f"attempt {number} {wait} .\n".encode())
        os.read(self._orders, 64)


class _Care(GpuCare):
    """The care for the GPUs; each part of it is done if the script orders it."""

    def __init__(self, script: Script, *of: Any) -> None:
        super().__init__(*of)
        self._script = script

    def cleared(self, kind: str, report: Report) -> bool:
        if self.waits and not self._script.allows("preflight"):
            return True
        return super().cleared(kind, report)

    def recover(self, plan: LaunchPlan, kind: str, *, again: bool) -> None:
        if kind not in AFTER or self._script.allows("recover_cuda_context"):
            super().recover(plan, kind, again=again)


def environment(now: Mapping[str, str], before: bytes) -> dict[str, str]:
    """Return the environment that the script was given, with what it has exported itself.

    Args:
        now: the environment that this process got from bash.
        before: /proc/<pid>/environ of the script: the environment that it was given.
    """
    pairs = (entry.partition(b"=") for entry in before.split(b"\0") if b"=" in entry)
    given = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    kept = {n: v for n, v in given.items() if _is_changed(n) or not re.match(_NAME, n)}
    return {**{n: v for n, v in now.items() if not _is_changed(n)}, **kept}


def _is_changed(name: str) -> bool:
    return name.startswith("BASH") or name in OF_BASH or name in OF_SCRIPT


def _run(kit: str, name: str, arguments: Sequence[str], pace: Pace) -> int:
    with open(os.path.join(kit, "environ"), "rb") as file:
        os.unlink(file.name)  # it may hold secrets, and is read only here
        environ = environment(os.environ, file.read())
    with open(os.path.join(kit, "settings"), "rb") as file:
        fields = file.read().split(b"\0")
    sheet = settings_codec.read([os.fsdecode(field) for field in fields], name)
    request = read_torchrun(arguments, environ)
    gathered = gathered_for(sheet, request, environ, name)
    if request.dry_run:
        sys.stdout.write(as_text(gathered.plan()) + "\n")
        return 0
    return carry_out(gathered, inputs.working_directory(), pace)


def gathered_for(sheet: Sheet, request: Request, environ: Mapping[str, str], name: str) -> Gathered:
    """Return what the plans of the script's attempts are computed from.

    Args:
        sheet: the script's settings.
        request: torchrun's arguments; its `sets` and `retries` come from the environment.
        environ: the user's variables.
        name: the script's name, for messages.

    Raises:
        SaferunError: a mistake of the user's, or there is no torchrun.
    """
    sets = [Given(k, read_value(k, text, by), by) for k, text, by in request.sets]
    sets = [*sheet.sets, *sets, *inputs.retries(request)]
    origin = name if sheet.named else settings_codec.DETECTED
    needs_gpus = not sheet.named or is_for_gpus(sheet.chain)
    gpus = gpu.detect(environ) if needs_gpus else GpuFacts()
    remarks = tuple(_remarks(sheet, request, gpus))
    chosen = profiles.Chosen(sheet.chain, sheet.named, origin, remarks)
    cwd = inputs.working_directory()
    selection = inputs.Selection(chosen, sets, gpus)
    return inputs.assemble(request, selection, environ, cwd, starting=not request.dry_run)


def _remarks(sheet: Sheet, request: Request, gpus: GpuFacts) -> list[str]:
    """Return remarks: the script is for other machines, or another profile was requested."""
    found = []
    if request.profile and request.profile != sheet.profile:
        found.append(
            f"SAFERUN_PROFILE={request.profile} changes nothing: this script is profile "
            f"{sheet.profile}; make another with saferun gen-shell"
        )
    here = sorted({one.name for one in gpus.gpus if one.name})
    foreign = [n for n in here if not any(profiles.matches(f, n) for f in sheet.made_for)]
    if foreign and (sheet.made_for or not sheet.named):
        meant = " or ".join(sheet.made_for) or "a machine whose GPU no profile names"
        found.append(
            f"this script is made for {meant} (profile {sheet.profile}), and here is "
            f"{', '.join(foreign)}"
        )
    return found


# --- the process ---------------------------------------------------------------------------------


def _end_with(shell: int) -> None:
    """Have the kernel kill this process when the script dies; then the keeper ends the job."""
    process_tree.prctl(_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if process_tree.read_stat(shell) is None:
        raise KeyboardInterrupt  # the script died before the call


def _restore_interrupts(shell: int) -> None:
    """Handle SIGINT and SIGQUIT again, which a shell ignores in what it starts with `&`.

    They stay ignored if the script itself was started with them ignored.
    """
    with open(f"/proc/{shell}/status", encoding="ascii") as file:
        ignored = next(int(line.split()[1], 16) for line in file if line.startswith("SigIgn:"))
    if not ignored >> (signal.SIGINT - 1) & 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not ignored >> (signal.SIGQUIT - 1) & 1:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def _protect(kit: str) -> None:
    """Lock the bundle's directory for as long as this process lives.

    systemd-tmpfiles, which removes old files from /tmp, leaves out a directory that is locked.
    """
    descriptor = os.open(kit, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
