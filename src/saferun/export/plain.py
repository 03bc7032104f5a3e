"""Pure: the script of `gen-shell --plain`: a short bash script to read and commit, nothing packed.

shell/plain.sh is the hand-written part; its lines `#@ NAME` are places that are filled here, and
those between `#@ if NAME` and `#@ end` stay where NAME holds. The files of shell/hooks stand in the
script as they are: those that the profile asks for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce

from saferun import __version__
from saferun.diagnosis import signatures
from saferun.export import sbatch, shell_script
from saferun.export.settings_codec import ScriptSettings
from saferun.export.shell_script import comment, one_line, quote
from saferun.knowledge.variable_names import LISTS, OTHER_NAME, combine
from saferun.model import Profile
from saferun.planning import mitigation_overlay
from saferun.planning.inputs import RunInputs
from saferun.planning.mitigation_overlay import Situation
from saferun.planning.own_variables import SHARE_STORE, acts, for_torchrun
from saferun.profile.merge import Conditions, holds
from saferun.profile.schema import Leaf
from saferun.profile.values import PLACEHOLDER, write_value
from saferun.settings import KEYS, ResumePolicy

TEMPLATE = "plain.sh"
_FIRST_LINE = "#!/usr/bin/env bash\n"
_JOB = 'job=(torchrun "$@")\n'
_TO_SCRIPT = "i < ${#job[@]};"
_POLICY = "attempts=3 wait_s=5 longest_s=60"
_HELD = (
    *("launcher", "retry.attempts", "retry.backoff_s", "retry.resume_args"),
    *("retry.resume.checkpoints", "retry.resume.args"),
    *("locks.gpus", "locks.wait_s", "locks.slots"),
)
# The files of shell/hooks that hold a setting, in their order in the script.
_HOOKS: dict[str, tuple[str, ...]] = {
    "hooks.init.set_device": ("init",),
    "hooks.init.barrier": ("init",),
    "hooks.init.timeout_s": (),
    "hooks.order.mode": ("order",),
    "hooks.compile.enabled": ("compile",),
    "hooks.compile.autotune": ("inductor", "autotune"),
    "hooks.compile.cudagraphs": ("inductor", "cudagraphs"),
    "hooks.cudagraph_markers": ("cudagraph_markers",),
    "hooks.guards.labels": ("guards", "guard_labels"),
    "hooks.guards.logits": ("guards", "guard_logits"),
    "hooks.guards.embeddings": ("guards", "guard_embeddings"),
    "hooks.memory.clear_between_trials": ("memory",),
    "hooks.tensorflow.cross_device_ops": ("cross_device_ops",),
    "hooks.tensorflow.memory_growth": (),
}
# Settings that are a variable of the script: of torch's or TensorFlow's own, or of their hook.
_VARIABLES = {
    ("hooks.init.barrier", "store"): "TORCH_DIST_INIT_BARRIER=1",
    ("hooks.compile.cudagraphs", "off-when-distributed"): "HOOK_CUDAGRAPHS=off-when-distributed",
    ("hooks.cudagraph_markers", "off-when-distributed"): "HOOK_MARKERS=off-when-distributed",
    ("hooks.tensorflow.memory_growth", "true"): "TF_FORCE_GPU_ALLOW_GROWTH=true",
}
_BARRIER, _TIMEOUT = "hooks.init.barrier", "hooks.init.timeout_s"
_UNHELD = (("hooks.order.mode", "error"), ("hooks.order.mode", "fix"))
_OF_RANKS = ("hooks.init.", "hooks.order.")  # there are none under `launcher: python`
# What an error says that may pass. The data must name each one, of a kind whose verdict is `retry`
# or, for a port that is in use, one whose mitigation is another port.
_PHRASES = {
    "peer-lost": (
        "connection closed by peer",
        "connection reset by peer",
        "remote process exited or there was a network error",
        "DistNetworkError",  # a type
    ),
    "rendezvous-connect-failed": (
        "the client socket has timed out after",
        "the client socket has failed to connect to any network address",
        "connection to the c10d store has failed",
    ),
    "nccl-system-error": ("unhandled system error",),
    "port-in-use": ("server socket has failed to listen on any",),
}
_PORT = "free-port"  # a mitigation's name in knowledge/mitigations.yaml
# Facts for conditions, as tests of the shell; without torch no condition on it holds.
_FACTS = {
    "torch": """python3 -c 'import torch; exit(not torch.__version__ {} "{}")' 2>/dev/null""",
    "gpus": "((${{#gpus[@]}} {} {}))",
}
_COMPARISON = re.compile(r"([<>=!]{0,2}) {0,8}([\d.]+)")
_HOLE = re.compile(PLACEHOLDER, re.ASCII)
_MARK = re.compile("\x01([^\x02]*)\x02")  # a piece of shell in a text


def render(
    script_settings: ScriptSettings,
    gathered: RunInputs,
    args: Sequence[str],
    *,
    command: Sequence[str],
    read: Callable[[str], str],
    slurm: sbatch.Job | None,
) -> str:
    """Return the whole script.

    Args:
        script_settings: the settings, with their conditions.
        gathered: the inputs of the first plan on this machine.
        args: torchrun's arguments; empty if the script takes them at run time.
        command: `saferun gen-shell --plain …`, which makes this script.
        read: function that returns the text of a file of shell/.
        slurm: the requests to Slurm; None for a script that is run by hand.
    """
    profile = _profile(gathered)
    settings, locks = profile.settings, profile.settings.locks
    chosen = _chosen(script_settings, gathered)
    conditions = {
        "hooks": any(_HOOKS[key] for key in chosen),
        "template": False,
        "slurm": slurm is not None,
        "slots": locks.slots > 1,
        "wait": locks.gpus in ("wait", "refuse"),
        "locks": locks.gpus != "off",
        "resume": bool(settings.retry.resume.checkpoints),
        "step": any("{step}" in word for word in settings.retry.resume.args),
        "table": locks.slots > 1 or locks.gpus in ("wait", "refuse"),
        "again": settings.retry.attempts > 1,
        "port": slurm is None and mitigation_overlay.port_moves(Situation(gathered.plan(), {})),
    }
    words = ["torchrun", *args]
    if settings.launcher == "python":
        words = ["python3", *(gathered.plan().command[1:] if args else ())]
    variables = "".join(dict.fromkeys(_variables(script_settings, gathered, chosen)))
    conditions["gpus"] = conditions["locks"] or "#gpus[@]" in variables
    places = {
        "header": _header(script_settings, profile, chosen, command),
        "settings": variables,
        "hooks": _hooks(chosen, read),
        "phrases": "".join(_passing()),
        "again": "".join(_again(settings.retry.resume_args, settings.retry.resume)),
    }
    text = "".join(_kept(read(TEMPLATE), conditions))
    text = re.sub(r"^ *#@ (\w+)\n", lambda place: places[place[1]], text, flags=re.MULTILINE)
    wait_s, longest_s = map(math.ceil, settings.retry.backoff_s)
    retry = f"attempts={settings.retry.attempts} wait_s={wait_s} longest_s={longest_s}"
    for old, new in (
        (_JOB, f'job=({" ".join(map(quote, words))} "$@")\n'),
        (_POLICY, retry),
        ("slots=1\n", f"slots={locks.slots}\n"),
        ("limit_s=0\n", f"limit_s={math.ceil(locks.wait_s) if locks.gpus == 'wait' else 0}\n"),
        (_TO_SCRIPT, f"i < {_before_script(gathered, args)};"),
    ):
        text = text.replace(old, new, 1)
    if slurm is None:
        return text
    directives = sbatch.directives(slurm, gathered.request.line)
    return text.replace(_FIRST_LINE, _FIRST_LINE + directives, 1)


def _kept(text: str, conditions: Mapping[str, bool]) -> Iterator[str]:
    """Yield the lines of a template that stay under these conditions; blocks may be nested."""
    stays = [True]
    for line in text.splitlines(keepends=True):
        mark, _, name = line.strip().removeprefix("#@ ").partition(" ")
        if "#@" not in line or mark not in ("if", "else", "end"):
            yield from [line] if all(stays) else []
        elif mark == "if":
            stays.append(conditions[name])
        elif mark == "else":
            stays[-1] = not stays[-1]
        else:
            stays.pop()


# --- the parts -----------------------------------------------------------------------------------


def _header(
    script_settings: ScriptSettings,
    profile: Profile,
    chosen: Mapping[str, Leaf],
    command: Sequence[str],
) -> str:
    out = [
        key
        for key, note in profile.notes.items()
        if key not in chosen and key not in _HELD and _differs(key, note.value)
    ]
    what = "python3" if profile.settings.launcher == "python" else "torchrun"
    return (
        comment(
            f"{what} with the variables and hooks of profile {script_settings.profile}, under a "
            "lock, and again where a signal ended it or its errors may pass; a script without "
            "--plain also says why it failed."
        )
        + _one_line(f"Of the profile it leaves out {', '.join(out)}." if out else "")
        + f"# Made by saferun {__version__} with\n"
        + f"{shell_script.INDENT}{' '.join(map(quote, command))}\n"
    )


def _differs(key: str, value: str) -> bool:
    """Return whether a setting asks for something: a hook's if it acts, others if not as usual."""
    kind = KEYS[key]
    if key.startswith("hooks.") and kind.kind != "number":
        return acts(kind, True if value.lower() == "true" else value)
    return value != str(kind.default)


