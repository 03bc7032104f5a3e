"""GPU locks and slots: they keep runs apart on a GPU, and name who else is on it.

A lock is a flock(2) on an empty file that all users share, so util-linux `flock` and the `filelock`
package take part, and the kernel frees what a dead process held. That package is not used here,
after reading 4.2: it has no shared flock(2) (a MIG slice needs one on its parent), falls back to a
lock of another kind where flock(2) is missing, cannot open below a directory that was checked,
and truncates the file in its older releases (its #591).

The protocol, for whoever else takes part (open without O_CREAT first: fs.protected_regular):

- `admission`: exclusive for the milliseconds in which one run looks around and takes its locks, so
  that of two that start together exactly one is first. After 5 s it is skipped.
- `<uuid>.lock`: exclusive for a run that wants the GPU alone, shared for one that shares it or one
  of its slices. A run that was warned takes it if it can. `flock <uuid>.lock COMMAND` takes part.
- `<uuid>.slot<k>`: exclusive; every run holds the lowest free one, so the slots that are held count
  the runs, those included that were warned and started all the same.
- `<uuid>.slices`: shared, for the runs on MIG slices of that GPU.
- `holder.<uid>.<pid>.<random>.json`: says who holds. Its owner is proof of the user; the process
  must live, have begun when the record says and belong to that user. Where it has ended and its
  lock is still held, its children are named. Anything else is ignored.

Several GPUs are taken all or none, never one while waiting for another: no deadlock, but a run that
waits for many GPUs can be overtaken by runs that need few.

Scope: one mount namespace (containers with a /run/lock of their own do not see each other), one
host. The directory may belong to any user if it is 1777: the first one makes it. A hostile owner
can make locks useless, and so can whoever takes a lock; neither can do more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

from saferun.errors import BusyError
from saferun.gpu.device_names import VARIABLE, Ancestor, Device, device_name, to_lock
from saferun.gpu.device_names import ancestors as ancestors_in
from saferun.gpu.lock.lock_claim import Claim, slots_of
from saferun.gpu.lock.lock_dir import BlockedError, LockDirectory, UnusableError
from saferun.gpu.lock.lock_owner import Holder, unlink, write
from saferun.gpu.lock.slot_memory import SlotMemory
from saferun.model import LockPolicy
from saferun.named_tuple import NamedTuple
from saferun.system import procfs

GATE_LOOK_S = 0.002  # between two tries: who holds it needs a millisecond
GATE_S = 5.0  # the most seconds that `admission` is waited for: a loaded machine is slow
_MUST_HOLD = ("refuse", "wait")  # policies under which no run starts without its locks
POLL_S = (0.05, 1.0)  # first and longest pause between two looks of a run that waits


class LockRequest(NamedTuple):
    """What a run wants to lock, and how."""

    uuids: Sequence[str]  # of GPUs and MIG slices; "" is a GPU without one, which cannot be locked
    policy: LockPolicy  # the profile's `locks`
    owner: Holder  # whom the record names; see lock_owner.this_process
    parents: Mapping[str, str] = {}  # the GPU of each slice; the old form of a slice's name has it
    directory: str | None = None  # where locks lie; None: the machine's directory
    numbers: Mapping[str, int] = {}  # the index of each GPU, for messages


class World(NamedTuple):
    """The outside of a run that locks; tests have another."""

    say: Callable[[str], None]  # takes one line for people
    clock: Callable[[], float] = time.monotonic  # s
    sleep: Callable[[float], None] = time.sleep  # takes seconds
    memory: SlotMemory | None = None  # None: made for this request, where slots need memory


class _Attempt(NamedTuple):
    """What one attempt to lock needs."""

    place: LockDirectory
    wanted: tuple[Device, ...]
    policy: LockPolicy
    owner: Holder
    world: World
    memory: SlotMemory | None
    shown: Mapping[str, str]  # the name of each device in messages


def acquire(request: LockRequest, environ: Mapping[str, str], world: World) -> Held:
    """Take the GPUs as the policy says, and return what is held until it is closed.

    Args:
        request: the GPUs and the policy.
        environ: for SAFERUN_LOCKS, what an ancestor holds, and TMPDIR.
        world: takes messages, tells the time and waits.

    Raises:
        BusyError: `refuse` or `wait`, and another run has a GPU, or somebody has put something in
            a lock file's place that cannot be locked, or a GPU has no UUID. Any other trouble with
            the files is no error: it costs one line, and the run goes on without locks.
    """
    ancestors, policy = tuple(ancestors_in(environ.get(VARIABLE, ""))), request.policy
    if policy.gpus == "off":
        return Held(ancestors, "locks.gpus: off")
    if "" in request.uuids:
        if policy.gpus in _MUST_HOLD:
            raise _blocked("a GPU has no UUID", policy, "look at it with `nvidia-smi -L`")
        world.say("a GPU without a UUID is not locked; other runs will not see this one on it")
    held_above = {name for ancestor in ancestors for name in ancestor.devices}
    wanted = to_lock(request.uuids, request.parents, held_above)
    if not wanted:
        return Held(ancestors, "an ancestor holds the GPUs" if ancestors else "no GPU to lock")
    try:
        place = LockDirectory.find(request.directory, environ)
        memory = world.memory or slot_memory(policy, environ, world)
        shown = {device_name(uuid): _shown(uuid, n) for uuid, n in request.numbers.items()}
        held = _enter(_Attempt(place, wanted, policy, request.owner, world, memory, shown))
    except (UnusableError, OSError) as trouble:
        if isinstance(trouble, BlockedError) and policy.gpus in _MUST_HOLD:
            raise _blocked(trouble, policy, "have its owner or root remove that file") from None
        world.say(f"GPU locks are off for this run, others will not see it: {trouble}")
        return Held(ancestors, f"locks are off: {trouble}")
    held.ancestors = ancestors
    return held


def slot_memory(policy: LockPolicy, environ: Mapping[str, str], world: World) -> SlotMemory | None:
    """Return what knows the GPUs' free memory; None where slots need none.

    Args:
        policy: the profile's `locks`.
        environ: PATH finds nvidia-smi.
        world: takes messages and tells the time.
    """
    if policy.slot_memory_gib is None:
        return None

    return SlotMemory(policy.slot_memory_gib, environ, world.say, world.clock)


def load(uuids: Sequence[str], environ: Mapping[str, str]) -> dict[str, int]:
    """Return how many runs and workers are on each GPU; none where locks cannot be read.

    Args:
        uuids: of the GPUs.
        environ: for TMPDIR.
    """
    try:
        place = LockDirectory.find(None, environ)
    except (UnusableError, OSError):
        return dict.fromkeys(uuids, 0)
    try:
        names = place.names()
        slots = {uuid: slots_of(device_name(uuid), names) for uuid in uuids}
        return {u: sum(place.is_held(s, shared=True) for s in slots[u]) for u in uuids}
    finally:
        place.close()


class Held:
    """What a run holds. `close` gives it back; so does the kernel when its last process ends."""

    def __init__(self, ancestors: Sequence[Ancestor], text: str) -> None:
        self.ancestors = tuple(ancestors)
        self._text = text
        self._pid = os.getpid()
        self._claim: Claim | None = None
        self._place: LockDirectory | None = None
        self._record = ""
        self.beside: tuple[str, ...] = ()  # who else is on these GPUs, for the journal

    def hold(self, place: LockDirectory, claim: Claim, record: str) -> None:
        """Take over an open directory, the descriptors of a claim and its record.

        Args:
            place: the directory of locks.
            claim: the locks that were taken.
            record: the file name of our record in it.
        """
        self._place, self._claim, self._record = place, claim, record

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(self) -> str:
        """Return one clause on what is held and where, or why nothing is."""
        return self._text

    def environ(self) -> dict[str, str]:
        """Return what a nested run must find in its environment; empty where nothing is held."""
        mine = tuple(device.name for device in self._claim.devices) if self._claim else ()
        entries = list(self.ancestors)
        if mine:
            entries.append(Ancestor(self._pid, procfs.start(self._pid), mine))
        return {VARIABLE: ";".join(entry.text() for entry in entries)} if entries else {}

    def alone(self) -> bool:
        """Say whether these GPUs are locked for us alone and no other run is on them now.

        What may disturb another run, a GPU's reset above all, needs a yes. It holds for the
        moment: under `warn` the next run starts beside us. Slices and slots share their GPU, and
        what an ancestor holds is the ancestor's to judge.
        """
        claim, place = self._claim, self._place
        if claim is None or place is None or self.ancestors:
            return False
        if claim.slots > 1 or claim.clashes or any(device.parent for device in claim.devices):
            return False
        names = place.names() - set(claim.files)
        slots = [slot for device in claim.devices for slot in slots_of(device.name, names)]
        return not any(place.is_held(slot, shared=True) for slot in slots)

    def descriptors(self) -> tuple[int, ...]:
        """Return the lock files' descriptors, for a child that shall hold the GPUs with us."""
        return tuple(self._claim.files.values()) if self._claim else ()

    def inheritable(self) -> tuple[int, ...]:
        """Keep the locks over an exec of this process; return the descriptors."""
        for descriptor in self.descriptors():
            os.set_inheritable(descriptor, True)
        return self.descriptors()

    def hand_over(self) -> None:
        """Leave the locks to a child that was forked with them; the record stays until `close`."""
        if self._claim:
            self._claim.close()

    def close(self) -> None:
        """Give everything back; a second call does nothing.

        Descriptors are closed, never unlocked: an unlock would also take the lock from a child
        that inherited it and may still be on the GPU. In a forked child the record stays.
        """
        claim, place, self._claim, self._place = self._claim, self._place, None, None
        if place and self._record and os.getpid() == self._pid:
            unlink(place, self._record)
        if claim:
            claim.close()
            self._text = "given back"
        if place:
            place.close()


