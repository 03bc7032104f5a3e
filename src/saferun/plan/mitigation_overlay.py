"""Pure: what each mitigation changes in the next attempt, and whether it can be used here.

    refusal(mitigations, name, in_force, situation) -> "" where it can be used, else why not
    changes(mitigations, names, situation) -> what build_plan puts over everything else

A mitigation beats the profile, the exported variable and `--set`: it comes after a failure that
those had, and the plan says so in each value's origin. What only the world knows (a free port, the
newest ptxas) is asked by supervise/probes.py and arrives as `Situation.answers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from saferun.knowledge.variable_names import LISTS, OTHER_NAME, combine
from saferun.model import (
    Changes,
    CommandLine,
    HookSettings,
    LaunchOptions,
    LaunchPlan,
    ProcessLimits,
    Setting,
)
from saferun.named_tuple import NamedTuple
from saferun.plan.mitigation_catalog import CUDAGRAPHS, FREE_PORT, OPEN_FILES, Mitigation
from saferun.profile import settings
from saferun.profile.schema import in_range

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

GRAPHS_VARIABLE = "TORCHINDUCTOR_CUDAGRAPHS"


class Situation(NamedTuple):
    """What a mitigation meets: the plan without mitigations, and what the world answered."""

    launcher: str
    options: LaunchOptions  # of what torchrun gets
    hooks: HookSettings
    env: Mapping[str, Setting]  # what saferun sets
    environ: Mapping[str, str]  # what the user exported
    torch: str | None = None
    answers: Mapping[str, str] = {}  # question -> answer; none where the world has none
    graphs_seen: bool = False  # a rank of an earlier attempt compiled with CUDA graphs
    hooks_run: bool = True  # False: an earlier attempt's ranks skipped them (-I, -E, -S)

    def value(self, name: str) -> str | None:
        """Return what the job would find in a variable."""
        return self.env[name].value if name in self.env else self.environ.get(name)


# --- whether it can be used ----------------------------------------------------------------------


def situation(
    plan: LaunchPlan,
    environ: Mapping[str, str],
    torch: str | None,
    *,
    answers: Mapping[str, str] | None = None,
    graphs_seen: bool = False,
    hooks_run: bool = True,
) -> Situation:
    """Return what mitigations meet here.

    Args:
        plan: of an attempt, without mitigations.
        environ: what the user exported.
        torch: the job's version; None where it could not be found out.
        answers: what supervise/probes.py found out, for `questions`.
        graphs_seen: see `graphs_seen`.
        hooks_run: False where the receipts tell that the ranks skip hooks.
    """
    return Situation(
        launcher=plan.launcher,
        options=plan.options,
        hooks=plan.settings.hooks,
        env=plan.env,
        environ=environ,
        torch=torch,
        answers=answers or {},
        graphs_seen=graphs_seen,
        hooks_run=hooks_run,
    )


def graphs_seen(observed: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a rank compiled with CUDA graphs on, by the facts of its receipts."""
    for facts in observed:
        effective = facts.get("effective")
        if isinstance(effective, Mapping) and effective.get("triton.cudagraphs") is True:
            return True
        if facts.get("graphs") is True:  # the backend of that name
            return True
    return False


def questions(mitigations: Mapping[str, Mitigation], names: Iterable[str]) -> tuple[str, ...]:
    """Return what supervise/probes.py has to find out for these mitigations, each once."""
    asked: list[str] = []
    for mitigation in (mitigations[name] for name in names if name in mitigations):
        asked += [question.lstrip("=") for question in mitigation.computed.values()]
        asked += mitigation.torchrun.values()
        asked += [OPEN_FILES] if mitigation.process.nofile is not None else []
    return tuple(dict.fromkeys(asked))


def usable(
    mitigations: Mapping[str, Mitigation], name: str, in_force: Sequence[str], here: Situation
) -> bool:
    """Return whether a mitigation can be used beside those in force, and would change anything."""
    return not refusal(mitigations, name, in_force, here)


