"""Feeds what saferun reads with random and broken inputs: no crash, bounded work and memory.

    python tools/fuzz.py --seconds 600 [--first N] [--count N] [TARGET...]

The targets are the functions below. A number decides an input, so that a miss can be repeated.
Every tenth input is made four to sixteen times as long, and the lines of Python that are run are
counted: for twice the input three times as many at most, and none without end. The time inside of
patterns is tests/diagnosis/test_patterns.py's. Exit status 1 where something was found.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [
    str(ROOT / place) for place in ("src", "tests/support", "tests/lab", "tests/planning")
]

MEASURED = 10  # one input in so many
LINES_AT_LEAST = 20_000  # of Python; below that a ratio says nothing
LINES_A_BYTE, MOST_LINES = 400, 5_000_000  # beyond both it is taken for endless
RATIO = 3.0  # of twice the input: 2 is linear, 4 quadratic
MORE_MEMORY = 1 << 30  # bytes that all inputs together may add
TOKENS = [bytes([code]) for code in b"\n\r\0\xff{[\"':\x1b"]
TOKENS += [b"- ", b"&a ", b"*a ", b"!!x ", b"\x1b[", b"  ", b"9" * 30, b"-1", b"1e999", b"\\n"]
TOKENS += [b"\xed\xa0\x80", b"\xe2\x94\x82"]  # half of a character, the side of a box


class Target(NamedTuple):
    """What is fed, and how an input is made longer."""

    make: Callable[[random.Random], Any]
    run: Callable[[Any], None]
    longer: Callable[[Any, int], Any] | None = None


class EndlessError(Exception):
    """An input takes more lines of Python than any may."""


def mutated(pick: random.Random, seeds: list[bytes], most: int = 8) -> bytes:
    """Return lines of the seeds, cut, repeated and mixed with what is hostile."""
    rows = pick.choice(seeds).splitlines(keepends=True) or [b""]
    for _ in range(pick.randint(1, most)):
        at, way = pick.randrange(len(rows)), pick.randrange(7)
        other = (pick.choice(seeds).splitlines(keepends=True) or [b""])[:40]
        cut = pick.randint(0, len(rows[at]))
        if way == 0:
            rows[at] = rows[at][:cut] + pick.choice(TOKENS) + rows[at][cut:]
        elif way == 1:
            rows[at:at] = other
        elif way == 2:
            rows[at] = rows[at][:cut]
        elif way == 3:
            rows[at] = pick.choice(TOKENS + other) * pick.choice((2, 50, 3000))
        elif way == 4:
            rows[at] = pick.randbytes(pick.randint(0, 300))
        elif way == 5:
            rows = [*rows[at:], *rows[:at]]
        else:
            rows = rows[: at + 1]
    return b"".join(rows)[: 1 << 20]


def repeated(content: bytes, times: int) -> bytes:
    """Return the input so many times."""
    return content * times


# --- the targets -------------------------------------------------------------------------------


def grammar(place: Path) -> Target:
    """Command lines, against torchrun's own parser."""
    import test_argparse_agreement as agreement
    from torchrun_lines import RealParser

    real = RealParser({})
    strings = [string for option in agreement.OPTIONS for string in option.strings]
    words = [*agreement.NASTY, *strings, *strings, "t.py", "3", "--rdzv", "-mm", "-rh", "-tx"]
    check = agreement.test_any_arguments_are_read_or_refused_as_torchrun_does.hypothesis.inner_test

    def make(pick: random.Random) -> list[str]:
        line = [pick.choice(words) for _ in range(pick.randint(0, 9))]
        if line and not pick.randrange(3):
            at = pick.randrange(len(line))
            line[at] = line[at][: pick.randint(0, 9)] + pick.choice(("=", "-", "x", "ß", "1", " "))
        return line

    return Target(make, lambda argv: check(argv, real))


def profile(place: Path) -> Target:
    """Profiles' bytes: a profile, or errors with a place."""
    from saferun.errors import ProfileError
    from saferun.profile import files, yaml_reader

    seeds = [path.read_bytes() for path in sorted((ROOT / "profiles").glob("*.yaml"))]
    path = place / "p.yaml"

    def run(content: bytes) -> None:
        path.write_bytes(content)
        try:
            text = files.read(str(path), "p.yaml")
        except ProfileError:
            return
        doc, errors = yaml_reader.check(text, "p.yaml")
        assert (doc is None) == bool(errors)
        assert all(error.where for error in errors)

    return Target(lambda pick: mutated(pick, seeds), run, repeated)


