"""Slots of a GPU for the workers of whole runs, with an NVML that says what it is told."""

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_nvml import gpu
from gpu_runs import Machine
from helpers import until
from runs import Run

HERE = (
    "import os, time\n"
    "seen, worker = os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ['SAFERUN_WORKER']\n"
    "print(worker, seen, flush=True)\n"
    "while not os.path.exists('go' + worker) and not os.path.exists('go'): time.sleep(0.01)\n"
)


class Gpus(Machine):
    """A machine whose GPUs have UUIDs of their own: locks are machine-wide."""

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(folder, SAFERUN_SET="")
        self.uuids = [f"GPU-{uuid.uuid4()}" for _ in range(count)]
        lines = [f"GPU {n}: NVIDIA Fake (UUID: {one})\n" for n, one in enumerate(self.uuids)]
        (self.smi.folder / "list").write_text("".join(lines), encoding="utf-8")
        self.reports(*({} for _ in self.uuids))

    def reports(self, *cards: dict) -> None:
        pairs = zip(self.uuids, cards, strict=True)
        self.nvml.reports(*(gpu(n, GetUUID=u, **one) for n, (u, one) in enumerate(pairs)))

    def run(self, workers: int, *settings: str, code: str = HERE, **environ: str):
        """Start saferun; each worker ends when there is a file go or go<worker>."""
        arguments = [f"--set={one}" for one in ("launcher=python", f"workers={workers}", *settings)]
        argv = ["--profile=cuda", *arguments, "-c", code]
        return self.start(*argv, **environ)

    def go(self, worker: object = "") -> None:
        (self.folder / f"go{worker}").touch()


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[Gpus]:
    machine = Gpus(tmp_path, 2)
    yield machine
    for place in ("/run/lock/saferun", "/tmp/saferun-lock"):
        for one in machine.uuids:
            for file in Path(place).glob(f"{one}.*"):
                file.unlink()


def arrivals(job: Run, count: int) -> dict[str, str]:
    """Return {worker: the GPUs that it sees} of the next that arrive."""
    lines = [job.process.stdout.readline().decode().split() for _ in range(count)]
    return dict(lines)


def one_gpu(gpus: Gpus) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": gpus.uuids[0]}


def test_each_worker_sees_one_gpu_the_least_loaded(gpus):
    with gpus.run(3, "locks.slots=2", "locks.gpus=refuse") as job:
        seen = arrivals(job, 3)
        gpus.go()
        assert job.end() == 0, job.err
        devices = {event["worker"]: event["gpu"] for event in job.events("worker")}
    first, second = (next(u for u in gpus.uuids if u.startswith(seen[w])) for w in "01")
    assert {first, second} == set(gpus.uuids)
    assert devices == {0: first, 1: second, 2: gpus.uuids[0]}


def test_what_a_scheduler_gave_is_divided_in_its_words_and_never_widened(gpus):
    with gpus.run(2, CUDA_VISIBLE_DEVICES="1,0") as job:
        assert sorted(arrivals(job, 2).values()) == ["0", "1"]
        gpus.go()
        assert job.end() == 0, job.err
    gpus.folder.joinpath("go").unlink()
    with gpus.run(2, "locks.slots=2", CUDA_VISIBLE_DEVICES="1") as job:
        assert arrivals(job, 2) == {"0": "1", "1": "1"}
        gpus.go()
        assert job.end() == 0, job.err
    gpus.folder.joinpath("go").unlink()
    last = gpus.uuids[1]
    with gpus.run(2, "locks.slots=2", f"env.CUDA_VISIBLE_DEVICES={last}") as job:
        assert arrivals(job, 2) == {"0": last, "1": last}
        gpus.go()
        assert job.end() == 0, job.err


@pytest.mark.parametrize(
    ("workers", "visible", "out"),
    [(1, {}, ["0", "None"]), (2, {"CUDA_VISIBLE_DEVICES": ""}, ["0", "1"])],
    ids=["one worker sees all", "no GPU needs no slot"],
)
def test_where_nothing_is_to_be_divided_nothing_is(gpus, workers, visible, out):
    gpus.go()
    with gpus.run(workers, "locks.gpus=refuse", **visible) as job:
        assert job.end() == 0, job.err
    until(lambda: sorted(job.out.split()) == out, job.out)


def test_the_worker_after_the_last_slot_waits_for_another_to_end(gpus):
    wait = ("locks.gpus=wait", "locks.wait_s=600", "locks.slots=2")
    with gpus.run(3, *wait, **one_gpu(gpus)) as job:
        assert set(arrivals(job, 2)) == {"0", "1"}
        gpus.go("0")
        assert set(arrivals(job, 1)) == {"2"}
        assert [event["worker"] for event in job.events("end")] == [0]
        gpus.go()
        assert job.end() == 0, job.err
    (line,) = [line for line in job.messages() if "slots" in line]
    assert "3 workers, and 2 slots (locks.slots: 2 on 1 GPU)" in line
    assert "worker 2 waits for a slot up to 10 min" in line


