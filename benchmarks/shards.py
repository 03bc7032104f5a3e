"""False and missed alarms of `hooks.shards`, on programs of the shapes that people train with.

    python benchmarks/shards.py [--shape SHAPE ...] [--at-a-time 1] [--limit-s 3600]

Each program of tests/support/shard_programs.py and of shard_libraries.py is run on gloo with
`hooks.shards: warn` and all other hooks as they are from the start. An alarm is right where ranks
train on the same data by mistake, and names the loader's line. Prints the table in Markdown.
Programs that need a package which is not there are listed as not run. Exit status 1 where an answer
is neither right nor known.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import queue
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "support")]

from ranks import ForkServers, line_of  # noqa: E402 - where they lie is known only now
from shard_libraries import WITH_LIBRARIES  # noqa: E402 - as above
from shard_program import Program  # noqa: E402 - as above
from shard_programs import PROGRAMS  # noqa: E402 - as above

MARK = "# here"


class Judged(NamedTuple):
    """What came of a program."""

    text: str  # for people
    is_right: bool


def answer(forks: ForkServers, program: Program, folder: Path) -> Judged:
    """Run a program and judge what saferun said."""
    if program.needs and importlib.util.find_spec(program.needs) is None:
        return Judged(f"not run: no {program.needs}", is_right=True)
    folder.mkdir()
    job = forks.run(
        folder,
        program.text(),
        ranks=program.ranks,
        shards="warn",
        environ={"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"},
    )
    if job.code or job.out.count("done") != program.ranks:
        last = job.err.strip().splitlines()[-1:] or ["no output"]
        return Judged(f"did not finish: {last[0]}", is_right=False)
    alarms = job.messages("train on the same batches")
    others = [line for line in job.messages() if line not in alarms]
    if others:
        return Judged(f"said something else: {others[0]}", is_right=False)
    if not program.warns:
        return Judged("a false alarm" if alarms else "silent, rightly", is_right=not alarms)
    if not alarms:
        return Judged("missed", is_right=False)
    place = f":{line_of(program.text(), MARK)}: "
    named = len(alarms) == 1 and place in alarms[0]
    return Judged("found, with its line" if named else f"found: {alarms}", is_right=named)


def answers(
    programs: list[Program], at_a_time: int, limit_s: float
) -> Iterator[tuple[Program, Judged]]:
    """Run programs, some at a time; those for which there is no time left are not run."""
    until = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as work:
        servers: queue.Queue[ForkServers] = queue.Queue()
        for number in range(at_a_time):
            place = Path(work) / f"server{number}"
            place.mkdir()
            servers.put(ForkServers(place))

        def one(numbered: tuple[int, Program]) -> tuple[Program, Judged]:
            number, program = numbered
            if time.monotonic() > until:
                return program, Judged("not run: the time was over", is_right=True)
            forks = servers.get()
            try:
                return program, answer(forks, program, Path(work) / str(number))
            except Exception as error:
                return program, Judged(f"did not finish: {error}"[:200], is_right=False)
            finally:
                servers.put(forks)

        with ThreadPoolExecutor(at_a_time) as lanes:
            yield from lanes.map(one, enumerate(programs))
        while not servers.empty():
            servers.get().close()


def main() -> int:
    """Run the programs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", help="only programs whose shape has this in it")
    parser.add_argument("--at-a-time", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=3600.0)
    options = parser.parse_args()
    programs = [
        program
        for program in (*PROGRAMS, *WITH_LIBRARIES)
        if not options.shape or any(shape in program.shape for shape in options.shape)
    ]
    print("| shape | program | same data by mistake | shards: warn |")
    print("| --- | --- | --- | --- |")
    counts: collections.Counter[str] = collections.Counter()
    wrong = []
    for program, result in answers(programs, options.at_a_time, options.limit_s):
        text = result.text + f" ({program.known})" * (not result.is_right and bool(program.known))
        mistake = "yes" if program.warns else "no"
        cells = [program.shape, program.case, mistake, text.replace("|", "/")]
        print(f"| {' | '.join(cells)} |", flush=True)
        if not result.is_right and not program.known:
            wrong.append(program.case)
        counts[result.text.split(":")[0]] += 1
    print("\n" + ", ".join(f"{text}: {count}" for text, count in counts.most_common()))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
