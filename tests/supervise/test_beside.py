"""What works beside an attempt has its own times, and a fault in it harms nothing else."""

from saferun.diagnosis.evidence import Hang
from saferun.supervise import beside
from saferun.supervise.beside import NEVER_S, Beside, Looks


class Part(Beside):
    """A part that looks every `every_s`, and fails or finds a cause in the looks that say so."""

    def __init__(self, every_s: float = NEVER_S, *, fails=(), causes=(), again_s=NEVER_S) -> None:
        self.every_s, self.fails, self.causes, self.again_s = every_s, fails, causes, again_s
        self.looks: list[float] = []
        self.ends = 0

    def look(self) -> float:
        self.looks.append(beside.time.monotonic())
        if len(self.looks) in self.fails:
            raise RuntimeError("refused by the test")
        if len(self.looks) in self.causes:
            self.cause = Hang("hang", None, "nobody moves")
        return self.every_s

    def asked(self) -> bool:
        return bool(self.causes)

    def ended(self, ended) -> None:
        self.ends += 1
        if self.fails:
            raise RuntimeError("refused by the test")


class Clock:
    """A clock that goes on when somebody waits."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.faults = 1000.0, []
        monkeypatch.setattr(beside, "time", self)

    def monotonic(self) -> float:
        return self.now

    def looks(self, *parts: Part, until_s: float = 10.0) -> Looks:
        looks = Looks(self.faults.append)
        looks.add(*parts)
        while self.now < 1000.0 + until_s and not looks.cause:
            self.now += looks.look()
        return looks


def test_each_part_looks_at_its_own_times(monkeypatch):
    often, seldom, once = Part(2.0), Part(5.0), Part()
    Clock(monkeypatch).looks(often, seldom, once)
    assert often.looks == [1000.0, 1002.0, 1004.0, 1006.0, 1008.0]
    assert seldom.looks == [1000.0, 1005.0]
    assert once.looks == [1000.0]


def test_a_part_that_fails_looks_again_only_when_it_may_and_the_others_go_on(monkeypatch):
    clock = Clock(monkeypatch)
    gone, back, whole = Part(1.0, fails=(2,)), Part(1.0, fails=(2,), again_s=4.0), Part(5.0)
    looks = clock.looks(gone, back, whole)
    assert gone.looks == [1000.0, 1001.0]
    assert back.looks == [1000.0, 1001.0, 1005.0, 1006.0, 1007.0, 1008.0, 1009.0]
    assert whole.looks == [1000.0, 1005.0]
    looks.ended(None)
    assert (gone.ends, back.ends, whole.ends) == (1, 1, 1)
    assert len(clock.faults) == 4


def test_after_a_cause_nobody_else_looks_and_who_is_asked_looks_at_once(monkeypatch):
    clock = Clock(monkeypatch)
    finds, other = Part(8.0, causes=(2,)), Part(8.0)
    looks = Looks(clock.faults.append)
    looks.add(finds, other)
    assert looks.look() == 8.0
    clock.now += 1.0
    looks.asked()
    looks.look()
    assert finds.looks == [1000.0, 1001.0]
    assert looks.cause == Hang("hang", None, "nobody moves")
    clock.now += 7.0
    finds.causes = (3,)
    looks.asked()
    looks.look()
    assert other.looks == [1000.0], "the attempt ends"