def refusal(
    mitigations: Mapping[str, Mitigation], name: str, in_force: Sequence[str], here: Situation
) -> str:
    """Return why a mitigation cannot be used here, in one clause; "" where it can."""
    mitigation = mitigations.get(name)
    if mitigation is None:
        return "there is no such mitigation"
    if name in in_force:
        return "it is in force already"
    if mitigation.last:
        return "it cures nothing, it tells the reason"
    if mitigation.torch and (here.torch is None or not in_range(here.torch, mitigation.torch)):
        return f"it is for torch {mitigation.torch}, and here is {here.torch or 'an unknown one'}"
    if clash := _clash(mitigation, in_force, here):
        return clash
    if mitigation.needs_hooks and not here.hooks_run:
        return "the ranks skip the hooks that it needs"
    if mitigation.torchrun and (refused := _cannot_meet_elsewhere(here)):
        return refused
    if missing := [word for word in questions(mitigations, [name]) if word not in here.answers]:
        return f"this machine has no answer to: {', '.join(missing)}"
    return (
        ""
        if _changes_anything(mitigations, mitigation, in_force, here)
        else "it would change nothing"
    )


def _clash(mitigation: Mitigation, in_force: Sequence[str], here: Situation) -> str:
    for other in mitigation.excludes:
        if other in in_force:
            return f"it is not used together with {other}"
        if other == CUDAGRAPHS and _graphs_on(in_force, here):
            return "it is not used together with CUDA graphs"
    return ""


def _graphs_on(in_force: Sequence[str], here: Situation) -> bool:
    """Whether the job is known to use CUDA graphs through the compiler.

    A policy of `keep` says nothing: the script decides. So the receipts do, or the variable.
    """
    if "cudagraphs-off" in in_force or "compile-off" in in_force:
        return False
    if here.hooks.compile.cudagraphs == "off" or here.hooks.compile.enabled == "off":
        return False
    return here.graphs_seen or here.value(GRAPHS_VARIABLE) == "1"


def _cannot_meet_elsewhere(here: Situation) -> str:
    if here.launcher != "torchrun":
        return "there is no torchrun whose arguments could be changed"
    if here.options.nodes != 1:
        return "one node alone cannot choose where several meet"
    return ""


def _changes_anything(
    mitigations: Mapping[str, Mitigation],
    mitigation: Mitigation,
    in_force: Sequence[str],
    here: Situation,
) -> bool:
    """Whether the next attempt would differ. Hook settings decide where a mitigation has them.

    Its variables are then only for processes that no hook reaches.
    """
    if mitigation.assign or mitigation.rank_directories:
        return True
    before = changes(mitigations, in_force, here)
    if mitigation.hooks:
        now = settings.replace(here.hooks, before.hooks)
        return now != settings.replace(now, mitigation.hooks)
    after = changes(mitigations, (*in_force, mitigation.name), here)
    env = [over(here.env, here.environ, c.env) for c in (before, after)]
    values = [{name: made.value for name, made in found.items()} for found in env]
    return values[0] != values[1] or (before.torchrun, before.limits) != (
        after.torchrun,
        after.limits,
    )


# --- what it changes -----------------------------------------------------------------------------


def changes(
    mitigations: Mapping[str, Mitigation], names: Sequence[str], here: Situation
) -> Changes:
    """Return what these mitigations change together, in their order; a later one wins.

    A computed value that the world has no answer for is left out (`refusal` has said so).

    Raises:
        KeyError: a name that is no mitigation.
    """
    env: list[tuple[str, Setting]] = []
    hooks: dict[str, Mapping[str, str | bool]] = {}
    notes: dict[str, Setting] = {}
    torchrun: list[str] = []
    limits = ProcessLimits()
    for mitigation in (mitigations[name] for name in names):
        env += [
            (name, _setting(mitigation, value))
            for name, value in _variables(mitigation, here.answers)
        ]
        hooks |= {hook: {**hooks.get(hook, {}), **part} for hook, part in mitigation.hooks.items()}
        notes |= {key: _setting(mitigation, str(value)) for key, value in mitigation.settings}
        torchrun += [word for word in _words(mitigation, here) if word not in torchrun]
        limits = _limits(limits, mitigation, here.answers)
    needs_hooks = any(mitigations[name].needs_hooks for name in names)
    return Changes(tuple(names), tuple(env), hooks, notes, tuple(torchrun), limits, needs_hooks)


def _setting(mitigation: Mitigation, value: str) -> Setting:
    return Setting(value, f"mitigation {mitigation.name}", mitigation.why, mitigation.source)


def _variables(mitigation: Mitigation, answers: Mapping[str, str]) -> list[tuple[str, str]]:
    found = list(mitigation.env.items())
    for name, question in mitigation.computed.items():
        bare = question.lstrip("=")  # NCCL's own mark: this interface, not all that begin so
        if bare in answers:
            found.append((name, question[: len(question) - len(bare)] + answers[bare]))
    return found


