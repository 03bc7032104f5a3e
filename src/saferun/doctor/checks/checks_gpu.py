"""The health of each GPU by NVML's answers, with one function for each check.

A check gets the GPU (`card`) and its name in findings (`area`).

The meaning of a field: https://docs.nvidia.com/deploy/nvidia-smi/index.html; memory errors and
rows: https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html; the recovery action and the
fabric: NVML, https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from saferun.base.durations import seconds
from saferun.doctor.vitals import Files
from saferun.gpu.nvml import Card, NvmlAnswer, watts
from saferun.knowledge import loader
from saferun.model import NOTE, OK, PROBLEM, Finding

MEMORY_DOC = "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html"
FABRIC_DOC = "https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/index.html"
HELD_SHARE = 0.1  # a job sized for the whole card does not fit if more is in use
HELD_MIB = 1024  # a context takes some 500 MiB, a desktop about the same
THROTTLED_S = 60  # seconds since the driver was loaded
_SLOWED = {  # reason, named as in `nvidia-smi -q` -> its meaning
    "HW Thermal Slowdown": "too hot: the hardware has lowered its clocks",
    "HW Power Brake Slowdown": "the power supply or the chassis has asked it to slow down",
    "HW Slowdown": "the hardware has at least halved its clocks (heat or power)",
    "SW Thermal Slowdown": "the driver has lowered its clocks: near its temperature limit",
}
_COUNTERS = {"HW Thermal Slowdown": "heat", "HW Power Braking": "power"}


def judge(nvml: NvmlAnswer, files: Files, mine: Iterable[str] = ()) -> list[Finding]:
    """Judge every GPU of the report.

    Args:
        nvml: the answers of NVML.
        files: the content of the driver's files.
        mine: UUIDs of the GPUs that the job will see; a problem of another GPU is a note. If empty,
            all GPUs count.

    Returns:
        The findings, in the order of the GPUs' numbers.
    """
    numbers = nvml.report.numbers()
    own = frozenset(mine)
    found: list[Finding] = []
    for card in nvml.report.cards:
        of_card = _of_card(card, numbers[card.bus], files)
        if own and card.fields.get("GPU UUID", "") not in own:
            of_card = [_not_mine(finding) for finding in of_card]
        found += of_card
    return found


def _of_card(card: Card, place: int, files: Files) -> list[Finding]:
    area = f"GPU {place}"
    found = [finding for check in CHECKS for finding in check(card, area)]
    found += fabric(card, area, files.manager)
    if any(finding.level != OK for finding in found):
        return found
    return [*found, Finding(OK, area, _summary(card))]


def _summary(card: Card) -> str:
    ecc = card.get("ECC Mode/Current")
    total = card.get("FB Memory Usage/Total")
    parts = [card.get("Product Name") or "unknown product", total and f"{total} MiB"]
    parts += ["ECC on, no error" if ecc == "Enabled" else "no error known"]
    return ", ".join(filter(None, parts)) + ", not throttled, free"


def _not_mine(finding: Finding) -> Finding:
    """Return a finding about another job's GPU; for this job a problem there is only a note."""
    if finding.level != PROBLEM:
        return finding
    return finding._replace(level=NOTE, what=f"{finding.what} (not visible to your job)")


def answering(card: Card, area: str) -> Iterator[Finding]:
    """Check for fields with an error instead of a value: the GPU has stopped answering."""
    sick = card.sick
    if sick:
        name = sick[0]
        what = f"does not answer: {name.replace('/', ', ')}: {card.fields[name]}"
        detail = f"{len(sick)} fields of the driver's report say so" if len(sick) > 1 else ""
        fix = "reboot; if it comes back, the GPU, its slot or its power is broken"
        yield Finding(PROBLEM, area, what, detail, fix)


def recovery(card: Card, area: str) -> Iterator[Finding]:
    """Check whether the driver requires a recovery before this GPU is used again."""
    action = card.get("GPU Recovery Action")  # since driver 565
    if card.get("GPU Reset Status/Reset Required") == "Yes":  # drivers 525 to 560
        action = "Reset"
    elif card.get("GPU Reset Status/Drain and Reset Recommended") == "Yes":
        action = "Drain and Reset"
    if action:
        known = loader.load("gpu_fields.yaml")["recovery"]
        fix = known.get(action.lower(), "do that before a job starts").format(n=area[4:])
        yield Finding(PROBLEM, area, f"the driver asks for: {action}", "", fix)


