"""The program inside a generated script's bundle: a run with the script's settings.

    python3 KIT NAME ARGUMENTS...

KIT is the unpacked bundle, NAME is the script's name and ARGUMENTS are torchrun's. This process has
replaced the script's shell. Profile, plan, locks, attempts, diagnosis and decision are the code of
`saferun`; the settings come from the script (settings_codec.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence

from saferun.export import settings_codec, slurm_job
from saferun.export.settings_codec import ScriptSettings
from saferun.model import GpuFacts, Request
from saferun.planning import inputs
from saferun.planning.inputs import RunInputs
from saferun.planning.request import read_torchrun
from saferun.planning.view import as_text
from saferun.profile import files as profiles
from saferun.profile.merge import is_for_gpus
from saferun.supervise.start import carry_out
from saferun.system import gpus as gpu
from saferun.system.stderr import die_of_interrupt, report, settle

# Variables that bash itself sets (its manual, "Shell Variables") besides all BASH…: with them a job
# would find other values than under saferun. The script's own variables begin with saferun_.
OF_BASH = (
    *("_", "COLUMNS", "COMP_WORDBREAKS", "DIRSTACK", "EPOCHREALTIME", "EPOCHSECONDS", "EUID"),
    *("FUNCNAME", "GROUPS", "HISTCMD", "HOSTNAME", "HOSTTYPE", "IFS", "LINENO", "LINES"),
    *("MACHTYPE", "OLDPWD", "OPTARG", "OPTERR", "OPTIND", "OSTYPE", "PIPESTATUS"),
    *("POSIXLY_CORRECT", "PPID", "PS4", "PWD", "RANDOM", "REPLY", "SECONDS", "SHELLOPTS", "SHLVL"),
    *("SRANDOM", "UID"),
)
_NAME = r"[A-Za-z_][A-Za-z0-9_]*\Z"


def main() -> int:
    """Run the job and return the run's exit status; an unsupervised job replaces this process."""
    kit, name = os.path.abspath(sys.argv[0]), sys.argv[1]
    try:
        _hold(kit)
        try:
            status = _run(kit, name, sys.argv[2:])
        finally:
            shutil.rmtree(kit, ignore_errors=True)
        settle()
        return status
    except KeyboardInterrupt:
        return die_of_interrupt()
    except Exception as error:
        return report(error)


def environment(now: Mapping[str, str], before: bytes) -> dict[str, str]:
    """Return the environment that the script was given, plus its own exports.

    Args:
        now: the environment that this process got from bash.
        before: content of /proc/<pid>/environ when the script began.
    """
    pairs = (entry.partition(b"=") for entry in before.split(b"\0") if b"=" in entry)
    given = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    kept = {n: v for n, v in given.items() if _is_changed(n) or not re.match(_NAME, n)}
    return {**{n: v for n, v in now.items() if not _is_changed(n)}, **kept}


def _is_changed(name: str) -> bool:
    return name.startswith(("BASH", "saferun_")) or name in OF_BASH


def _run(kit: str, name: str, arguments: Sequence[str]) -> int:
    with open(os.path.join(kit, "environ"), "rb") as file:
        os.unlink(file.name)  # it may contain secrets, and is read only here
        environ = environment(os.environ, file.read())
    with open(os.path.join(kit, "settings"), "rb") as file:
        fields = file.read().split(b"\0")
    script_settings = settings_codec.read([os.fsdecode(field) for field in fields], name)
    node = environ.get(slurm_job.ON_NODE)
    request = read_torchrun(arguments, environ)
    if script_settings.slurm and node is not None:
        given = request.line.given
        meeting = slurm_job.meeting(script_settings.slurm, given, environ)
        del environ[slurm_job.ON_NODE]
        if not inputs.starts_python(script_settings.chain, script_settings.sets):
            request = read_torchrun([*meeting, *arguments], environ)
    elif script_settings.slurm:
        gathered = gathered_for(script_settings, request._replace(dry_run=True), environ, name)
        assert gathered.profile is not None, "a script has one"
        most_runs = gathered.profile.settings.retry.attempts_total
        own = script_settings.arguments
        return slurm_job.start_nodes(script_settings.slurm, own, environ, most_runs)
    gathered = gathered_for(script_settings, request, environ, name)
    if request.dry_run:
        sys.stdout.write(as_text(gathered.plan()) + "\n")
        return 0
    return carry_out(gathered, inputs.working_directory())


def gathered_for(
    script_settings: ScriptSettings, request: Request, environ: Mapping[str, str], name: str
) -> RunInputs:
    """Return the inputs of the plans for the script's attempts.

    Args:
        script_settings: the script's settings.
        request: torchrun's arguments; its `sets` and `retries` come from the environment.
        environ: the user's variables.
        name: the script's name, for messages.

    Raises:
        SaferunError: the user made a mistake, or there is no torchrun.
    """
    sets = (*script_settings.sets, *inputs.given_settings(request))
    origin = name if script_settings.named else settings_codec.DETECTED
    needs_gpus = not script_settings.named or is_for_gpus(script_settings.chain)
    gpus = gpu.detect(environ) if needs_gpus else GpuFacts()
    remarks = tuple(_remarks(script_settings, request, gpus))
    chosen = profiles.Chosen(
        script_settings.chain, script_settings.named, origin, remarks, sets, gpus
    )
    cwd = inputs.working_directory()
    return inputs.assemble(request, chosen, environ, cwd, starting=not request.dry_run)


def _remarks(script_settings: ScriptSettings, request: Request, gpus: GpuFacts) -> list[str]:
    """Return remarks: the script was made for other machines, or another profile was requested."""
    found = []
    if request.profile and request.profile != script_settings.profile:
        found.append(
            f"SAFERUN_PROFILE={request.profile} changes nothing: this script is profile "
            f"{script_settings.profile}; make another with saferun gen-shell"
        )
    here = sorted({one.name for one in gpus.gpus if one.name})
    foreign = [n for n in here if not any(profiles.matches(f, n) for f in script_settings.made_for)]
    if foreign and (script_settings.made_for or not script_settings.named):
        meant = " or ".join(script_settings.made_for) or "a machine whose GPU no profile names"
        found.append(
            f"this script is made for {meant} (profile {script_settings.profile}), and here is "
            f"{', '.join(foreign)}"
        )
    return found


def _hold(kit: str) -> None:
    """Lock the bundle's directory while this process, or the job that replaces it, lives.

    systemd-tmpfiles, which removes old files from /tmp, skips a locked directory, and so does the
    next script (unpack.py).
    """
    descriptor = os.open(kit, os.O_RDONLY | os.O_DIRECTORY)
    os.set_inheritable(descriptor, True)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
