"""Secrets are masked before anything is cut from a job's output, so that no part of one is kept."""

import re
from pathlib import Path

import pytest
from secret_shapes import SECRETS, R

from saferun.diagnosis import signatures
from saferun.diagnosis.attempt_outcome import AttemptOutcome, Decision
from saferun.diagnosis.deciding import classify
from saferun.diagnosis.deciding.retry_policy import AGAIN
from saferun.inject import cut
from saferun.journal.writer import Journal
from saferun.keeper import protocol
from saferun.supervise.attempt import evidence
from saferun.supervise.attempt.attempt_values import TAIL_BYTES
from saferun.supervise.attempt_end import AttemptEnd
from saferun.supervise.records import record
from saferun.system.redact import Masker

PLAIN = "correct-horse-battery-staple-of-the-run"  # no shape tells it: it is exported
TELLING = 10  # characters in a row of a secret, or of its letters, that nobody may see
KNOWN = signatures.load()


def parts(secret: str) -> set[str]:
    """Every part of a secret that would tell something, also where numbers were taken out."""
    folded = re.sub(r"[0-9]+", "N", secret)
    return {
        text[at : at + TELLING]
        for text in (secret, folded)
        for at in range(len(text) - TELLING + 1)
    }


HIDDEN = parts(R) | parts(R[::-1]) | parts(R.upper()) | parts(PLAIN) | parts("0123456789abcdef")


def leaks(text: str) -> list[str]:
    return [part for part in HIDDEN if part in text]


def ended(output: str) -> AttemptEnd:
    tail = output.encode()[-TAIL_BYTES:]
    report = protocol.Ended(1 << 8, 0, [], (tail, b""), merged=True)
    return AttemptEnd(report, 1.0, 2.0, forwarded=(), interrupted=False, ended_by="job")


def written(folder: Path, *outputs: str) -> str:
    """Return all that a run leaves on disk whose attempts ended with these outputs."""
    journal = Journal.begin(str(folder), "r", Masker({"MY_TOKEN": PLAIN}, []), say=pytest.fail)
    one = record.Record(journal)
    for number, output in enumerate(outputs, 1):
        over = one.clean(ended(output))
        diagnosis = classify.classify(evidence.evidence(over, None, number), KNOWN)
        fingerprint = classify.fingerprint(diagnosis)
        outcome = AttemptOutcome(
            number,
            1,
            diagnosis=diagnosis,
            fingerprint=fingerprint,
            decision=Decision(AGAIN, diagnosis.root_line),
        )
        one.ended(over, outcome)
        journal.tails(number, *over.report.tails)
    one.end(1, "")
    one.close()
    return "".join(
        path.read_text(errors="replace", encoding="utf-8")
        for path in (folder / "r").rglob("*")
        if path.is_file()
    )


ALL = [*SECRETS, PLAIN]
WHOLE_LINES = [one for one in SECRETS if one.startswith(("db.", R[:9]))]  # they are known as such


@pytest.mark.parametrize("secret", ALL, ids=range(len(ALL)))
def test_no_part_of_a_secret_is_left_wherever_the_text_is_cut(tmp_path, secret):
    """The text in front of it is of lengths at which something cuts the line."""
    first = "\n" if secret in WHOLE_LINES else ""
    told = [f"ValueError: {'word ' * n}{first}{secret}\n" for n in (0, 28, 36, 56, 96, 396)]
    text = written(tmp_path, *(f"Traceback (most recent call last):\n{one}" for one in told))
    assert text.count('"fingerprint"') == len(told)
    assert leaks(text) == []


def test_no_half_of_a_secret_is_left_where_a_tail_begins(tmp_path):
    lines = [secret.rpartition("\n")[2] for secret in ALL]
    rest = "\n" + "filling\n" * TAIL_BYTES
    outputs = [line[-len(line) // 2 :] + rest for line in lines[::15]]
    tails = [f"{one[: TAIL_BYTES - 1]}\n" for one in outputs]
    assert leaks(written(tmp_path, *tails)) == []


# A private key that has lost its first line, too, is known by its last one.
CUT = [one for one in SECRETS if not one.startswith(R[:9])]


@pytest.mark.parametrize("secret", CUT, ids=range(len(CUT)))
def test_no_half_of_a_secret_is_left_where_a_rank_cuts(secret):
    masked, most = Masker({}, []).text, 200
    for before in range(max(1, most - len(secret)), most, 3):
        filling = "x" * (before - 1)
        gap = "\n" if secret in WHOLE_LINES else " "
        assert leaks(masked(cut.beginning(f"{filling}{gap}{secret}", most))) == []
        assert leaks(masked(cut.end(f"{secret}\n{filling}", most))) == []