def _profile(gathered: RunInputs) -> Profile:
    assert gathered.profile is not None, "inputs.assemble resolves one"
    return gathered.profile


def _one_line(text: str) -> str:
    """Return text as one comment line, "" for none."""
    plain = one_line(text)
    return f"# {plain}\n" if plain else ""


def _before_script(gathered: RunInputs, args: Sequence[str]) -> str:
    """Return the place of SCRIPT in the job's words; what follows is the script's own."""
    line = gathered.request.line
    return str(len(args) - len(line.script_args)) if args else "${#job[@]}"


def _passing() -> Iterator[str]:
    """Yield a line for each kind of error that may pass: what it says, as a pattern."""
    known = signatures.load()
    said = {(sign.kind, " ... ".join(needle)) for sign in known.signs for needle in sign.says}
    said |= {(sign.kind, name) for sign in known.signs for name in sign.types}
    lines = {kind: f"  '{'|'.join(phrases)}'" for kind, phrases in _PHRASES.items()}
    for kind, phrases in _PHRASES.items():
        missing = [phrase for phrase in phrases if (kind, phrase) not in said]
        assert not missing, f"failures.yaml has no {missing} of {kind}"
        if known.kinds[kind].verdict == "retry" or _PORT in known.kinds[kind].mitigations:
            yield f"{lines[kind]:{max(map(len, lines.values()))}} # {kind}\n"


