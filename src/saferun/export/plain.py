"""The script of `gen-shell --plain`: all that runs can be read in it, and it has no bundle.

shell/plain.sh is the hand-written part. The settings are those that it can have; the others are
named in its head. The messages by which it judges a failure are those that failures.yaml marks as
`plain`, as extended regular expressions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

from saferun.diagnosis import signatures
from saferun.diagnosis.signatures import Kind
from saferun.export import shell_script
from saferun.export.settings_codec import Sheet
from saferun.export.shell_script import Maker, comment, quote
from saferun.knowledge.variable_names import LISTS, OTHER_NAME, combine
from saferun.model import Profile, RetryPolicy
from saferun.planning.inputs import Gathered
from saferun.planning.own_variables import SHARE_STORE, for_torchrun
from saferun.profile.schema import KEYS, Leaf
from saferun.profile.values import write_value

TEMPLATE = "plain.sh"
_HAS: tuple[str, ...] = (
    "launcher",
    "preflight.mode",
    "preflight.timeout_s",
    "locks.gpus",
    "locks.wait_s",
)
_HAS += tuple(f"retry.{key}" for key in ("attempts", "backoff_s", "deadline_s", "resume_args"))
_WAITS = 8  # between attempts that are written out; the last one stands for those after it
_ERE = re.compile(r"[][\\.^$*+?(){}|]")
_TORCH = (
    'torch=$("$python" -c \'import importlib.metadata, re; '
    'v = re.findall(r"\\d+", importlib.metadata.version("torch")); '
    'print(int("".join(n.zfill(3) for n in [*v, "0"][:3])))\' || echo 0) # 2.13.0 is 2013000\n'
)


def render(sheet: Sheet, gathered: Gathered, args: Sequence[str], maker: Maker) -> str:
    """Return the whole script.

    Args:
        sheet: the settings, with their conditions.
        gathered: what the first plan is computed from here.
        args: torchrun's arguments; empty if the script takes them when it is run.
        maker: what makes the script, with shell/plain.sh.
    """
    parts = {
        "header": _header(sheet, _profile(gathered), maker),
        "job": _job(gathered, args),
        "settings": "".join(_settings(sheet, gathered)),
        "known": "".join(
            f"  {line}\n" for line in messages(signatures.load(gathered.environ).kinds)
        ),
    }
    return re.sub(r"^ *#@ (\w+)\n", lambda place: parts[place[1]], maker.template, flags=re.M)


def messages(kinds: Mapping[str, Kind]) -> list[str]:
    """Return a line for each kind that the script knows: what cannot pass first, then what can."""
    known = [kind for kind in kinds.values() if kind.plain]
    lines = []
    for kind in sorted(known, key=passes):
        words = [kind.name, pattern(kind)] + ([] if passes(kind) else [kind.advice])
        lines.append(f"{'passes' if passes(kind) else 'stops'} {' '.join(map(quote, words))}")
    return lines


def passes(kind: Kind) -> bool:
    """Return whether a failure of this kind can pass by itself, without a mitigation."""
    return kind.verdict == "retry" or kind.waits


def pattern(kind: Kind) -> str:
    """Return an extended regular expression of a kind's commonest messages, in lower case."""
    return "|".join(
        ".*".join(_ERE.sub(r"\\\g<0>", part) for part in signatures.needle(text))
        for text in kind.plain
    )


# --- the parts -----------------------------------------------------------------------------------


def _header(sheet: Sheet, profile: Profile, maker: Maker) -> str:
    out = [key for key, note in profile.notes.items() if _is_left_out(key, note.value)]
    return (
        comment(
            f"A training job under profile {sheet.profile}, tried again where its failure can "
            "pass. All that runs is here; it needs bash 4.4, coreutils, grep, sed, flock, setsid, "
            "python3 and torch."
        )
        + f"# Made by saferun {maker.version} with\n"
        + f"{shell_script.INDENT}{' '.join(map(quote, maker.command))}\n"
        + comment(
            "It has no hooks, no mitigations by diagnosis, no journal, resume, watch, slots, MIG "
            "slices or agreement of nodes, as gen-shell without --plain. SIGKILL leaves its job."
        )
        + _one_line(f"Of the profile it leaves out {', '.join(out)}." if out else "")
    )


def _profile(gathered: Gathered) -> Profile:
    assert gathered.profile is not None, "inputs.assemble resolves one"
    return gathered.profile


def _is_left_out(key: str, value: str) -> bool:
    return key not in _HAS and value != str(KEYS[key].default)


