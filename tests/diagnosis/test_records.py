"""What a structured record of a log holds: its rank and its lines."""

import json

from cases import check_cases

from saferun.diagnosis.reading import records

ERROR = '{"level": "error", "msg": "KeyError: 1"}'
LINES = (None, ["KeyError: 1"])
FRAME = 'File "/w/a.py", line 3, in f'
MANY = [f"line {n}" for n in range(401)]
RECORDS = {
    "behind a prefix": ("x" * 200 + ERROR, LINES),
    "far behind other text": ("x" * 201 + ERROR, None),
    "nothing but a line with its level": (
        '{"level": "info", "msg": "step 3"}',
        (None, ["INFO: step 3"]),
    ),
    "a step's numbers": ('{"level": "info", "msg": "step 3", "loss": 2.5}', None),
    "a list of lines": (
        json.dumps({"message": [FRAME, 3, "KeyError: 1"]}),
        (None, [FRAME, "KeyError: 1"]),
    ),
    "a rank": ('{"msg": "KeyError: 1", "rank": 3}', (3, ["KeyError: 1"])),
    "a rank that is no number": ('{"msg": "KeyError: 1", "rank": "all"}', LINES),
    "cut, with its newlines and quotes escaped": (
        json.dumps(f"x\n{FRAME}\n  g()\nKeyError: 1\n")[1:-1],
        (None, ["x", FRAME, "  g()", "KeyError: 1", ""]),
    ),
    "the first and the last of many lines": (
        json.dumps({"error": "\n".join(MANY)}),
        (None, MANY[:200] + MANY[-200:]),
    ),
}


def holds(text: str, found: tuple[int | None, list[str]] | None) -> None:
    assert records.unpack(text) == found


def test_a_record_holds_its_rank_and_its_lines():
    check_cases(RECORDS, holds)
