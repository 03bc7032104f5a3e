"""Pure: what each mitigation changes in the next attempt, and whether it can be used here.

    refusal(mitigations, name, in_force, situation) -> "" if it can be used, else the reason
    changes(mitigations, names, situation) -> what build_plan applies after everything else

A mitigation overrides the profile, the exported variable and `--set`, since the attempt that failed
used those. The origin of each value in the plan names the mitigation. supervise/changes/probes.py
determines values that depend on the machine (a free port, the newest ptxas); `Situation.answers`
has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from saferun.knowledge.variable_names import LISTS, OTHER_NAME, combine
from saferun.model import Changes, CommandLine, LaunchPlan, ProcessLimits, Setting
from saferun.planning.mitigation_catalog import CUDAGRAPHS, FREE_PORT, LIMITS, Mitigation
from saferun.profile.schema import in_range
from saferun.settings import HookSettings, with_values

GRAPHS_VARIABLE = "TORCHINDUCTOR_CUDAGRAPHS"


class Situation(NamedTuple):
    """The plan that mitigations are applied to, and what is known about its job."""

    plan: LaunchPlan  # without mitigations
    environ: Mapping[str, str]  # the variables that the user exported
    torch: str | None = None
    answers: Mapping[str, str] = {}  # probe -> its value, if it found one
    graphs_seen: bool = False  # a rank of an earlier attempt compiled with CUDA graphs
    hooks_run: bool = True  # False: an earlier attempt's ranks ran without hooks (-I, -E, -S)
    missed: frozenset[str] = frozenset()  # modules that an earlier attempt loaded unhooked

    @property
    def hooks(self) -> HookSettings:
        """The hooks' settings in the plan."""
        return self.plan.settings.hooks

    def value(self, name: str) -> str | None:
        """Return the value that the job would see in a variable."""
        return self.plan.env[name].value if name in self.plan.env else self.environ.get(name)


# --- whether it can be used ----------------------------------------------------------------------


def graphs_seen(observed: Iterable[Mapping[str, object]]) -> bool:
    """Return whether any rank's receipts show a compilation with CUDA graphs."""
    for facts in observed:
        effective = facts.get("effective")
        if isinstance(effective, Mapping) and effective.get("triton.cudagraphs") is True:
            return True
        if facts.get("graphs") is True:  # torch.compile(backend="cudagraphs")
            return True
    return False