def test_slots_are_counted_across_runs(gpus, tmp_path):
    wait = ("locks.gpus=wait", "locks.wait_s=600", "locks.slots=2")
    other = Gpus.__new__(Gpus)
    other.__dict__.update(vars(gpus), folder=tmp_path / "other")
    other.folder.mkdir()
    with gpus.run(2, *wait, **one_gpu(gpus)) as first:
        arrivals(first, 2)
        with other.run(2, *wait, **one_gpu(gpus)) as second:
            second.wait_for_message("wait for a slot")
            assert f"pid {first.process.pid} of user".encode() in second._err_so_far
            gpus.go("1")
            assert len(arrivals(second, 1)) == 1
            gpus.go()
            assert len(arrivals(second, 1)) == 1
            other.go()
            assert (first.end(), second.end()) == (0, 0)


def test_a_run_that_cannot_have_all_its_slots_is_refused_whole(gpus):
    with gpus.run(3, "locks.gpus=refuse", "locks.slots=2", **one_gpu(gpus)) as job:
        assert job.end() == 75
        assert job.out == ""
        assert "3 workers, and 2 slots" in job.messages()[0]
        assert not list(job.home.glob(".local/state/saferun/runs/*"))
    with gpus.run(2, "locks.gpus=refuse", "locks.slots=2", **one_gpu(gpus)) as job:
        arrivals(job, 2)  # what was taken before the refusal is free
        gpus.go()
        assert job.end() == 0


def test_under_warn_workers_start_beside_each_other_and_one_line_says_so(gpus):
    with gpus.run(3, **one_gpu(gpus)) as job:
        assert set(arrivals(job, 3)) == {"0", "1", "2"}
        gpus.go()
        assert job.end() == 0
    assert len([line for line in job.messages() if "starting beside" in line]) == 1, job.messages()


def test_a_worker_that_waited_too_long_is_said_and_the_others_end_well(gpus):
    wait = ("locks.gpus=wait", "locks.wait_s=0.2", "locks.slots=1")
    with gpus.run(2, *wait, **one_gpu(gpus)) as job:
        arrivals(job, 1)
        job.wait_for_message("worker 1 was never started")
        gpus.go()
        assert job.end() == 75
        ended = {event.get("worker"): event["status"] for event in job.events("end")}
    assert ended[0] == 0
    assert ended[None] == 75


def test_a_signal_ends_the_wait_for_a_slot(gpus):
    wait = ("locks.gpus=wait", "locks.wait_s=600", "locks.slots=1")
    with gpus.run(2, *wait, **one_gpu(gpus)) as job:
        arrivals(job, 1)
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.end() == 143
        assert job.out == ""
        job.nothing_lives()


@pytest.mark.slow
def test_a_slot_is_given_only_with_its_memory_and_the_holder_is_named(gpus):
    need = ("locks.gpus=wait", "locks.wait_s=600", "locks.slots=3", "locks.slot_memory_gib=100")
    name = Path("/proc/self/comm").read_text(encoding="utf-8").strip()
    gpus.go()
    for workers in (1, 2):
        gpus.reports({"used": 70000, "holders": [os.getpid()]}, {})
        with gpus.run(workers, *need, **one_gpu(gpus)) as job:
            job.wait_for_message("waiting for" if workers == 1 else "wait for a slot")
            gpus.reports({}, {})
            assert job.end() == 0, job.err
        (line,) = [line for line in job.messages() if "GiB free" in line]
        assert "has 71.4 GiB free, and a slot needs 100 GiB (locks.slot_memory_gib)" in line
        assert f"pid {os.getpid()} of user " in line
        assert f"({name}, 68.4 GiB)" in line


def test_memory_of_slots_that_were_just_given_is_not_given_twice(gpus):
    need = ("locks.gpus=wait", "locks.wait_s=600", "locks.slots=9", "locks.slot_memory_gib=50")
    with gpus.run(3, *need, **one_gpu(gpus)) as job:
        first = arrivals(job, 2)
        job.wait_for_message("2 slots of 50 GiB each are held")
        gpus.go(min(first))
        assert len({**first, **arrivals(job, 1)}) == 3
        gpus.go()
        assert job.end() == 0


def test_unknown_memory_bounds_nothing_and_is_said_once(gpus):
    gpus.reports(*({"GetMemoryInfo_v2": "!3"} for _ in gpus.uuids))
    gpus.go()
    with gpus.run(2, "locks.slots=2", "locks.slot_memory_gib=50", **one_gpu(gpus)) as job:
        assert job.end() == 0
    assert len([line for line in job.messages() if "is not known" in line]) == 1