def _one_line(text: str) -> str:
    """Return text as one comment line, "" for none."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return f"# {plain}\n" if plain else ""


def _job(gathered: Gathered, args: Sequence[str]) -> str:
    words = ("torchrun", *args)
    if _profile(gathered).launcher == "python":
        words = ("python3", *(gathered.plan().command[1:] if args else ()))
    note = "what this script is given follows" if args else "what this script is given"
    return f'JOB=({" ".join(map(quote, words))} "$@") # {note}\n'


def _settings(sheet: Sheet, gathered: Gathered) -> Iterator[str]:
    keys = [key for doc in sheet.chain for key in doc.leaves]
    keys += [given.key for given in sheet.sets]
    lines = [line for key in dict.fromkeys(keys) for line in _variable(key, sheet, gathered)]
    if any("((torch " in line for line in lines):
        yield _TORCH
    yield from lines
    own = for_torchrun(_profile(gathered), gathered.request.options, gathered.identity, {}, ())
    if SHARE_STORE in own:
        yield _one_line(own[SHARE_STORE].why) + f"default {SHARE_STORE} 1\n"
    settings = _profile(gathered).settings
    yield from _policy(settings.retry)
    locks, preflight = settings.locks, settings.preflight
    yield f"LOCKS={locks.gpus} LOCK_WAIT_S={locks.wait_s:.0f} "
    yield f"PREFLIGHT={preflight.mode} PREFLIGHT_S={preflight.timeout_s:g}\n"


def _policy(retry: RetryPolicy) -> Iterator[str]:
    attempts = min(retry.attempts, retry.attempts_total)
    first, longest = retry.backoff_s
    waits = [min(first * 2**n, longest) for n in range(min(attempts - 1, _WAITS))]
    yield f"ATTEMPTS={attempts} WAITS_S=({' '.join(f'{wait:g}' for wait in waits)}) "
    words = " ".join(map(quote, retry.resume_args))
    yield f"DEADLINE_S={retry.deadline_s or 0:.0f} RESUME_ARGS=({words})\n"


def _variable(key: str, sheet: Sheet, gathered: Gathered) -> Iterator[str]:
    """Yield the lines of a variable, or of an option of torchrun's as torchrun reads it from one.

    The first line that applies counts, so the profile that was named comes before its ancestors.
    """
    section, _, name = key.partition(".")
    if section == "torchrun":
        options = gathered.request.options
        if not sheet.named or _profile(gathered).launcher != "torchrun":
            return
        if name == "nproc-per-node" and (options.nodes != 1 or options.processes is not None):
            return
        name = f"PET_{name.upper().replace('-', '_')}"
    elif section != "env":
        return
    leaves = [doc.leaves[key] for doc in sheet.chain if key in doc.leaves]
    given = [one.leaf for one in sheet.sets if one.key == key]
    every = leaves + given
    for place in range(len(every) - 1, -1, -1):
        leaf, before = every[place], [one for one in every[:place] if not one.when]
        value = _value(key, name, [*before, leaf])
        test = "".join(_tests(leaf, gathered)) + _unless(name)
        how = f"export {name}={value}" if place >= len(leaves) else f"default {name} {value}"
        if value != "false" or section == "env":
            yield _one_line(leaf.why) + f"{test}{how}\n"
        if not leaf.when:
            return


def _value(key: str, name: str, leaves: Sequence[Leaf]) -> str:
    """Return a value as a word; the items of a list come from all files."""
    texts = [write_value(key, leaf.value) for leaf in leaves]
    text = reduce(lambda old, new: combine(name, old, new), texts) if name in LISTS else texts[-1]
    return quote("1" if key.startswith("torchrun.") and text == "true" else text)


def _unless(name: str) -> str:
    """Return what keeps a variable from contradicting another one that the user exports."""
    if name == "CUDA_DEVICE_ORDER":  # it would give the numbers to other GPUs
        return "[[ ,${CUDA_VISIBLE_DEVICES-}, =~ ,[0-9]+, ]] || "
    return f"[[ -v {OTHER_NAME[name]} ]] || " if name in OTHER_NAME else ""


def _tests(leaf: Leaf, gathered: Gathered) -> Iterator[str]:
    """Yield the conditions of a value, as bash tests them where the script runs."""
    options = gathered.request.options
    for name, wanted in leaf.when:
        what = {"torch": "torch", "gpus": "${#gpus[@]}"}.get(name)
        if what is None:  # distributed: as far as it is known when the script is made
            yield (
                ""
                if bool(wanted) == (options.processes != "1" or options.nodes != 1)
                else "true || "
            )
            continue
        tests = [_comparison(what, part.strip()) for part in str(wanted).split(",")]
        yield f"! (({' && '.join(['torch'] * (name == 'torch') + tests)})) || "


def _comparison(what: str, part: str) -> str:
    operator = re.match("[<>=!]*", part)
    assert operator is not None
    numbers = [int(number) for number in part[operator.end() :].strip().split(".")]
    if what == "torch":
        numbers = [*numbers, 0, 0][:3]
        numbers = [numbers[0] * 10**6 + numbers[1] * 1000 + numbers[2]]
    return f"{what} {operator[0] or '=='} {numbers[0]}"
