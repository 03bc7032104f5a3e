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

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from saferun.errors import BusyError
from saferun.gpu.device_names import VARIABLE, Ancestor, Device, ancestors, device_name, to_lock
from saferun.gpu.lock.lock_claim import Claim, slots_of
from saferun.gpu.lock.lock_dir import BlockedError, LockDirectory, UnusableError
from saferun.gpu.lock.lock_owner import Holder, unlink, write
from saferun.gpu.lock.slot_memory import SlotMemory
from saferun.inject.durations import seconds
from saferun.model import Gpu
from saferun.settings import LockPolicy
from saferun.system import procfs

GATE_LOOK_S = 0.002  # pause between two tries: who holds it needs a millisecond
GATE_S = 5.0  # the most seconds that `admission` is waited for: a loaded machine is slow
_MUST_HOLD = ("refuse", "wait")  # policies under which no run starts without its locks
POLL_S = (0.05, 1.0)  # first and longest pause between two looks of a run that waits


class World(NamedTuple):
    """What a lock uses of its surroundings; tests have others."""

    say: Callable[[str], None]  # takes one line for people
    clock: Callable[[], float] = time.monotonic  # s
    sleep: Callable[[float], None] = time.sleep  # takes seconds
    memory: SlotMemory | None = None  # None: made where slots need memory


def acquire(
    gpus: Sequence[Gpu],
    policy: LockPolicy,
    owner: Holder,
    environ: Mapping[str, str],
    world: World,
    directory: str | None = None,
) -> Held:
    """Take the GPUs as the policy says, and return what is held until it is closed.

    Args:
        gpus: the GPUs and MIG slices; one without a UUID cannot be locked.
        policy: the profile's `locks`.
        owner: whom the record names; see lock_owner.this_process.
        environ: SAFERUN_LOCKS says what an ancestor holds; TMPDIR and PATH count, too.
        world: takes messages, tells the time and waits.
        directory: where locks lie; None: the machine's directory.

    Raises:
        BusyError: `refuse` or `wait`, and another run has a GPU, or somebody has put something in
            a lock file's place that cannot be locked, or a GPU has no UUID. Any other trouble with
            the files is no error: it costs one line, and the run goes on without locks.
    """
    above = tuple(ancestors(environ.get(VARIABLE, "")))
    if policy.gpus == "off":
        return Held(above)
    if not all(gpu.uuid for gpu in gpus):
        if policy.gpus in _MUST_HOLD:
            raise _blocked("a GPU has no UUID", policy, "look at it with `nvidia-smi -L`")
        world.say("a GPU without a UUID is not locked; other runs will not see this one on it")
    wanted = to_lock(gpus, {name for ancestor in above for name in ancestor.devices})
    if not wanted:
        return Held(above)
    try:
        place = LockDirectory.find(directory, environ)
        memory = world.memory or slot_memory(policy, environ, world)
        attempt = _Attempt(place, wanted, policy, owner, world, memory, _message_names(gpus))
        claim, record = _enter(attempt)
    except (UnusableError, OSError) as trouble:
        if isinstance(trouble, BlockedError) and policy.gpus in _MUST_HOLD:
            raise _blocked(trouble, policy, "have its owner or root remove that file") from None
        world.say(f"GPU locks are off for this run, so other runs will not see it: {trouble}")
        return Held(above)
    return Held(above, place, claim, record)


def slot_memory(policy: LockPolicy, environ: Mapping[str, str], world: World) -> SlotMemory | None:
    """Return what knows the GPUs' free memory; None where slots need none.

    Args:
        policy: the profile's `locks`.
        environ: LD_LIBRARY_PATH finds NVML.
        world: takes messages and tells the time.
    """
    if policy.slot_memory_gib is None:
        return None
    return SlotMemory(policy.slot_memory_gib, environ, world.say, world.clock)


def load(uuids: Sequence[str], environ: Mapping[str, str]) -> dict[str, int]:
    """Return how many runs and workers are on each GPU; none where locks cannot be read.

    Args:
        uuids: those of the GPUs.
        environ: TMPDIR may hold the directory of locks.
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
    """The locks of a run. `close` gives them back; so does the kernel at its last process's end.

    Args:
        ancestors: those that hold GPUs, of which nested runs must know, too.
        place: the directory of locks, open.
        claim: the locks that were taken in it; None where nothing is held.
        record: the file name of our record in it.
    """

    def __init__(
        self,
        ancestors: Sequence[Ancestor],
        place: LockDirectory | None = None,
        claim: Claim | None = None,
        record: str = "",
    ) -> None:
        self._ancestors = ancestors
        self._place, self._claim, self._record = place, claim, record
        self._pid = os.getpid()

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def environ(self) -> dict[str, str]:
        """Return what a nested run must find in its environment; empty where nothing is held."""
        entries = list(self._ancestors)
        if self._claim:
            mine = tuple(device.name for device in self._claim.devices)
            entries.append(Ancestor(self._pid, procfs.start(self._pid), mine))
        return {VARIABLE: ";".join(entry.text() for entry in entries)} if entries else {}

    def alone(self) -> bool:
        """Return whether these GPUs are locked for us alone and no other run is on them now.

        What may disturb another run, a GPU's reset above all, needs a yes. It holds for the
        moment: under `warn` the next run starts beside us. Slices and slots share their GPU, and
        what an ancestor holds is the ancestor's to judge.
        """
        claim, place = self._claim, self._place
        if claim is None or place is None or self._ancestors:
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
        if place:
            place.close()


# Messages (pure)


def _message_names(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return how messages name the GPUs that have a number, by device name.

    >>> _message_names([Gpu(0, "GPU-c4a0ffff-1234-5678", "NVIDIA H200")])
    {'GPU-c4a0ffff-1234-5678': 'GPU 0 (GPU-c4a0ffff…)'}
    """
    return {
        device_name(gpu.uuid): f"GPU {gpu.number} ({gpu.uuid[:12]}…)"
        for gpu in gpus
        if gpu.number is not None
    }