# --- the hooks -----------------------------------------------------------------------------------


def _chosen(script_settings: ScriptSettings, gathered: RunInputs) -> dict[str, Leaf]:
    """Return the settings of hooks that the script holds: none with a condition at run time.

    The first that applies counts, as for variables.
    """
    python = _profile(gathered).settings.launcher == "python"
    found: dict[str, Leaf] = {}
    for key in _HOOKS:
        tests = [(leaf, _test(leaf, gathered)) for leaf in reversed(_leaves(script_settings, key))]
        leaf, test = next(((one, test) for one, test in tests if test is not None), (None, ""))
        if leaf is None or test or (python and key.startswith(_OF_RANKS)):
            continue
        if key == _TIMEOUT:
            acting = _BARRIER in found  # a limit alone asks for no hook
        else:
            acting = acts(KEYS[key], leaf.value) and (key, leaf.value) not in _UNHELD
        if acting:
            found[key] = leaf
    return found


def _hooks(chosen: Mapping[str, Leaf], read: Callable[[str], str]) -> str:
    """Return the sitecustomize.py of the script: the files of its hooks; "" without hooks."""
    whys: dict[str, str] = {}
    for key, leaf in chosen.items():
        for name in _HOOKS[key]:
            whys[name] = whys.get(name, "")
        if _HOOKS[key] and (key, write_value(key, leaf.value)) not in _VARIABLES:
            whys[_HOOKS[key][-1]] += _one_line(leaf.why)
    if not whys:
        return ""
    texts = [f"{why}{read(f'hooks/{name}.py')}" for name, why in whys.items()]
    return "\n".join([read("hooks/start.py"), *texts, read("hooks/end.py")])


# --- the variables -------------------------------------------------------------------------------


def _variables(
    script_settings: ScriptSettings, gathered: RunInputs, chosen: Mapping[str, Leaf]
) -> Iterator[str]:
    keys = [key for doc in script_settings.chain for key in doc.leaves]
    keys += [given.key for given in script_settings.sets]
    for key in dict.fromkeys(keys):
        yield from _variable(key, script_settings, gathered)
    for key, leaf in chosen.items():
        text = write_value(key, leaf.value)
        limit = f"HOOK_TIMEOUT_S={text}" if key == _TIMEOUT else ""
        name, _, value = _VARIABLES.get((key, text), limit).partition("=")
        if name and f"env.{name}" not in keys:
            yield f"{_one_line(leaf.why)}{_unless(name)}export {name}={value}\n"
    settings, options = _profile(gathered).settings, gathered.request.options
    own = for_torchrun(settings, options, gathered.identity, {}, ())
    if SHARE_STORE in own:
        yield _one_line(own[SHARE_STORE].why) + f"{_unless(SHARE_STORE)}export {SHARE_STORE}=1\n"


def _variable(key: str, script_settings: ScriptSettings, gathered: RunInputs) -> Iterator[str]:
    """Yield the lines of a variable, or of a torchrun option in the form of a variable.

    The first line that applies counts, so the named profile comes before its ancestors.
    """
    section, _, name = key.partition(".")
    if section == "torchrun":
        options = gathered.request.options
        if not script_settings.named or _profile(gathered).settings.launcher != "torchrun":
            return
        if name == "nproc-per-node" and (options.nodes != 1 or options.processes is not None):
            return
        name = f"PET_{name.upper().replace('-', '_')}"
    elif section != "env":
        return
    given = [one.leaf for one in script_settings.sets if one.key == key]
    every = _leaves(script_settings, key)
    for place in range(len(every) - 1, -1, -1):
        leaf, before = every[place], [one for one in every[:place] if not one.when]
        value = _value(key, name, [*before, leaf])
        test = _test(leaf, gathered)
        unless = "" if leaf in given else _unless(name)
        if test is not None and (value != "false" or section == "env"):
            yield _one_line(leaf.why) + f"{unless}{test}export {name}={value}\n"
        if not leaf.when:
            return


