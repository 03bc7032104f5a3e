"""Exceptions of other languages: their line, type and text, and whether they end the process."""

from __future__ import annotations

import pytest

from saferun.diagnosis.reading import foreign, log_reader

RUST = "thread 'main' panicked at {}src/a.rs:3:5:"
CPP = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc"
LLVM = "libc++abi: terminating due to uncaught exception"
JAVA = 'Exception in thread "{}" java.io.IOException: lost'
PANIC, TEXT = "panicked at src/a.rs:3:5: ", "panic: runtime error: x"
# A log, and of its exception: line, type, the end of the text, whether it ends the process, above.
THROWN = {
    "C++": (CPP, (1, "std::bad_alloc", "what():  std::bad_alloc", True, (0,))),
    "C++ without its head": ("x\nwhat(): y", (1, "std::exception", "what(): y", True, ())),
    "C++ of LLVM": (f"{LLVM} of type E: y", (0, "E", f"{LLVM} of type E: y", True, ())),
    "Rust": (RUST.format("") + "\n\nb", (2, "panic", PANIC + "b", True, ())),
    "an older Rust": (RUST.format("'b', ")[:-1] + "\nc", (0, "panic", PANIC + "b", True, ())),
    "Rust, cut": (RUST.format(""), (0, "panic", PANIC + RUST.format(""), True, ())),
    "Go": (f"{TEXT}\n\ngoroutine 1 [running]:", (0, "panic", TEXT, True, ())),
    "Java": (JAVA.format("main"), (0, "java.io.IOException", ": lost", True, ())),
    "Java, a thread": (JAVA.format("t-1"), (0, "java.io.IOException", ": lost", False, ())),
}


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize(("log", "one"), THROWN.values(), ids=THROWN)
def test_an_exception_of_another_language_is_read(log, one, rank):
    prefix = "" if rank is None else f"[rank{rank}]: "
    log = "\n".join(prefix + row for row in log.split("\n"))
    (found,) = foreign.find(log_reader.of_text(log).lines)
    at, kind, text, ends, rows = one
    assert (found.at, found.rank, found.type, found.ends, found.rows) == (
        at,
        rank,
        kind,
        ends,
        rows,
    )
    assert found.text.endswith(text)


@pytest.mark.parametrize("log", ["panic: no\nbye", f"[rank1]: {TEXT}\n[rank2]: goroutine 1 [x]:"])
def test_a_word_of_panic_without_its_stack_is_none(log):
    assert foreign.find(log_reader.of_text(log).lines) == []