def diagnosis(place: Path) -> Target:
    """Logs: a verdict, an account of it, and a line that is not too long."""
    import job_logs

    from saferun.diagnosis import signatures
    from saferun.diagnosis.deciding import classify, root_line
    from saferun.diagnosis.evidence import Evidence
    from saferun.diagnosis.explaining import explain
    from saferun.diagnosis.foreign import long_log

    seeds = [path.read_bytes() for path in sorted((ROOT / "tests/records").rglob("*.log"))]
    for name in ("kinds", "wordings", "reading", "beside"):
        seeds += [str(row["log"]).encode() for row in job_logs.table(name) if row.get("log")]

    def run(content: bytes) -> None:
        code = (None, 0, 1, 2, 137, -9)[(content or b"0")[0] % 6]
        evidence = Evidence(log=long_log.read([content]), exit_code=code)
        found = classify.classify(evidence, job_logs.KNOWN)
        assert found.verdict in signatures.VERDICTS
        assert len(found.root_line) <= root_line.ROOT_CHARS
        account = explain.account(classify.read(evidence, job_logs.KNOWN), job_logs.KNOWN)
        json.dumps(explain.as_document(account))

    return Target(lambda pick: mutated(pick, seeds), run, repeated)


def keeper(place: Path) -> Target:
    """Messages in any pieces, the last one cut: those that are whole arrive as they were."""
    from saferun.keeper import protocol

    def value(pick: random.Random, kind: str) -> Any:
        text = "".join(chr(pick.choice((0, 10, 97, 0xDCFF, 0x1F600))) for _ in range(9))
        number = pick.choice((0, 1, -1, 1 << 40))
        made = {"int": number, "bool": True, "float": 0.5, "str": text, "bytes": os.urandom(99)}
        made |= {"list[str]": [text] * number if number < 2 else [], "dict[str, str]": {text: text}}
        return None if "None" in kind and number else made.get(kind.split(" | ")[0], [number])

    def make(pick: random.Random) -> list[Any]:
        kinds = pick.choices(list(protocol._TYPES.values()), k=pick.randint(1, 9))
        return [
            kind(*(value(pick, of) for of in kind.__annotations__.values()))  # type: ignore[attr-defined]
            for kind in kinds
        ]

    def run(messages: list[Any]) -> None:
        reading, writing = os.pipe()
        for message in messages:
            protocol.send(writing, message)
        os.close(writing)
        data = os.read(reading, 1 << 16)
        os.close(reading)
        received, sent = [], len(data) - len(data) % 7
        ours, theirs = os.pipe()
        inbox = protocol.Inbox(ours)
        for at in range(0, sent, 997):
            os.write(theirs, data[at : min(at + 997, sent)])
            received += inbox.read()
        os.close(theirs)
        assert inbox.first() is None
        os.close(ours)
        assert received == messages[: len(received)]
        assert len(received) == len(messages) or sent < len(data)

    return Target(make, run)


def journal(place: Path) -> Target:
    """A run's events and plan: listed and shown, without a control character."""
    import user_machine

    from saferun.cli.runs import runs_view
    from saferun.journal import reader

    facts = {"attempt": 1, "action": "again", "kind": "x", "status": 1, "mitigations": ["a"]}
    facts |= {"by": {"pid": 1}, "signals": [15], "fingerprint": "k", "lived_s": 1.5, "worker": 0}
    names = (
        "attempt",
        "started",
        "ended",
        "plan",
        "end",
        "fault",
        "workers",
        "recycled",
        "hang",
        "loss",
    )
    rows = [json.dumps(user_machine.event(name, **facts)).encode() + b"\n" for name in names]
    plan = json.dumps({"script": "t.py", "env": {"A": {"value": "1"}}, "hooks": {"order": "on"}})
    seeds = [b"".join(rows), rows[0] + rows[2] + rows[4], plan.encode()]
    run_path = place / "run"
    run_path.mkdir()

    def run(content: bytes) -> None:
        (run_path / "events.jsonl").write_bytes(content)
        (run_path / "plan.json").write_bytes(content if len(content) % 2 else plan.encode())
        found, _ = reader.find(str(place), user_machine.NOW)
        shown = user_machine.whole_page(place) + runs_view.table(found, user_machine.NOW)
        assert all(char.isprintable() or char == "\n" for char in shown)
        shown.encode()

    return Target(lambda pick: mutated(pick, seeds), run, repeated)


FRAME = {"name": "step", "filename": "/w/t.py", "line": 3}
ODD: list[Any] = [
    None,
    -1,
    0,
    1,
    2,
    3,
    1 << 40,
    10**5000,
    0.5,
    True,
    "",
    "x",
    "\ud800",
    [],
    [[4]],
    {},
]


def nested(pick: random.Random) -> Any:
    """Return lists in lists."""
    value: Any = pick.choice(ODD)
    way, depth = pick.randrange(3), pick.choice((1, 5, 60, 3000))
    for _ in range(depth):
        value = [value] if way else [value] * (2 if depth < 99 else 1)
    return value