# Messages (pure)


def _shown(uuid: str, number: int) -> str:
    """Return a GPU as people know it.

    >>> _shown("GPU-c4a0ffff-1234-5678", 0)
    'GPU 0 (GPU-c4a0ffff…)'
    """
    return f"GPU {number} ({uuid[:12]}…)"


def in_use(names: Sequence[str], holders: Sequence[str]) -> str:
    """Return the sentence that GPUs are in use, and by whom."""
    what = f"{names[0]} is" if len(names) == 1 else f"{len(names)} GPUs ({', '.join(names)}) are"
    more = f"; and {len(holders) - 3} more" if len(holders) > 3 else ""
    return f"{what} in use by {'; '.join(holders[:3])}{more}"


# Taking the locks


def _enter(attempt: _Attempt) -> Held:
    """Try, and try again while the policy waits; then hold, and say who else is there."""
    policy, world = attempt.policy, attempt.world
    began, reported, pause = world.clock(), False, POLL_S[0]
    try:
        while True:
            held, message = _try(attempt)
            if held is not None:
                if message:
                    world.say(message)
                return held
            left = began + policy.wait_s - world.clock() if policy.gpus == "wait" else 0.0
            if left <= 0:
                raise _busy(message, policy)
            if not reported:
                bound = f"up to {policy.wait_s:g} s (locks.gpus: wait)"
                world.say(f"{message}; waiting for {bound}")
            reported, pause = True, min(pause * 1.5, POLL_S[1])
            world.sleep(min(pause, left))
    except BaseException:
        attempt.place.close()
        raise


