"""Pure: a LaunchPlan as text for people, as JSON for programs, and as one line."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from saferun.model import OK, Finding, LaunchPlan, Setting, as_tree
from saferun.planning.own_variables import OF_ATTEMPT, is_supervised, needed_beside
from saferun.settings import KEYS

WIDTH = 96


def as_json(plan: LaunchPlan) -> dict[str, Any]:
    """Return the fixed JSON form of a plan (schema 1)."""
    return {
        "schema": 1,
        "profile": plan.profile,
        "launcher": plan.launcher,
        "command": list(plan.command),
        "torchrun_args": list(plan.torchrun_args),
        "script": plan.script,
        "script_args": list(plan.script_args),
        "env": {name: as_tree(setting) for name, setting in plan.env.items()},
        **_policies(plan),
        "mitigations": list(plan.mitigations),
    }


def resumed_json(plan: LaunchPlan | None, notes: Sequence[str]) -> dict[str, Any] | None:
    """Return what a second attempt would run now; None where `retry.resume` is not set.

    Args:
        plan: the plan of that attempt.
        notes: notes on the checkpoints that were found.
    """
    if plan is None:
        return None
    checkpoint = plan.checkpoint
    return {
        "checkpoint": checkpoint.path if checkpoint else None,
        "step": checkpoint.step if checkpoint and checkpoint.step >= 0 else None,
        "command": list(plan.command),
        "notes": list(notes),
    }


def resumed_text(plan: LaunchPlan | None, notes: Sequence[str]) -> str:
    """Return what a second attempt would run, for people; "" if `retry.resume` is not set.

    Args:
        plan: the plan of that attempt.
        notes: notes on the checkpoints that were found.
    """
    if plan is None:
        return ""
    lines = ["", "a second attempt, if it started now", *(f"  {note}" for note in notes)]
    return "\n".join([*lines, *_wrapped("  command", plan.command), ""])


def _policies(plan: LaunchPlan) -> dict[str, Any]:
    """Return the policies as JSON; empty under SAFERUN_DISABLE, which disables them."""
    if plan.disabled:
        return {"hooks": {}, "retry": {}, "locks": {}, "notify": {}, "start": {}}
    devices = [gpu.uuid for gpu in plan.gpus.gpus if gpu.uuid]
    return {
        "hooks": as_tree(plan.settings.hooks),
        "retry": as_tree(plan.settings.retry),
        "locks": {**as_tree(plan.settings.locks), "devices": devices},
        "notify": as_tree(plan.settings.notify),
        "start": as_tree(plan.settings.start),
    }


def headline(plan: LaunchPlan) -> str:
    """Return the line printed when a job starts."""
    origin = plan.profile_origin
    who = f"detected: {_gpus(plan)}" if origin == "detected" else f"from {origin}"
    parts = [f"profile {plan.profile} ({who})"]
    if plan.settings.workers > 1:
        parts.append(f"{plan.settings.workers} workers")
    if plan.settings.start.ranks == "warm":
        parts.append("warm ranks" if plan.launcher == "torchrun" else "warm replacements")
    hidden = ("PYTHONPATH", "SAFERUN_INJECT", *OF_ATTEMPT)
    shown = [name for name in plan.env if name not in hidden]
    if shown:
        parts.append(f"sets {', '.join(shown)}")
    if plan.hint:
        parts.append(plan.hint)
    return "; ".join(parts)


def announcement(plan: LaunchPlan) -> str:
    """Return what is printed when a job starts: the headline, and a line for each remark."""
    return "\n".join([headline(plan), *plan.remarks])


def _gpus(plan: LaunchPlan) -> str:
    names = [gpu.name or "unknown GPU" for gpu in plan.gpus.gpus]
    if not names:
        return "no GPU"
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    return ", ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())


def as_text(
    plan: LaunchPlan, findings: Sequence[Finding] = (), exported: Mapping[str, str] = {}
) -> str:
    """Return a plan as text for people.

    Args:
        plan: the plan of an attempt.
        findings: findings about the user's own settings.
        exported: variables from which torchrun takes options.
    """
    policies = _policies(plan)
    return "\n".join(
        [
            *_top(plan),
            *_exported(exported),
            "",
            *_environment(plan),
            "",
            *_section("hooks", policies["hooks"], plan.notes),
            "",
            *_section("retry", policies["retry"], plan.notes),
            *_beside(plan),
            *_started(plan),
            *_notified(plan),
            *_audit(findings),
            *[f"\nnote: {remark}" for remark in plan.remarks],
        ]
    )


def _exported(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the options that torchrun takes from the environment: nodes, processes, rendezvous."""
    if variables:
        shown = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        head = "options   torchrun's, from your environment: "
        yield from textwrap.wrap(
            head + shown, WIDTH, subsequent_indent=" " * 10, break_on_hyphens=False
        )


