"""The script of `gen-shell`: make it, write it, and find out whether one is stale.

Nothing is started. Neither the job's script nor a GPU needs to exist.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from saferun import __version__
from saferun.base import files
from saferun.errors import UnavailableError, UsageError
from saferun.export import bundle, plain, sbatch, settings_codec, shell_script
from saferun.export.settings_codec import ScriptSettings
from saferun.model import Request
from saferun.planning import inputs
from saferun.planning.request import read_torchrun
from saferun.profile.files import Chosen
from saferun.system.redact import MASK, Masker
from saferun.system.secret_names import is_secret

_MOST_CHARACTERS = 32 << 20  # most that is read of a script to check; a generated one has 300,000


@dataclass(frozen=True, slots=True)
class ScriptRequest:
    """The arguments of one `gen-shell` call."""

    request: Request
    args: tuple[str, ...]  # torchrun's arguments; empty if the script takes them at run time
    output: str | None = None
    check: str | None = None
    bare: bool = False  # only options about files were given
    slurm: sbatch.Job | None = None
    plain: bool = False  # without the bundle

    @property
    def command(self) -> tuple[str, ...]:
        """Return the command for the same script, with variables written as options."""
        request = self.request
        argv = ["saferun", "gen-shell", *(self.slurm.options if self.slurm else ())]
        argv += ["--plain"] if self.plain else []
        argv += ["--profile", request.profile] if request.profile else []
        argv += [w for key, text, _ in request.sets for w in ("--set", f"{key}={text}")]
        argv += [] if request.retries is None else ["--retries", str(request.retries)]
        argv += ["--run-dir", request.run_dir] if request.run_dir else []
        return (*argv, *(("--", *self.args) if self.args else ()))


@dataclass(frozen=True, slots=True)
class Script:
    """A script, and remarks for its user."""

    text: str
    remarks: tuple[str, ...]
    private: bool = False  # it contains secrets


# --- the arguments -------------------------------------------------------------------------------


def checked(line: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return torchrun's arguments as torchrun reads them; the job's script may be missing.

    Raises:
        UsageError: torchrun would refuse them; the message is torchrun's.
    """
    if not line:
        return ()
    read = read_torchrun(line, environ).line
    if read.refusal is None:
        return read.args
    if read_torchrun([*line, "SCRIPT"], environ).line.refusal is None:
        return tuple(line)
    raise UsageError(f"torchrun would refuse this: {read.refusal}")


# --- the script ----------------------------------------------------------------------------------


def make(wanted: ScriptRequest, environ: Mapping[str, str], cwd: str) -> Script:
    """Make a script.

    Args:
        wanted: the arguments of `gen-shell`.
        environ: the user's variables.
        cwd: the working directory.

    Returns:
        The script, and remarks for the user.

    Raises:
        SaferunError: the user made a mistake.
    """
    chosen = inputs.choose(wanted.request, environ, cwd)
    request = read_torchrun(wanted.args or ("SCRIPT",), environ)._replace(sets=wanted.request.sets)
    gathered = inputs.assemble(request, chosen, environ, cwd, starting=False)
    if request.line.refusal is None:  # otherwise the job's script is given at run time
        gathered.plan()
    script_settings = _script_settings(chosen)
    text = _text(wanted, script_settings, gathered)
    secrets = _secrets(script_settings, wanted.args)
    remarks = (*chosen.remarks, *secrets)
    if wanted.slurm is None:
        return Script(text, remarks, private=bool(secrets))
    if not script_settings.named:
        name = script_settings.profile
        here = f"profile {name} is for this machine; name the nodes' own with --profile"
        remarks = (*remarks, here)
    if not wanted.plain:
        text = sbatch.render(text, wanted.slurm, request.line, bundle.template("slurm.sh"))
    return Script(text, (*remarks, *sbatch.remarks(wanted.slurm)), private=bool(secrets))


def _text(
    wanted: ScriptRequest, script_settings: ScriptSettings, gathered: inputs.RunInputs
) -> str:
    if wanted.plain:
        return plain.render(
            script_settings,
            gathered,
            wanted.args,
            command=wanted.command,
            read=bundle.template,
            slurm=wanted.slurm,
        )
    return shell_script.render(
        script_settings,
        wanted.args,
        command=wanted.command,
        template=bundle.template(),
        kit=bundle.pack(gathered.environ),
        whole=bool(wanted.args) and gathered.request.line.refusal is None,
    )


