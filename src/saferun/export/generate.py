"""Make the script of `gen-shell`, write it, and tell whether one is stale.

Nothing is started, and neither the job's script nor a GPU need exist.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from saferun import __version__
from saferun.errors import UnavailableError, UsageError
from saferun.export import bundle, sbatch, settings_codec, shell_script
from saferun.export.settings_codec import Sheet
from saferun.model import Request
from saferun.named_tuple import NamedTuple
from saferun.plan import inputs, torchrun_args
from saferun.plan.request import read as read_request
from saferun.plan.request import read_torchrun
from saferun.profile.files import Chosen
from saferun.profile.merge import Given
from saferun.system.secret_names import is_secret

OWN = {**sbatch.OPTIONS, "-o": "FILE", "--check": "FILE"}  # before torchrun's words
START = ("torchrun", "saferun")  # words that a pasted command line may begin with


class Asked(NamedTuple):
    """What `gen-shell` was asked for."""

    request: Request
    args: tuple[str, ...]  # torchrun's words; empty where the script takes them when it is run
    output: str | None = None
    check: str | None = None
    bare: bool = False  # no word but those about files
    slurm: sbatch.Job | None = None

    @property
    def command(self) -> tuple[str, ...]:
        """The command that asks for the same, variables spelled out as options."""
        request = self.request
        words = ["saferun", "gen-shell", *(self.slurm.words if self.slurm else ())]
        words += ["--profile", request.profile] if request.profile else []
        words += [w for key, text, _ in request.sets for w in ("--set", f"{key}={text}")]
        words += [] if request.retries is None else ["--retries", str(request.retries)]
        words += ["--run-dir", request.run_dir] if request.run_dir else []
        return (*words, *(("--", *self.args) if self.args else ()))


class Made(NamedTuple):
    """A script, and what is to be said of it."""

    text: str
    remarks: tuple[str, ...]


# --- the words -----------------------------------------------------------------------------------


def read(words: Sequence[str], environ: Mapping[str, str]) -> Asked:
    """Read the words after `gen-shell`: its own options, then torchrun's words.

    Raises:
        UsageError: an option without its value, or words that torchrun would refuse.
    """
    words = list(words)
    at = _own_words(words)
    line_of_its_own = [*words[:at], "--standalone", "SCRIPT"]  # no value of our last option
    parsed = torchrun_args.parse(line_of_its_own, own={**torchrun_args.OWN, **OWN})
    given = dict(parsed.own)
    slurm = sbatch.read(parsed.own)
    ours = [f"{name}={text}" for name, text in parsed.own if name not in OWN and text]
    line = words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:]
    line = line[1:] if line[:1] and line[0] in START else line
    request = read_request([*ours, "SCRIPT"], environ)
    args = _checked(line, environ)
    bare = not ours and not line and slurm is None
    return Asked(request, args, given.get("-o"), given.get("--check"), bare, slurm)


def _own_words(words: Sequence[str]) -> int:
    """Return how many words at the beginning are ours: options with their values."""
    own = {**torchrun_args.OWN, **OWN}
    at = 0
    while at < len(words) and (name := words[at].partition("=")[0]) in own:
        at += 1 if own[name] is None or "=" in words[at] else 2
    return min(at, len(words))


def _checked(line: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return torchrun's words as torchrun takes them; the script may be left for later.

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


def make(asked: Asked, environ: Mapping[str, str], cwd: str) -> Made:
    """Make the script.

    Raises:
        SaferunError: the user's mistake, said.
    """
    selection = inputs.choose(asked.request, environ, cwd)
    words = asked.args or ("SCRIPT",)
    request = read_torchrun(words, environ)._replace(sets=asked.request.sets)
    if request.line.refusal is None:  # else its script comes when it is run
        inputs.assemble(request, selection, environ, cwd, starting=False).plan()
    sheet = _sheet(selection.chosen, selection.sets)
    made_by = shell_script.Maker(__version__, asked.command, bundle.template())
    whole = bool(asked.args) and request.line.refusal is None
    text = shell_script.render(sheet, asked.args, made_by, bundle.pack(environ), whole=whole)
    said = (*selection.chosen.remarks, *_secrets(sheet))
    if asked.slurm is None:
        return Made(text, said)
    if not sheet.named:
        here = f"profile {sheet.profile} is for this machine; name the nodes' own with --profile"
        said = (*said, here)
    with_torchrun = shell_script.launcher(sheet) != "python"
    part = bundle.template("slurm.sh")
    text = sbatch.render(text, asked.slurm, request.line, part, torchrun=with_torchrun)
    return Made(text, (*said, *sbatch.remarks(asked.slurm)))


def _sheet(chosen: Chosen, sets: Sequence[Given]) -> Sheet:
    made_for = next((doc.match for doc in reversed(chosen.chain) if doc.match), ())
    by = chosen.origin if chosen.named else settings_codec.DETECTED
    by = "--profile" if by == "SAFERUN_PROFILE" else by  # as in the command that is shown
    over = tuple(given._replace(origin=settings_codec.SET) for given in sets)
    return Sheet(chosen.chain[-1].name, by, made_for, chosen.chain, over)


def _secrets(sheet: Sheet) -> list[str]:
    keys = [key for doc in sheet.chain for key in doc.leaves]
    keys += [given.key for given in sheet.sets]
    named = {key.partition(".")[2] for key in keys if key.startswith("env.")}
    found = ", ".join(sorted(filter(is_secret, named)))
    return [f"the script holds {found}: mind who may read it"] if found else []


def write(path: str, text: str) -> None:
    """Write a script, executable, in one step; a file that is no twin is left alone.

    Raises:
        UsageError: there is another file.
        UnavailableError: it cannot be written.
    """
    old = _read(path)
    if old is not None and shell_script.made_by(old) is None:
        fix = "choose another name, or remove it"
        raise UsageError("there is another file, and no script of gen-shell's", where=path, fix=fix)
    draft = f"{path}.{os.getpid()}.tmp"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(draft, flags, 0o777), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except OSError as error:
        if os.path.exists(draft):
            os.unlink(draft)
        raise _cannot("written", path, error) from None


def stale(path: str, environ: Mapping[str, str], cwd: str, asked: Asked) -> str:
    """Return why a script is not what saferun would make today; "" where it is.

    Args:
        path: the script.
        environ: the user's.
        cwd: the working directory.
        asked: what was asked for beside the check; where that is nothing, the script's header.

    Raises:
        UnavailableError: there is no such file.
        SaferunError: what its header asks for cannot be made any more.
    """
    text = _read(path)
    if text is None:
        raise UnavailableError(f"there is no file `{path}`", fix="check the path")
    made = shell_script.made_by(text)
    if made is None:
        return "it is no script of gen-shell's"
    version, command = made
    wanted = read(command[2:], _without_ours(environ)) if asked.bare else asked
    new = make(wanted, _without_ours(environ) if asked.bare else environ, cwd).text
    if version != __version__:
        return f"saferun {version} made it, and this is {__version__}"
    if bundle.unpack(shell_script.packed(text)) != bundle.unpack(shell_script.packed(new)):
        return "the code that travels in it is not this saferun's"
    pairs = zip(_lines(text), _lines(new))  # noqa: B905 (the first difference counts)
    for number, (old_line, new_line) in enumerate(pairs, 1):
        if old_line != new_line:
            return f"line {number} would be `{new_line}`"
    return "" if len(_lines(text)) == len(_lines(new)) else "its end differs"


def _without_ours(environ: Mapping[str, str]) -> dict[str, str]:
    """The header's command has spelled out what our variables said."""
    ours = ("SAFERUN_PROFILE", "SAFERUN_SET", "SAFERUN_RETRIES", "SAFERUN_RUN_DIR")
    return {name: value for name, value in environ.items() if name not in ours}


def _lines(text: str) -> list[str]:
    return shell_script.without_kit(text).splitlines()


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _cannot("read", path, error) from None


def _cannot(what: str, path: str, error: OSError) -> UnavailableError:
    return UnavailableError(f"cannot be {what}: {error.strerror}", where=path, fix="check the path")
