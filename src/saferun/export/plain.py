"""Pure: the script of `gen-shell --plain`: only a short bash loop around torchrun.

shell/plain.sh is the hand-written part. The settings are those that such a script supports; its
head names the others that the profile sets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import reduce

from saferun import __version__
from saferun.export import shell_script
from saferun.export.settings_codec import ScriptSettings
from saferun.export.shell_script import comment, one_line, quote
from saferun.knowledge.variable_names import LISTS, OTHER_NAME, combine
from saferun.model import Profile
from saferun.planning.inputs import RunInputs
from saferun.planning.own_variables import SHARE_STORE, for_torchrun
from saferun.profile.merge import Conditions, holds
from saferun.profile.schema import Leaf
from saferun.profile.values import write_value
from saferun.settings import KEYS, RetryPolicy

TEMPLATE = "plain.sh"
_HAS = ("launcher", "retry.attempts", "retry.backoff_s", "retry.resume_args")
_TORCHRUN = re.compile(r"# torchrun ends with.*?\)'\n", re.DOTALL)  # asks it how the ranks ended
_JOB = 'job=(python3 -c "$torchrun" "$@")\n'
_POLICY = "attempts=3 wait_s=5 longest_s=60"
_CRASHED = "status == 3"
# Facts for conditions, as `python3 -c` expressions; a version is compared with a text.
_FACTS = {"torch": "torch.__version__", "gpus": "torch.cuda.device_count()"}
_COMPARISON = re.compile(r"([<>=!]{0,2}) {0,8}([\d.]+)")


def render(
    script_settings: ScriptSettings,
    gathered: RunInputs,
    args: Sequence[str],
    *,
    command: Sequence[str],
    template: str,
) -> str:
    """Return the whole script.

    Args:
        script_settings: the settings, with their conditions.
        gathered: the inputs of the first plan on this machine.
        args: torchrun's arguments; empty if the script takes them at run time.
        command: `saferun gen-shell --plain …`, which makes this script.
        template: the hand-written part, shell/plain.sh.
    """
    profile = _profile(gathered)
    retry = profile.settings.retry
    head, job, loop = template.partition(_JOB)
    assert job, "the template starts the job"
    words = ["python3", "-c", "$torchrun", *args]
    if profile.settings.launcher == "python":
        head, loop = _TORCHRUN.sub("", head), loop.replace(_CRASHED, "status > 128")
        words = ["python3", *(gathered.plan().command[1:] if args else ())]
    quoted = " ".join('"$torchrun"' if word == "$torchrun" else quote(word) for word in words)
    resume = f"  ((attempt > 1)) || job+=({' '.join(map(quote, retry.resume_args))})\n"
    parts = {
        "#@ header\n": _header(script_settings, profile, command),
        "#@ settings\n": "".join(_settings(script_settings, gathered)),
        "  #@ resume\n": resume if retry.resume_args else "",
        _POLICY: _policy(retry),
    }
    text = f'{head}job=({quoted} "$@")\n{loop}'
    return re.sub("|".join(map(re.escape, parts)), lambda place: parts[place[0]], text)


# --- the parts -----------------------------------------------------------------------------------


def _header(script_settings: ScriptSettings, profile: Profile, command: Sequence[str]) -> str:
    out = [
        key
        for key, note in profile.notes.items()
        if key not in _HAS and note.value != str(KEYS[key].default)
    ]
    python = profile.settings.launcher == "python"
    what = "a signal ends the script" if python else "a signal ended a rank"
    name = "python3" if python else "torchrun"
    return (
        comment(
            f"{name} with the variables of profile {script_settings.profile}, started again where "
            f"{what}; after any other failure it stops. It takes no locks, diagnoses nothing, has "
            "no hooks in the ranks and ends no processes that an attempt left: `saferun gen-shell` "
            "without --plain makes a script that does."
        )
        + _one_line(f"Of the profile it leaves out {', '.join(out)}." if out else "")
        + f"# Made by saferun {__version__} with\n"
        + f"{shell_script.INDENT}{' '.join(map(quote, command))}\n"
    )


def _profile(gathered: RunInputs) -> Profile:
    assert gathered.profile is not None, "inputs.assemble resolves one"
    return gathered.profile


def _one_line(text: str) -> str:
    """Return text as one comment line, "" for none."""
    plain = one_line(text)
    return f"# {plain}\n" if plain else ""


def _policy(retry: RetryPolicy) -> str:
    wait_s, longest_s = map(math.ceil, retry.backoff_s)
    return f"attempts={retry.attempts} wait_s={wait_s} longest_s={longest_s}"


def _settings(script_settings: ScriptSettings, gathered: RunInputs) -> Iterator[str]:
    keys = [key for doc in script_settings.chain for key in doc.leaves]
    keys += [given.key for given in script_settings.sets]
    for key in dict.fromkeys(keys):
        yield from _variable(key, script_settings, gathered)
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
    every = [doc.leaves[key] for doc in script_settings.chain if key in doc.leaves] + given
    for place in range(len(every) - 1, -1, -1):
        leaf, before = every[place], [one for one in every[:place] if not one.when]
        value = _value(key, name, [*before, leaf])
        test = _test(leaf, gathered)
        unless = "" if leaf in given else _unless(name)
        if test is not None and (value != "false" or section == "env"):
            yield _one_line(leaf.why) + f"{unless}{test}export {name}={value}\n"
        if not leaf.when:
            return


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
    found = []
    for name, wanted in leaf.when:
        if name in _FACTS:
            for operator, number in _COMPARISON.findall(str(wanted)):
                text = f'"{number}"' if name == "torch" else number
                found.append(f"{_FACTS[name]} {operator or '=='} {text}")
        elif not holds(leaf._replace(when=((name, wanted),)), made):
            return None
    if not found:
        return ""
    code = f"import torch; exit(not ({' and '.join(found)}))"
    return f"! python3 -c {quote(code)} || "