def _script_settings(chosen: Chosen) -> ScriptSettings:
    made_for = next((doc.match for doc in reversed(chosen.chain) if doc.match), ())
    by = chosen.origin if chosen.named else settings_codec.DETECTED
    by = "--profile" if by == "SAFERUN_PROFILE" else by  # as in the command in the header
    over = tuple(given._replace(origin=settings_codec.SET) for given in chosen.sets)
    return ScriptSettings(chosen.chain[-1].name, by, made_for, chosen.chain, over)


def _secrets(script_settings: ScriptSettings, arguments: Sequence[str]) -> list[str]:
    """Return a warning if the script will contain secrets, in variables or in arguments."""
    keys = [key for doc in script_settings.chain for key in doc.leaves]
    keys += [given.key for given in script_settings.sets]
    named = {key.partition(".")[2] for key in keys if key.startswith("env.")}
    found = ", ".join([*sorted(filter(is_secret, named)), *_secret_arguments(arguments)])
    return [f"the script holds {found}: mind who may read it"] if found else []


def _secret_arguments(arguments: Sequence[str]) -> Iterator[str]:
    """Yield options whose values are secrets; an argument that is itself a secret by its place."""
    masked = Masker({}, ()).argv(arguments)
    for place, (word, shown) in enumerate(zip(arguments, masked, strict=True)):
        if word != shown:
            name = shown.partition("=")[0] if shown.endswith(f"={MASK}") else ""
            before = arguments[place - 1] if place and shown == MASK else ""
            yield name or before or f"a secret in argument {place + 1}"


def write(path: str, text: str, *, private: bool = False) -> None:
    """Write an executable script atomically; refuse to replace any other file.

    Args:
        path: the script's path.
        text: the script's content.
        private: the script contains secrets, so nobody else may read it, whatever the umask.

    Raises:
        UsageError: there is another file at `path`.
        UnavailableError: the script cannot be written.
    """
    old = _read(path)
    if old is not None and shell_script.made_by(old) is None:
        fix = "choose another name, or remove it"
        raise UsageError("another file is there, which gen-shell did not make", where=path, fix=fix)
    try:
        files.replace(path, text.encode(), 0o700 if private else 0o777)
    except OSError as error:
        raise _cannot("written", path, error) from None


def stale(
    path: str,
    environ: Mapping[str, str],
    cwd: str,
    given: ScriptRequest,
    read: Callable[[Sequence[str], Mapping[str, str]], ScriptRequest],
) -> str:
    """Return how a script differs from what saferun would make now; "" if it does not.

    Args:
        path: the script.
        environ: the user's variables.
        cwd: the working directory.
        given: the arguments besides the check; without any, those in the script's header count.
        read: function that reads the arguments of a `gen-shell`, with the user's variables.

    Raises:
        UnavailableError: there is no such file.
        SaferunError: the command in its header does not work any more.
    """
    text = _read(path)
    if text is None:
        raise UnavailableError(f"there is no file `{path}`", fix="check the path")
    made = shell_script.made_by(text)
    if made is None:
        return "gen-shell did not make it"
    version, command = made
    wanted = read(command[2:], _without_ours(environ)) if given.bare else given
    new = make(wanted, _without_ours(environ) if given.bare else environ, cwd).text
    if version != __version__:
        return f"saferun {version} made it, and this is {__version__}"
    if shell_script.packed(text) != shell_script.packed(new):
        return "the code that travels in it is not this saferun's"
    pairs = zip(_lines(text), _lines(new))  # noqa: B905 (the first difference counts)
    for number, (old_line, new_line) in enumerate(pairs, 1):
        if old_line != new_line:
            return f"line {number} would be `{new_line}`"
    return "" if len(_lines(text)) == len(_lines(new)) else "its end differs"


def _without_ours(environ: Mapping[str, str]) -> dict[str, str]:
    """Leave out saferun's variables, which the header's command has as options."""
    ours = ("SAFERUN_PROFILE", "SAFERUN_SET", "SAFERUN_RETRIES", "SAFERUN_RUN_DIR")
    return {name: value for name, value in environ.items() if name not in ours}


def _lines(text: str) -> list[str]:
    return shell_script.without_bundle(text).splitlines()


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace", opener=_opener) as file:
            return file.read(_MOST_CHARACTERS)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _cannot("read", path, error) from None


def _opener(path: str, flags: int) -> int:
    """Open a file without waiting for the writer of a FIFO."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)  # `<(command)` is read to its end
    return descriptor


def _cannot(what: str, path: str, error: OSError) -> UnavailableError:
    return UnavailableError(f"cannot be {what}: {error.strerror}", where=path, fix="check the path")