def entry(pick: random.Random, number: int) -> dict[str, Any]:
    """Return one collective, now and then with an odd field."""
    made = {"process_group": ("0", "default_pg"), "collective_seq_id": number}
    made |= {"profiling_name": "nccl:all_reduce", "input_sizes": [[4]], "frames": [FRAME]}
    made["state"] = pick.choice(("scheduled", "started", "completed"))
    if not pick.randrange(6):
        made[pick.choice(list(made))] = pick.choice((pick.choice(ODD), nested(pick)))
    return made


def dump(pick: random.Random) -> bytes:
    """Return a rank's dump."""
    numbers = sorted(pick.sample(range(1, 9), pick.randint(0, 5)))
    entries = [entry(pick, number) for number in numbers]
    try:
        return pickle.dumps({"entries": entries}, protocol=2)
    except RecursionError:
        return b"(" * 9999


def flight(place: Path) -> Target:
    """Dumps of the flight recorder: two ranks' are read and compared."""
    from saferun.diagnosis import flight_record

    def make(pick: random.Random) -> list[bytes]:
        dumps = [dump(pick) for _ in range(pick.randint(1, 3))]
        return [mutated(pick, dumps, 2) if not pick.randrange(4) else one for one in dumps]

    def run(dumps: list[bytes]) -> None:
        read = {rank: flight_record.read(content) for rank, content in enumerate(dumps)}
        found = flight_record.compare({rank: calls for rank, calls in read.items() if calls})
        if found is not None:
            flight_record.cause(found)

    return Target(make, run)


TARGETS = {make.__name__: make for make in (grammar, profile, diagnosis, keeper, journal, flight)}


# --- what is judged ----------------------------------------------------------------------------


def lines_of(run: Callable[[Any], None], given: Any, size: int) -> int:
    """Return how many lines of Python an input takes.

    Raises:
        EndlessError: they are more than an input of this size may take.
    """
    count, most = 0, MOST_LINES + LINES_A_BYTE * size

    def traced(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        if count > most:
            raise EndlessError(f"more than {most} lines of Python for {size} bytes")
        return traced

    sys.settrace(traced)
    try:
        run(given)
    finally:
        sys.settrace(None)
    return count


def ratio(target: Target, given: Any) -> float:
    """Return how many times the lines grow where an input of four times the length is doubled.

    It is doubled twice, and the smaller growth counts: a longer input may be read in another way.
    """
    if target.longer is None or not 0 < len(given) < 1 << 14:
        lines_of(target.run, given, 0)
        return 0.0
    longer = (target.longer(given, times) for times in (4, 8, 16))
    once, twice, again = (lines_of(target.run, one, len(one)) for one in longer)
    return min(twice / once, again / twice) if once > LINES_AT_LEAST else 0.0


class Found(NamedTuple):
    """What came of the inputs of one target."""

    inputs: int
    steepest: float
    misses: list[str]


def tried(name: str, target: Target, numbers: range, end: float) -> Found:
    """Feed a target until the time is over."""
    steepest, misses, done = 0.0, [], 0
    for number in numbers:
        if time.monotonic() > end:
            break
        given = target.make(random.Random(f"{name} {number}"))  # noqa: S311 (to be repeated)
        done += 1
        try:
            target.run(given) if number % MEASURED else None
            grown = 0.0 if number % MEASURED else ratio(target, given)
            steepest = max(steepest, grown)
            assert grown <= RATIO, f"{grown:.1f} times the lines for twice the input"
        except Exception:
            shown = "".join(traceback.format_exc().splitlines(keepends=True)[-6:])
            misses.append(f"{name} --first {number} --count 1: {given!r:.300}\n{shown}")
            if len(misses) == 5:
                break
    return Found(done, steepest, misses)


def main() -> int:
    """Feed the targets in turn; return 1 where something was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="all by default")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--first", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--count", type=int, default=1 << 40)
    options = parser.parse_args()
    names = options.targets or list(TARGETS)
    numbers, bad = range(options.first, options.first + options.count), 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        made = {name: TARGETS[name](Path(place)) for name in names}
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MORE_MEMORY, held + MORE_MEMORY))
        print(f"| from {options.first} | inputs | steepest growth | found |")
        print("| --- | --- | --- | --- |")
        for name, target in made.items():
            end = time.monotonic() + options.seconds / len(made)
            found = tried(name, target, numbers, end)
            print(f"| {name} | {found.inputs} | {found.steepest:.1f} | {len(found.misses)} |")
            print("\n".join(found.misses), file=sys.stderr, flush=True)
            bad += len(found.misses)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
