"""What only logs from elsewhere hold, and exceptions that are not Python's."""

import pytest
from cases import check_cases
from job_logs import diagnose

from saferun.diagnosis.reading import cpp_exceptions, log_reader

CPP = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc"
LLVM = "libc++abi: terminating due to uncaught exception"
# A log, and of its exception: rows, type, the end of the text.
OF_CPP = {
    "C++": (CPP, ((1, 0), "std::bad_alloc", "what():  std::bad_alloc")),
    "C++ without its head": ("x\nwhat(): y", ((1,), "std::exception", "what(): y")),
    "C++ of LLVM": (f"{LLVM} of type E: y", ((0,), "E", f"{LLVM} of type E: y")),
}


@pytest.mark.parametrize("rank", [None, 3])
def test_an_exception_of_cpp_is_read(rank):
    def check(log, one):
        prefix = "" if rank is None else f"[rank{rank}]: "
        lines = log_reader.of_text("\n".join(prefix + row for row in log.split("\n"))).lines
        (found,) = cpp_exceptions.find(lines)
        rows, kind, text = one
        assert (found.at, found.rows, found.type) == (rows[0], rows, kind)
        assert (found.rank, found.background) == (rank, False)
        assert found.text.endswith(text)

    check_cases(OF_CPP, check)


OTHERS = {  # nothing is known of these languages and systems
    "Windows": "train.exe exited with code 3221225477\n",
    "Rust": "thread 'main' panicked at src/a.rs:3:5:\ncalled `Result::unwrap()` on an `Err`\n",
    "Go": "panic: runtime error: x\n\ngoroutine 1 [running]:\nmain.main()\n",
}


@pytest.mark.parametrize("log", OTHERS.values(), ids=OTHERS)
def test_other_languages_and_systems_are_unknown(log):
    assert diagnose(log, exit_code=1).kind == "unknown"