def healthy_by_driver(card: Card) -> bool:
    """Return whether the driver reports that no recovery is needed (driver 565 and newer)."""
    return card.fields.get("GPU Recovery Action") == "None"


def ecc(card: Card, area: str) -> Iterator[Finding]:
    """Check that ECC is on, and that there was no uncorrectable memory error."""
    mode, pending = card.get("ECC Mode/Current"), card.get("ECC Mode/Pending")
    if mode == "Disabled" and pending == "Disabled" and _has_ecc(card):
        fix = f"as root `nvidia-smi -i {area[4:]} -e 1`, then reboot (it takes some memory)"
        yield Finding(NOTE, area, "ECC is off: memory errors stay unseen", "", fix)
    if mode and pending and mode != pending:
        what = f"ECC is {mode.lower()}, and {pending.lower()} after the next reset or reboot"
        yield Finding(NOTE, area, what)
    since_load = _uncorrectable(card, "ECC Errors/Volatile/")
    if since_load:
        what = f"{sum(since_load.values())} uncorrectable memory errors since the driver's start"
        detail = f"{_listing(since_load)} <{MEMORY_DOC}>"
        if healthy_by_driver(card):
            yield Finding(NOTE, area, what, f"{detail}; the driver asks for no recovery")
        else:
            fix = loader.load("gpu_fields.yaml")["recovery"]["reset"].format(n=area[4:])
            yield Finding(PROBLEM, area, what, detail, f"{fix}; if it comes back: replace it")
    elif ever := _uncorrectable(card, "ECC Errors/Aggregate/"):
        what = f"{sum(ever.values())} uncorrectable memory errors in its life, none now"
        yield Finding(NOTE, area, what, _listing(ever))


def _has_ecc(card: Card) -> bool:
    """Return whether ECC is usual on this GPU; GeForce cards with ECC are sold with it off."""
    return "GeForce" not in card.get("Product Name")


def _uncorrectable(card: Card, start: str) -> dict[str, int]:
    """Return the counts above zero."""
    found: dict[str, int] = {}
    for name in card.fields:
        tail = name.removeprefix(start)
        if tail != name and "Uncorrectable" in tail and (count := card.number(name)):
            found[tail.replace("/", ", ")] = count
    return found


def _listing(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items())


def rows(card: Card, area: str) -> Iterator[Finding]:
    """Check for memory that was retired."""
    used = card.number("Remapped Rows/Uncorrectable Error") or 0
    pages = card.number("Retired Pages/Double Bit ECC") or 0
    if used or pages:
        what = f"{used or pages} bad {'rows' if used else 'pages'} of memory out of use"
        yield Finding(NOTE, area, what, f"it works; more of them is a bad sign <{MEMORY_DOC}>")


def fields(card: Card, area: str) -> Iterator[Finding]:
    """Check the fields whose values have a meaning by themselves (gpu_fields.yaml)."""
    known = loader.load("gpu_fields.yaml")
    reset = known["recovery"]["reset"].format(n=area[4:])
    for row in known["fields"]:
        for name in row["fields"]:
            value = card.get(name)
            if value.lower() in row["values"]:
                field = name.replace("/", ", ")
                detail = row.get("detail", "").format(
                    field=field, value=value, memory=known["memory"]
                )
                fix = row.get("fix", "").format(n=area[4:], reset=reset)
                yield Finding(row["level"], area, row["what"], detail, fix)


def throttling(card: Card, area: str) -> Iterator[Finding]:
    """Check whether clocks are lowered now, and for how long since the driver was loaded."""
    active = [reason for reason in _SLOWED if _is_active(card, reason)]
    if "HW Slowdown" in active and len(active) > 1:
        active.remove("HW Slowdown")  # its sub-reason is more specific
    for reason in active:
        level = NOTE if reason.startswith("SW") else PROBLEM
        fix = "check cooling, power and the power limit; all ranks wait for the slowest GPU"
        yield Finding(level, area, f"throttled: {_SLOWED[reason]}", _heat(card), fix)
    for name, why in _COUNTERS.items():
        throttled_s = (card.number(f"Clocks Event Reasons Counters/{name}") or 0) / 1e9
        if throttled_s > THROTTLED_S and not active:
            what = f"was throttled for {seconds(throttled_s)} ({why}) since the driver's start"
            yield Finding(NOTE, area, what)