def questions(mitigations: Mapping[str, Mitigation], names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the values that probes.py must find for these mitigations, each once."""
    found: list[str] = []
    for mitigation in (mitigations[name] for name in names if name in mitigations):
        found += [question.lstrip("=") for question in mitigation.computed.values()]
        found += mitigation.torchrun.values()
        found += [ask for name, ask in LIMITS.items() if getattr(mitigation.process, name)]
    return tuple(dict.fromkeys(found))


def refusal(
    mitigations: Mapping[str, Mitigation], name: str, in_force: Sequence[str], here: Situation
) -> str:
    """Return why a mitigation cannot be used here.

    Args:
        mitigations: all of them, by name.
        name: the mitigation's name.
        in_force: names of the mitigations that the next attempt already has.
        here: the situation that the mitigation is applied to.

    Returns:
        One clause for people; "" if it can be used.
    """
    mitigation = mitigations.get(name)
    if mitigation is None:
        return "there is no such mitigation"
    if name in in_force:
        return "it is in force already"
    if mitigation.last:
        return "it only collects diagnostics"
    if mitigation.torch and (here.torch is None or not in_range(here.torch, mitigation.torch)):
        return f"it is for torch {mitigation.torch}, and this is {here.torch or 'an unknown one'}"
    if clash := _clash(mitigation, in_force, here):
        return clash
    if mitigation.needs_hooks and not here.hooks_run:
        return "the ranks skip the hooks that it needs"
    if past := here.missed.intersection(mitigation.targets):
        return f"the job loads {min(past)} past the hook that it needs"
    if mitigation.torchrun and (reason := _fixed_rendezvous(here)):
        return reason
    if missing := [need for need in questions(mitigations, [name]) if need not in here.answers]:
        return f"this machine has no value for: {', '.join(missing)}"
    useful = _changes_anything(mitigations, mitigation, in_force, here)
    return "" if useful else "it would change nothing"


def _clash(mitigation: Mitigation, in_force: Sequence[str], here: Situation) -> str:
    for other in mitigation.excludes:
        if other in in_force:
            return f"it is not used together with {other}"
        if other == CUDAGRAPHS and _graphs_on(in_force, here):
            return "it is not used together with CUDA graphs"
    return ""


def _graphs_on(in_force: Sequence[str], here: Situation) -> bool:
    """Return whether the job is known to use CUDA graphs through the compiler.

    With `hooks.compile.cudagraphs: keep` the script chooses, so the receipts of earlier attempts or
    the variable tell.
    """
    if "cudagraphs-off" in in_force or "compile-off" in in_force:
        return False
    if here.hooks.compile.cudagraphs == "off" or here.hooks.compile.enabled == "off":
        return False
    return here.graphs_seen or here.value(GRAPHS_VARIABLE) == "1"


def _fixed_rendezvous(here: Situation) -> str:
    """Return why this process cannot move the rendezvous, "" if it can."""
    if here.plan.launcher != "torchrun":
        return "there is no torchrun whose arguments could be changed"
    if here.plan.options.nodes != 1:
        return "one node cannot choose the rendezvous of several"
    return ""


def _changes_anything(
    mitigations: Mapping[str, Mitigation],
    mitigation: Mitigation,
    in_force: Sequence[str],
    here: Situation,
) -> bool:
    """Return whether the next attempt would differ.

    If the mitigation has hook settings, only these are compared: its variables are for processes
    without hooks.
    """
    if mitigation.assign or mitigation.rank_directories:
        return True
    before = changes(mitigations, in_force, here)
    if mitigation.settings:
        now = with_values(here.hooks, before.hooks, "hooks.")
        return now != with_values(now, mitigation.settings, "hooks.")
    after = changes(mitigations, (*in_force, mitigation.name), here)
    env = [merge_mitigations(here.plan.env, here.environ, c.env) for c in (before, after)]
    values = [{name: made.value for name, made in found.items()} for found in env]
    return values[0] != values[1] or (before.torchrun, before.limits) != (
        after.torchrun,
        after.limits,
    )


# --- what it changes -----------------------------------------------------------------------------


def changes(
    mitigations: Mapping[str, Mitigation], names: Sequence[str], here: Situation
) -> Changes:
    """Return what several mitigations change together; a later one overrides an earlier one.

    A computed value whose probe found nothing is left out; `refusal` has reported it.

    Args:
        mitigations: all of them, by name.
        names: names of the mitigations in force, in order.
        here: the situation that the mitigations are applied to.

    Raises:
        KeyError: a name is not that of a mitigation.
    """
    env: list[tuple[str, Setting]] = []
    hooks: dict[str, str | bool] = {}
    notes: dict[str, Setting] = {}
    torchrun: list[str] = []
    limits = ProcessLimits()
    for mitigation in (mitigations[name] for name in names):
        env += [
            (name, _setting(mitigation, value))
            for name, value in _variables(mitigation, here.answers)
        ]
        hooks |= mitigation.settings
        notes |= {
            key: _setting(mitigation, str(value)) for key, value in mitigation.settings.items()
        }
        torchrun += [option for option in _options(mitigation, here) if option not in torchrun]
        limits = _limits(limits, mitigation, here.answers)
    needs_hooks = any(mitigations[name].needs_hooks for name in names)
    return Changes(tuple(names), tuple(env), hooks, notes, tuple(torchrun), limits, needs_hooks)


def _setting(mitigation: Mitigation, value: str) -> Setting:
    return Setting(value, f"mitigation {mitigation.name}", mitigation.why, mitigation.source)


def _variables(mitigation: Mitigation, answers: Mapping[str, str]) -> list[tuple[str, str]]:
    found = list(mitigation.env.items())
    for name, question in mitigation.computed.items():
        bare = question.lstrip("=")  # "=" is NCCL's syntax for an exact name, not a prefix
        if bare in answers:
            found.append((name, question[: len(question) - len(bare)] + answers[bare]))
    return found


def _limits(
    limits: ProcessLimits, mitigation: Mitigation, answers: Mapping[str, str]
) -> ProcessLimits:
    process = mitigation.process
    for name, question in LIMITS.items():
        if (most := getattr(process, name)) and question in answers:
            limits = limits._replace(**{name: min(most, int(answers[question]))})
    return limits._replace(
        session=process.session or limits.session, ignore=process.ignore or limits.ignore
    )


def _options(mitigation: Mitigation, here: Situation) -> list[str]:
    """Return a mitigation's options for torchrun, for the rendezvous of this job.

    These options determine the port (torch/distributed/run.py, 2.4 to 2.13): --standalone overrides
    the others and takes a free port and a new id by itself; the static rendezvous uses
    --master-port unless it has an endpoint; c10d uses the endpoint's port. The endpoint of a
    service (etcd) or of a file is never changed.
    """
    if here.plan.launcher != "torchrun" or here.plan.options.standalone:
        return []
    arguments = []
    for option, question in mitigation.torchrun.items():
        answer = here.answers.get(question)
        if answer is None or (question == FREE_PORT and option != _port_option(here)):
            continue
        if option == "rdzv-endpoint":
            answer = f"{_endpoint(here)[0] or 'localhost'}:{answer}"
        arguments.append(f"--{option}={answer}")
    return arguments


def _port_option(here: Situation) -> str:
    """Return the option that changes the port of this rendezvous; "" if none does."""
    options = here.plan.options
    host, port = _endpoint(here)
    if options.backend == "static":
        return "rdzv-endpoint" if host else "master-port"
    file_store = "store_type=file" in options.conf.replace(" ", "")
    return "" if options.backend != "c10d" or file_store or port == "0" else "rdzv-endpoint"


def port_moves(here: Situation) -> bool:
    """Return whether torchrun can be given another port for this job's rendezvous."""
    own = _fixed_rendezvous(here) or here.plan.options.standalone
    return not own and _port_option(here) != ""


def _endpoint(here: Situation) -> tuple[str, str]:
    """Return host (as written) and port of the rendezvous endpoint; "" for a missing part."""
    text = here.plan.options.endpoint
    host, colon, port = text.rpartition(":")
    return (host, port) if colon and port.isdigit() else (text, "")


def meeting_host(here: Situation) -> str:
    """Return the host of the rendezvous; "" if this machine is it by default."""
    return _endpoint(here)[0].strip("[]") or here.plan.options.master_addr


# --- applying it to a plan -----------------------------------------------------------------------


def merge_mitigations(
    env: Mapping[str, Setting], environ: Mapping[str, str], variables: Iterable[tuple[str, Setting]]
) -> dict[str, Setting]:
    """Return the variables that saferun sets, with those of mitigations applied.

    Lists are merged item by item: the mitigation's items replace those of the same name, the
    others stay. A variable that is exported with the same value is not set again.

    Args:
        env: the variables that saferun sets without mitigations.
        environ: the variables that the user exported.
        variables: the mitigations' variables, in order.
    """
    made = dict(env)
    for name, mitigation in variables:
        if name not in LISTS:
            if name in made or environ.get(name) != mitigation.value:
                made[name] = mitigation
            continue
        other = OTHER_NAME.get(name, "")
        present = [n for n in (name, other) if n in made or n in environ]
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
    """Return a list variable (saferun's or exported) with a mitigation's items merged in."""
    older = made[name].value if name in made else environ.get(name)
    origin = made[name].origin if name in made else "exported" if older else ""
    if not older:
        return mitigation
    value = combine(name, older, mitigation.value)
    return mitigation._replace(value=value, origin=f"{origin} + {mitigation.origin}")


def with_options(line: CommandLine, options: Sequence[str]) -> tuple[str, ...]:
    """Return torchrun's arguments with further options directly before the script.

    torchrun's parser uses the last of several occurrences, whatever their spelling.

    Args:
        line: the command line that torchrun would get.
        options: one argument each, as in "--master-port=40123".
    """
    args = line.args
    if line.script is None:
        return args
    at = len(args) - len(line.script_args) - 1
    separated = at > 0 and args[at - 1] == "--"  # -- SCRIPT ARGS
    if separated or args[at] != line.script:  # SCRIPT -- ARGS
        at -= 1
    return (*args[:at], *options, *args[at:])