def in_use(names: Sequence[str], holders: Sequence[str]) -> str:
    """Return the sentence that GPUs are in use, and by whom."""
    what = f"{names[0]} is" if len(names) == 1 else f"{len(names)} GPUs ({', '.join(names)}) are"
    more = f"; and {len(holders) - 3} more" if len(holders) > 3 else ""
    return f"{what} in use by {'; '.join(holders[:3])}{more}"


# Taking the locks


class _Attempt(NamedTuple):
    """The values of one attempt to lock."""

    place: LockDirectory
    wanted: tuple[Device, ...]
    policy: LockPolicy
    owner: Holder
    world: World
    memory: SlotMemory | None
    names: Mapping[str, str]  # what messages call a device, where it is not its name


def _enter(attempt: _Attempt) -> tuple[Claim, str]:
    """Try, and try again while the policy waits; return the claim and its record's name."""
    policy, world = attempt.policy, attempt.world
    began, reported, pause = world.clock(), False, POLL_S[0]
    try:
        while True:
            claim, record, message = _try(attempt)
            if claim is not None:
                if message:
                    world.say(message)
                return claim, record
            left = began + policy.wait_s - world.clock() if policy.gpus == "wait" else 0.0
            if left <= 0:
                raise _busy(message, policy)
            if not reported:
                bound = f"up to {seconds(policy.wait_s)} (locks.gpus: wait)"
                world.say(f"{message}; waiting for {bound}")
            reported, pause = True, min(pause * 1.5, POLL_S[1])
            world.sleep(min(pause, left))
    except BaseException:
        attempt.place.close()
        raise


def _try(attempt: _Attempt) -> tuple[Claim | None, str, str]:
    """Take all, or nothing where another run is there (but for `warn`).

    Returns:
        The claim, the file name of its record, and a message; no claim where nothing was taken.
    """
    policy = attempt.policy
    if attempt.memory:
        attempt.memory.refresh()  # before others are kept out
    with _admission(attempt.place, attempt.world):
        claim = Claim.make(attempt.place, attempt.wanted, policy.slots)
        message = _obstacle(attempt, claim)
        if message and policy.gpus != "warn":
            claim.close()
            return None, "", message
        if message:
            message += "; starting beside it (locks.gpus: warn)"
        record, trouble = _sign(attempt, claim)
        return claim, record, "; ".join(filter(None, (message, trouble)))


@contextlib.contextmanager
def _admission(place: LockDirectory, world: World) -> Iterator[None]:
    """Hold `admission`, which is waited for no longer than GATE_S."""
    end = world.clock() + GATE_S
    while (descriptor := place.take("admission", alone=True)) is None and world.clock() < end:
        world.sleep(GATE_LOOK_S)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _obstacle(attempt: _Attempt, claim: Claim) -> str:
    """Return who else is on the GPUs of a claim, or that they lack memory; "" where all is well."""
    if claim.clashes:
        names = [attempt.names.get(name, name) for name in claim.clashes]
        return in_use(names, claim.holders(attempt.place))
    return attempt.memory.shortage(claim) if attempt.memory else ""


def _sign(attempt: _Attempt, claim: Claim) -> tuple[str, str]:
    """Leave the record of a claim that stands; return its file name and what went wrong."""
    devices = [device.name for device in claim.devices]
    try:
        slots = attempt.policy.slots
        return write(attempt.place, attempt.owner, slots, devices, claim.files), ""
    except OSError as error:
        return "", f"others cannot learn who holds the lock: {error.strerror}"


def _blocked(trouble: object, policy: LockPolicy, fix: str) -> BusyError:
    return BusyError(
        f"whether another run has the GPUs cannot be known: {trouble}",
        where=f"locks.gpus: {policy.gpus}",
        fix=f"{fix}, or start without this lock: --set locks.gpus=warn",
    )


def _busy(message: str, policy: LockPolicy) -> BusyError:
    waited = f", {seconds(policy.wait_s)}" if policy.gpus == "wait" else ""
    return BusyError(
        message,
        where=f"locks.gpus: {policy.gpus}{waited}",
        fix="wait for it to end, choose other GPUs (CUDA_VISIBLE_DEVICES), "
        "or start beside it: --set locks.gpus=warn",
    )