def _limits(
    limits: ProcessLimits, mitigation: Mitigation, answers: Mapping[str, str]
) -> ProcessLimits:
    process = mitigation.process
    if process.nofile is not None and OPEN_FILES in answers:
        limits = limits._replace(nofile=min(process.nofile, int(answers[OPEN_FILES])))
    return limits._replace(
        session=process.session or limits.session, ignore=process.ignore or limits.ignore
    )


def _words(mitigation: Mitigation, here: Situation) -> list[str]:
    """Return torchrun's arguments of a mitigation, for the way in which this job meets.

    Which option really moves the port (torch/distributed/run.py, 2.4 to 2.13): --standalone
    overrides the others and takes a free port and a new id by itself; the static rendezvous takes
    --master-port unless it has an endpoint; c10d takes the endpoint's. An endpoint of a service
    (etcd) or of a file is not ours to move.
    """
    if here.launcher != "torchrun" or here.options.standalone:
        return []
    words = []
    for option, question in mitigation.torchrun.items():
        answer = here.answers.get(question)
        if answer is None or (question == FREE_PORT and option != _port_option(here)):
            continue
        if option == "rdzv-endpoint":
            answer = f"{_endpoint(here)[0] or 'localhost'}:{answer}"
        words.append(f"--{option}={answer}")
    return words


def _port_option(here: Situation) -> str:
    options = here.options
    host, port = _endpoint(here)
    if options.backend == "static":
        return "rdzv-endpoint" if host else "master-port"
    file_store = "store_type=file" in options.conf.replace(" ", "")
    return "" if options.backend != "c10d" or file_store or port == "0" else "rdzv-endpoint"


def _endpoint(here: Situation) -> tuple[str, str]:
    """The rendezvous endpoint's host, as written, and its port; "" for what is not given."""
    text = here.options.endpoint
    host, colon, port = text.rpartition(":")
    return (host, port) if colon and port.isdigit() else (text, "")


def meeting_host(here: Situation) -> str:
    """Return the host by which the ranks meet, "" where it is this machine by default."""
    return _endpoint(here)[0].strip("[]") or here.options.master_addr


# --- putting it over a plan ----------------------------------------------------------------------


def over(
    env: Mapping[str, Setting], environ: Mapping[str, str], cured: Iterable[tuple[str, Setting]]
) -> dict[str, Setting]:
    """Return the variables that saferun sets, with the mitigations' over them.

    Lists are merged item by item: the mitigation's items win, the others stay. An exported value
    that says the same already needs no setting.

    Args:
        env: what saferun sets without mitigations.
        environ: what the user exported.
        cured: the mitigations' variables, in order.
    """
    made = dict(env)
    for name, mitigation in cured:
        if name not in LISTS:
            if name in made or environ.get(name) != mitigation.value:
                made[name] = mitigation
            continue
        twin = OTHER_NAME.get(name, "")
        present = [n for n in (name, twin) if n in made or n in environ]
        base = present[0] if present else name
        targets = dict.fromkeys((name, *present))
        made |= {
            target: _merged(target if target in present else base, made, environ, mitigation)
            for target in targets
        }
    return made


def _merged(
    name: str, made: Mapping[str, Setting], environ: Mapping[str, str], mitigation: Setting
) -> Setting:
    """A list variable's value, whoever gave it, with a mitigation's items put over it."""
    older = made[name].value if name in made else environ.get(name, "")
    origin = made[name].origin if name in made else "exported" if older else ""
    if not older:
        return mitigation
    value = combine(name, older, mitigation.value)
    return mitigation._replace(value=value, origin=f"{origin} + {mitigation.origin}")


def with_options(line: CommandLine, options: Sequence[str]) -> tuple[str, ...]:
    """Return torchrun's arguments with more options right before the script.

    The last of several counts in torchrun's parser, whatever spelling the others have.

    Args:
        line: what torchrun would get.
        options: each one word.
    """
    args = line.args
    if line.script is None:
        return args
    at = len(args) - len(line.script_args) - 1
    separated = at > 0 and args[at - 1] == "--"  # -- SCRIPT ARGS
    if separated or args[at] != line.script:  # SCRIPT -- ARGS
        at -= 1
    return (*args[:at], *options, *args[at:])
