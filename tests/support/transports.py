"""How logs travel: what collectors do to each line, and to a whole log."""

import json
import random
import re
from collections.abc import Callable, Sequence

TRANSPORTS: dict[str, Callable[[str], str]] = {
    "srun --label": lambda line: f"3: {line}",
    "torchrun --tee": lambda line: f"[train3]:{line}",
    "mpirun --tag-output": lambda line: f"[1,3]<stderr>:{line}",
    "docker logs --timestamps": lambda line: f"2025-05-01T10:00:00.123456789Z {line}",
    "kubectl logs --timestamps": lambda line: f"2025-05-01T10:00:00.123456789Z stderr F {line}",
    "torchx": lambda line: f"\x1b[32mi.pretrain/0\x1b[0m {line}",
    "docker compose": lambda line: f"trainer-1  | {line}",
    "journald": lambda line: f"May 01 10:00:00 node-7 train[812]: {line}",
    "ray": lambda line: f"\x1b[36m(main pid=812)\x1b[0m {line}",
    "a logger": lambda line: f"[2025-05-01 10:00:00,123][ERROR][launch.py:12] {line}",
    "a screen": lambda line: f"{line}\r",
    "docker's files": lambda line: json.dumps({"log": f"{line}\n", "stream": "stderr"}),
    "a JSON logger": lambda line: json.dumps({"ts": "10:00", "level": "error", "message": line}),
    "a collector": lambda line: json.dumps({"severity": "INFO", "textPayload": line, "ts": 1}),
    "a cluster's collector": lambda line: json.dumps(
        {"stream": "stderr", "log": line, "kubernetes": {"pod_name": "train-0"}}
    ),
}

TAIL_BYTES = 256 * 1024  # that saferun keeps of a stream
_RANKED = re.compile(r"\[rank(\d+)\]: ")
Printed = Sequence[tuple[str, str]]  # stream ("o" or "e") and text of each line, in order


def together(printed: Printed) -> list[str]:
    """Return the lines of both streams, as where both are one file."""
    return [text for _, text in printed]


def apart(printed: Printed) -> list[str]:
    """Return all of stdout, then all of stderr."""
    return [text for stream in "oe" for one, text in printed if one == stream]


def behind_much_output(printed: Printed) -> list[str]:
    """Return what is kept of the log below 300 KiB of other output: the first line is cut."""
    before = [f"the script's own output, line {number}" for number in range(10_000)]
    text = "\n".join([*before, *together(printed)])
    return text[-TAIL_BYTES:].split("\n")


def interleaved(printed: Printed) -> list[str]:
    """Return the lines of ranks that write at the same time; each rank's own keep their order."""
    lines = together(printed)
    places = [at for at, line in enumerate(lines) if _RANKED.match(line)]
    ranks: dict[str, list[str]] = {}
    for at in places:
        ranks.setdefault(lines[at].partition("]")[0], []).append(lines[at])
    chance = random.Random(len(lines))
    for at in places:
        rank = chance.choices(list(ranks), [len(left) for left in ranks.values()])[0]
        lines[at] = ranks[rank].pop(0)
    return lines


def one_task_a_rank(printed: Printed) -> list[str]:
    """Return the lines as `srun --label` shows them where each rank is a task of its own."""
    found = [(text, _RANKED.match(text)) for text in together(printed)]
    return [f"{ranked[1] if ranked else 0}: {text}" for text, ranked in found]


LOGS: dict[str, Callable[[Printed], list[str]]] = {
    "as it was printed": together,
    "stdout and stderr apart": apart,
    "stderr, and tee's stdout": lambda printed: apart([("oe"[s == "o"], t) for s, t in printed]),
    "the last 256 KiB": behind_much_output,
    "two ranks interleaved": interleaved,
    "srun --label, a task a rank": one_task_a_rank,
    **{
        name: lambda printed, each=each: [each(text) for text in together(printed)]
        for name, each in TRANSPORTS.items()
    },
}
