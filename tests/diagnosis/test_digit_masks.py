"""Lines that are alike but for their digits are read together, and each as if it stood alone."""

from collections.abc import Callable

from cases import check_cases
from job_logs import diagnose

from saferun.diagnosis.reading import digit_masks, log_reader, progress

FORMS: dict[str, Callable[[int], str]] = {
    "torch's prefix": lambda n: f"[rank{n}]: step {n} loss {n}.5",
    "a time, srun and torch": lambda n: f"1{n}: 2025-05-0{n} 10:00:0{n} [rank{n}]: ok {n}",
    "a node's number and the job's": lambda n: f"[default{n}]:[rank{9 - n}]: ok",
    "a rank inside": lambda n: f"[E ProcessGroupNCCL.cpp:61{n}] [Rank {n}] watchdog",
    "an NCCL device": lambda n: f"node{n}:1{n}:2{n} [{n}] NCCL INFO ok",
    "a record": lambda n: f'{{"level": "error", "message": "KeyError: {n}", "rank": {n}}}',
    "no Latin letters": lambda n: f"[rank{n}]:损失 {n}.5 │",
}


def is_read_as_if_alone(line: Callable[[int], str]) -> None:
    lines = [line(number) for number in range(1, 9)]
    among = [(found.rank, found.text) for found in log_reader.of_text("\n".join(lines)).lines]
    alone = [(found.rank, found.text) for each in lines for found in log_reader.of_text(each).lines]
    assert among == alone
    assert len(set(among)) == len(lines)


def test_a_line_is_read_among_others_of_its_form_as_if_it_stood_alone():
    check_cases({name: (line,) for name, line in FORMS.items()}, is_read_as_if_alone)


def test_equal_forms_differ_in_digits_only():
    lines = log_reader.of_text("step 12 of 99\nstep 07 of 10\nstep 7 of 10").lines
    assert digit_masks.of(lines) == ["step 00 of 00", "step 00 of 00", "step 0 of 00"]
    assert digit_masks.of([]) == []


def test_each_exit_code_and_step_of_a_form_counts_for_itself():
    log = "".join(f"rank: {n} exitcode : {code}\n" for n, code in enumerate((0, 0, -9, 0)))
    assert diagnose(log).kind == "host-oom-killed"
    assert progress.last_step(b"step 12 a\nstep 14 a\nstep 13 a\n") == 14