def _is_active(card: Card, reason: str) -> bool:
    names = (f"Clocks Event Reasons/{above}{reason}" for above in ("", "HW Slowdown/"))
    return any(card.get(name) == "Active" for name in names)


def _heat(card: Card) -> str:
    heat = card.get("Temperature/GPU Current Temp")
    power = watts(card.number("GPU Power Readings/Instantaneous Power Draw"))
    limit = watts(card.number("GPU Power Readings/Current Power Limit"))
    parts = [heat and f"{heat} C", power and f"{power} of {limit}"]
    return ", ".join(filter(None, parts))


def holders(card: Card, area: str) -> Iterator[Finding]:
    """Check for memory that is already in use, and by which processes."""
    used = card.number("FB Memory Usage/Used")
    total = card.number("FB Memory Usage/Total")
    if used is None or not total or used < HELD_MIB:
        return
    known = [process for process in card.processes if process.used_mib]
    unseen = used - sum(process.used_mib or 0 for process in known)
    parts = [f"{p.name or 'a process'} (pid {p.pid}): {p.used_mib} MiB" for p in known]
    if unseen >= HELD_MIB and card.get("MIG Mode/Current") != "Enabled":
        parts.append(f"{unseen} MiB by no process that is visible here")
    level = PROBLEM if used >= HELD_SHARE * total else NOTE
    what = f"{used} of {total} MiB are taken already"
    fix = "end it, wait for it, or leave this GPU out with CUDA_VISIBLE_DEVICES"
    if not known:
        fix = "another container or user, or what a killed job left; end it, or take another GPU"
    yield Finding(level, area, what, "; ".join(parts), fix)


def pcie(card: Card, area: str) -> Iterator[Finding]:
    """Check that the slot uses all lanes (an idle GPU lowers the generation, but not the lanes)."""
    start = "PCI/GPU Link Info/Link Width/"
    now, most = card.number(f"{start}Current"), card.number(f"{start}Max")
    if now and most and now < most:
        what = f"PCI Express runs with {now} of {most} lanes"
        yield Finding(NOTE, area, what, "", "check the slot, the riser and the BIOS")


def persistence(card: Card, area: str) -> Iterator[Finding]:
    """Check persistence mode: without it the driver unloads an unused GPU's state."""
    if card.get("Persistence Mode") == "Disabled" and _has_ecc(card):
        what = "persistence mode is off: the first use after a pause takes seconds longer"
        yield Finding(NOTE, area, what, "", "as root `nvidia-smi -pm 1`")


def fabric(card: Card, area: str, manager: bool) -> Iterator[Finding]:
    """Check the NVLink fabric of NVSwitch systems: until it is set up, cuInit fails with 802.

    Args:
        card: the GPU.
        area: the GPU, as findings name it.
        manager: whether a process of NVIDIA's fabric manager is seen.
    """
    state, status = card.get("Fabric/State"), card.get("Fabric/Status")
    version = "its version must be the driver's, to the last digit"
    fix = f"`systemctl status nvidia-fabricmanager` on the host; {version} <{FABRIC_DOC}>"
    seen = "" if manager else "no nv-fabricmanager is seen running here"
    if state in ("Not Started", "In Progress"):
        what = f"the NVLink fabric is not ready ({state}): CUDA fails with error 802"
        yield Finding(PROBLEM, area, what, seen, fix)
    elif state == "Completed" and status not in ("", "Success"):
        yield Finding(PROBLEM, area, f"joined the NVLink fabric with: {status}", seen, fix)
    summary = card.get("Fabric/Health/Summary")
    if summary in ("Unhealthy", "Limited Capacity"):
        yield Finding(PROBLEM, area, f"NVLink fabric health: {summary}", seen, fix)


CHECKS: tuple[Callable[[Card, str], Iterator[Finding]], ...] = (
    answering,
    recovery,
    ecc,
    rows,
    fields,
    throttling,
    holders,
    pcie,
    persistence,
)