def _leaves(script_settings: ScriptSettings, key: str) -> list[Leaf]:
    """Return the values of a setting, of which the last one that applies counts."""
    files = [doc.leaves[key] for doc in script_settings.chain if key in doc.leaves]
    return files + [one.leaf for one in script_settings.sets if one.key == key]


def _value(key: str, name: str, leaves: Sequence[Leaf]) -> str:
    """Return a value as a shell word; a list has the items of all files."""
    texts = [write_value(key, leaf.value) for leaf in leaves]
    text = reduce(lambda old, new: combine(name, old, new), texts) if name in LISTS else texts[-1]
    return quote("1" if key.startswith("torchrun.") and text == "true" else text)


def _unless(name: str) -> str:
    """Return a test that skips a variable if it, or one that overrides it, is exported."""
    names = [name, *filter(None, [OTHER_NAME.get(name)])]
    if name == "CUDA_DEVICE_ORDER":  # it would change which GPUs the numbers mean
        names.append("CUDA_VISIBLE_DEVICES")
    return f"[[ {' || '.join(f'-v {one}' for one in names)} ]] || "


def _test(leaf: Leaf, gathered: RunInputs) -> str | None:
    """Return the condition of a value as a test at run time; None: never true."""
    profile, options = _profile(gathered), gathered.request.options
    several = options.processes != "1" or options.nodes != 1
    # Facts known when the script is made; `distributed` may be uncertain.
    made = Conditions(None, 0, several, profile.named, profile.settings.retry.attempts)
    test = ""
    for name, wanted in leaf.when:
        if name in _FACTS:
            for operator, number in _COMPARISON.findall(str(wanted)):
                test += f"! {_FACTS[name].format(operator or '==', number)} || "
        elif not holds(leaf._replace(when=((name, wanted),)), made):
            return None
    return test


# --- another attempt -----------------------------------------------------------------------------


def _again(args: Sequence[str], policy: ResumePolicy) -> Iterator[str]:
    """Yield the lines that add to the job's arguments from the second attempt on."""
    if args:
        yield f"  ((attempt > 1)) || job+=({' '.join(map(quote, args))})\n"
    if policy.checkpoints:
        values: list[str] = []
        pattern = _word(policy.checkpoints, values, "*?[]")
        words = [_word(word, values) for word in policy.args]
        start = '"${first[@]}"' + (f" {' '.join(map(quote, args))}" if args else "")
        steps = [*values, f"newest {pattern}", f"job=({start} {' '.join(words)})"]
        yield f"  {' && '.join(steps)}\n"


def _word(text: str, values: list[str], bare: str = "") -> str:
    """Return a text with placeholders as a shell word, after commands that find their values.

    Args:
        text: a text of `retry.resume`.
        values: gets the commands; one that finds no value fails.
        bare: characters that are left unquoted, as they are the shell's.
    """
    while hole := _HOLE.search(text):
        name, default = hole.groups()
        at = name
        if name not in ("checkpoint", "step"):
            at = f"value{len(values)}"
            values.append(_assignment(at, name, None if default is None else _quoted(default)))
        text = f'{text[: hole.start()]}\x01"${at}"\x02{text[hole.end() :]}'
    return _quoted(text, bare)


def _assignment(at: str, name: str, default: str | None) -> str:
    """Return the command that gives a variable the value of an option or of an exported one."""
    if name.startswith("-"):
        return f"{at}=$({' '.join(['given', quote(name), *filter(None, [default])])})"
    return f"[[ -v {name} ]] && {at}=${name}" if default is None else f"{at}=${{{name}-{default}}}"


def _quoted(text: str, bare: str = "") -> str:
    """Return a text quoted, save its pieces of shell and the characters that are to stay bare."""
    home = '"$HOME"/' if text.startswith("~/") else ""
    own = f"|[{re.escape(bare)}]" if bare else ""
    pieces = re.split(f"(\x01[^\x02]*\x02{own})", text.removeprefix("~/") if home else text)
    return home + "".join(_piece(one, bare) for one in pieces if one)


def _piece(text: str, bare: str) -> str:
    if text in bare:
        return text
    return _MARK.sub(r"\1", text) if _MARK.match(text) else quote(text)