def _try(attempt: _Attempt) -> tuple[Held | None, str]:
    """Take all, or nothing where another run is there (but for `warn`); return it and a message."""
    place, policy = attempt.place, attempt.policy
    if attempt.memory:
        attempt.memory.look()  # before others are kept out
    with _Gate(place, attempt.world):
        claim = Claim.make(place, attempt.wanted, policy.slots)
        beside = tuple(claim.holders(place)) if claim.clashes else ()
        names = [attempt.shown.get(name, name) for name in claim.clashes]
        message = in_use(names, beside) if names else ""
        if attempt.memory and not message:
            message = attempt.memory.shortage(claim)
        if not message:
            return _sign(place, claim, policy.slots, attempt.owner)
        if policy.gpus != "warn":
            claim.close()
            return None, message
        held, trouble = _sign(place, claim, policy.slots, attempt.owner)
        held.beside = beside
        message += "; starting beside it (locks.gpus: warn)"
        return held, "; ".join(text for text in (message, trouble) if text)


def _sign(place: LockDirectory, claim: Claim, slots: int, owner: Holder) -> tuple[Held, str]:
    """Leave the record of a claim that stands; return it with what went wrong."""
    held = Held((), f"holds {', '.join(sorted(claim.files)) or 'nothing'} in {place.path}")
    trouble = ""
    try:
        record = write(place, owner, slots, [device.name for device in claim.devices], claim.files)
    except OSError as error:
        record, trouble = "", f"others cannot learn who holds the lock: {error.strerror}"
    held.hold(place, claim, record)
    return held, trouble


def _blocked(trouble: object, policy: LockPolicy, fix: str) -> BusyError:
    return BusyError(
        f"whether another run has the GPUs cannot be known: {trouble}",
        where=f"locks.gpus: {policy.gpus}",
        fix=f"{fix}, or start without this lock: --set locks.gpus=warn",
    )


def _busy(message: str, policy: LockPolicy) -> BusyError:
    waited = f", {policy.wait_s:g} s" if policy.gpus == "wait" else ""
    return BusyError(
        message,
        where=f"locks.gpus: {policy.gpus}{waited}",
        fix="wait for it to end, choose other GPUs (CUDA_VISIBLE_DEVICES), "
        "or start beside it: --set locks.gpus=warn",
    )


class _Gate:
    """`admission`, held while one run takes its locks, and waited for no longer than GATE_S."""

    def __init__(self, place: LockDirectory, world: World) -> None:
        self._place, self._world = place, world
        self._descriptor: int | None = None

    def __enter__(self) -> None:
        end = self._world.clock() + GATE_S
        while self._descriptor is None:
            self._descriptor = self._place.take("admission", alone=True)
            if self._descriptor is None:
                if self._world.clock() >= end:
                    return
                self._world.sleep(GATE_LOOK_S)

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