def _beside(plan: LaunchPlan) -> list[str]:
    """Return lines on why saferun stays beside a job with a single attempt; [] if it does not."""
    if plan.disabled or plan.settings.retry.attempts > 1:
        return []
    if not is_supervised(plan.settings):
        return _hang("one attempt", "the job replaces saferun")
    why = ", ".join(needed_beside(plan.settings))
    return _hang("one attempt", f"saferun stays beside the job for {why}")


def _started(plan: LaunchPlan) -> list[str]:
    """Return lines on how processes are started, if not in the launcher's own way."""
    if plan.disabled or plan.settings.start.ranks != "warm":
        return []
    label, what = "processes", "one that replaces another has imported the same ahead"
    if plan.launcher == "torchrun":
        label, what = "ranks", "forks of a process that has imported torch"
    note = plan.notes["start.ranks"]  # `spawn` is the default and has no note
    return [*_hang(label, f"warm: {what} (start.ranks)    [{note.origin}]"), *_reason(note)]


def _notified(plan: LaunchPlan) -> Iterator[str]:
    """Yield the command that gets events, if there is one."""
    notify = plan.settings.notify
    if notify.command and not plan.disabled:
        yield from ("", "notify")
        yield from _hang("on", ", ".join(notify.on or KEYS["notify.on"].choices))
        yield from _hang("command", shlex.join(notify.command))


def _audit(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield problems and notes in full, and the number of the other findings."""
    if findings:
        yield "\nyour own settings"
    fine = sum(finding.level == OK for finding in findings)
    for finding in findings:
        if finding.level != OK:
            yield from _hang(finding.level, finding.what)
            yield from _indented(finding.detail)
            yield from _indented(f"fix: {finding.fix}" if finding.fix else "")
    if fine:
        yield f"  {'ok':<18} {fine} without a remark; `saferun doctor` lists all"


def _top(plan: LaunchPlan) -> list[str]:
    origin = plan.profile_origin
    lines = [f"profile   {plan.profile} ({origin}; {_gpus(plan)} visible)"]
    lines += _wrapped("command", plan.command)
    if plan.settings.workers > 1:
        lines.append(f"workers   {plan.settings.workers}, each with a number in SAFERUN_WORKER")
    if plan.hint:
        lines.append(f"hint      {plan.hint}")
    return lines


def _wrapped(label: str, argv: Sequence[str]) -> list[str]:
    """Return a command as lines that a shell reads as one command; no argument is split."""
    lines = [""]
    for arg in map(shlex.quote, argv):
        if lines[-1] and len(lines[-1]) + len(arg) > WIDTH:
            lines.append("")
        lines[-1] += f" {arg}" if lines[-1] else arg
    heads = [label, *[""] * (len(lines) - 1)]
    ends = [" \\"] * (len(lines) - 1) + [""]
    return [f"{h:<9} {line}{end}" for h, line, end in zip(heads, lines, ends, strict=True)]


def _environment(plan: LaunchPlan) -> list[str]:
    lines = ["environment, set by saferun" if plan.env else "environment: nothing is set"]
    for name, setting in plan.env.items():
        value = "{…}" if name == "SAFERUN_INJECT" else shlex.quote(setting.value)
        lines.append(f"  {name}={value}    [{setting.origin}]")
        lines += _reason(setting)
    for name, setting in plan.kept.items():
        lines.append(
            f"  {name} stays as you exported it    [{setting.origin} has "
            f"{shlex.quote(setting.value)}]"
        )
    return lines


def _reason(setting: Setting) -> list[str]:
    return _indented(setting.why + (f" <{setting.source}>" if setting.source else ""))


def _indented(text: str) -> list[str]:
    return textwrap.wrap(
        text.strip(),
        WIDTH,
        initial_indent="      ",
        subsequent_indent="      ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _section(prefix: str, tree: Mapping[str, Any], notes: Mapping[str, Setting]) -> Iterator[str]:
    """Yield one line for each group of values, and below it the reasons for changed defaults."""
    yield prefix if tree else f"{prefix}: none"
    for label, keys in _groups(prefix, tree).items():
        text = ", ".join(f"{name} {_plain(value)}".strip() for name, value in keys.items())
        yield from _hang(label, text)
        for name in keys:
            key = ".".join(filter(None, (prefix, label, name)))
            note = notes.get(key)
            if note and note.value != str(KEYS[key].default):
                yield f"      {name or label} {note.value}    [{note.origin}]"
                yield from _reason(note)


def _groups(prefix: str, tree: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a section's values by output line: a line for each group, one for all others."""
    lines: dict[str, dict[str, Any]] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            lines[name] = dict(value)
        elif prefix == "hooks":
            lines[name] = {"": value}
        else:
            lines.setdefault("", {})[name] = value
    return lines


def _hang(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"  {label:<18} " if label else "  ",
        subsequent_indent=" " * 21 if label else "  ",
        break_on_hyphens=False,
    )


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_plain(v) for v in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value in (None, "") else str(value)
