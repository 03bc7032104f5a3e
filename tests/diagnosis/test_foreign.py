"""What only logs from elsewhere hold, and a live run does not read."""

from __future__ import annotations

import pytest
from cases import check_cases
from job_logs import KNOWN, diagnose

from saferun.diagnosis.deciding import classify, exit_codes
from saferun.diagnosis.evidence import Evidence
from saferun.diagnosis.foreign import panics, windows_status
from saferun.diagnosis.reading import cpp_exceptions, log_reader

RUST = "thread 'main' panicked at {}src/a.rs:3:5:"
CPP = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc"
LLVM = "libc++abi: terminating due to uncaught exception"
JAVA = 'Exception in thread "{}" java.io.IOException: lost'
PANIC, TEXT = "panicked at src/a.rs:3:5: ", "panic: runtime error: x"
# A log, and of its exception: rows, type, the end of the text, whether it ends the process.
OF_CPP = {
    "C++": (CPP, ((1, 0), "std::bad_alloc", "what():  std::bad_alloc", True)),
    "C++ without its head": ("x\nwhat(): y", ((1,), "std::exception", "what(): y", True)),
}
OF_OTHERS = {
    "C++ of LLVM": (f"{LLVM} of type E: y", ((0,), "E", f"{LLVM} of type E: y", True)),
    "Rust": (RUST.format("") + "\n\nb", ((2,), "panic", PANIC + "b", True)),
    "an older Rust": (RUST.format("'b', ")[:-1] + "\nc", ((0,), "panic", PANIC + "b", True)),
    "Rust, cut": (RUST.format(""), ((0,), "panic", PANIC + RUST.format(""), True)),
    "Go": (f"{TEXT}\n\ngoroutine 1 [running]:", ((0,), "panic", TEXT, True)),
    "Java": (JAVA.format("main"), ((0,), "java.io.IOException", ": lost", True)),
    "Java, a thread": (JAVA.format("t-1"), ((0,), "java.io.IOException", ": lost", False)),
}


@pytest.mark.parametrize("rank", [None, 3])
def test_an_exception_of_another_language_is_read(rank):
    def check(log, one):
        prefix = "" if rank is None else f"[rank{rank}]: "
        lines = log_reader.of_text("\n".join(prefix + row for row in log.split("\n"))).lines
        (found,) = [*cpp_exceptions.find(lines), *panics.find(lines)]
        rows, kind, text, ends = one
        assert (found.at, found.rows, found.type) == (rows[0], rows, kind)
        assert (found.rank, found.background) == (rank, not ends)
        assert found.text.endswith(text)

    check_cases(OF_CPP | OF_OTHERS, check)


@pytest.mark.parametrize("log", ["panic: no\nbye", f"[rank1]: {TEXT}\n[rank2]: goroutine 1 [x]:"])
def test_a_word_of_panic_without_its_stack_is_none(log):
    assert panics.find(log_reader.of_text(log).lines) == []


STATUSES = [  # a line of a log, and the code that it states; None for none
    ("exited with code 3221225477", -11),
    ("exit code: -1073741819", -11),
    ("exit status 0xc000013a", -2),
    ("exit code 3221226091 (0xc00002eb)", None),
    ("Process returned -1073741819 (0xC0000005)", -11),
    ("Exception code: 0xc0000005", -11),
]


def test_a_status_of_windows_is_the_signal_that_linux_has():
    def check(line, code):
        lines = windows_status.named(log_reader.of_text(line).lines)
        assert [sign.code for sign in exit_codes.find(lines).signs] == ([code] if code else [])

    check_cases(STATUSES, check)


ONLY_ELSEWHERE = [  # a log, and its kind where another program has written it
    ("train.exe exited with code 3221225477\n", "segfault"),
    (f"{RUST.format('')}\ncalled `Result::unwrap()` on an `Err` value\n", "user-exception"),
    (f"{TEXT}\n\ngoroutine 1 [running]:\nmain.main()\n", "user-exception"),
]


@pytest.mark.parametrize(("log", "kind"), ONLY_ELSEWHERE, ids=["Windows", "Rust", "Go"])
def test_a_live_run_does_not_read_what_it_cannot_print(log, kind):
    assert diagnose(log, exit_code=1).kind == kind
    live = classify.classify(Evidence(log=log_reader.of_text(log), exit_code=1), KNOWN)
    assert live.kind == "unknown"
