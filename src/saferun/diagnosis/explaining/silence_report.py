"""Pure: a job that may hang, in words: who waits for whom, and where each rank is."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.diagnosis.evidence import Hang
from saferun.diagnosis.places import Place


def waiting(found: Sequence[Place], silent: str, call: str = "", elsewhere: str = "") -> str:
    """Return who waits for whom, as a line for people; "" if unknown.

    Args:
        found: the result of `places`.
        silent: the length of the silence, for people.
        call: the collective in which the others wait, by torch's own record; "" if unknown.
        elsewhere: a clause about a rank on another machine for which all of these ranks wait.
    """
    odd = [place for place in found if place.odd]
    others = [place for place in found if not place.odd]
    if not others or not (call or all(place.collective for place in others)):
        return ""
    name = call or next((place.call for place in others if place.call), "a collective")
    wait = f"{len(others)} ranks wait" if len(others) > 1 else f"rank {others[0].rank} waits"
    if not odd:
        return f"{elsewhere}; {wait} here in {name} ({silent})" if elsewhere else ""
    first, several = odd[0], len(odd) > 1
    where = f"is at {first.frame}" if first.frame else first.what
    more = f" and {len(odd) - 1} more ranks like it" if several else ""
    them = "them" if several else "it"
    return f"rank {first.rank} {where}{more}, {wait} for {them} in {name} ({silent})"


def cause(found: Sequence[Place], recorded: Hang | None = None) -> Hang:
    """Return why a hanging attempt is ended: ranks in different collectives, or one elsewhere.

    Args:
        found: the result of `places`.
        recorded: the hang according to torch's own record.
    """
    frames = {place.frame for place in found}
    if recorded is not None and recorded.kind != "hang":
        return recorded
    if len(frames) > 1 and all(place.collective for place in found):
        lines = "; ".join(f"rank {place.rank} at {place.frame}" for place in found[:4])
        odd = next((place.rank for place in found if place.odd), None)
        return Hang("collective-mismatch", odd, lines)
    first = next((place for place in found if place.odd), found[0])
    at = f" at {first.frame}" if first.frame else ""
    parts = [f"{first.what}{at}", *first.helpers[:1], *([recorded.line] if recorded else [])]
    return Hang("hang", first.rank if first.odd else None, "; ".join(parts))


def report(
    found: Sequence[Place], silent: str, recorded: Hang | None = None, *, most: int = 12
) -> list[str]:
    """Return lines on a job that may hang; ranks that are not where the others are come first.

    Args:
        found: the result of `places`.
        silent: the length of the silence, for people; "" if a person asked for the report.
        recorded: the hang according to torch's own record.
        most: largest number of ranks to show.
    """
    lines = ["where the ranks are:"]
    if silent:
        lines = [f"no output and no input or output of any rank for {silent}: the job may hang"]
    for shown, place in enumerate(sorted(found, key=lambda place: not place.odd)):
        if len(lines) > most - bool(recorded):
            lines.append(f"  and {len(found) - shown} more")
            break
        name = "the job" if place.rank is None else f"rank {place.rank}"
        at = f", at {place.frame}" if place.frame else ""
        mark = "  <- not where the others are" if place.odd else ""
        lines.append(f"  {name} (pid {place.pid}) {place.what}{at}{mark}")
        lines += [f"    {helper}" for helper in place.helpers[:1] if place.odd]
    if recorded is not None:
        lines.append(f"  torch's flight recorder: {recorded.line}")
    return lines
