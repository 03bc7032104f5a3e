"""GPU locks and slots: they separate runs on a GPU, and name other users of it.

A lock is a flock(2) on an empty file that all users share, so util-linux `flock` and the `filelock`
package can take part, and the kernel frees the locks of a dead process. That package is not used
here, for reasons found in 4.2: it has no shared flock(2) (a MIG slice needs one on its parent),
falls back to another kind of lock if flock(2) is missing, cannot open below a checked directory,
and truncates the file in its older releases (its #591).

The protocol, for other programs that take part (open without O_CREAT first: fs.protected_regular):

- `admission`: exclusive for the milliseconds in which one run checks and takes its locks, so that
  of two runs that start together exactly one is first. After 5 s it is skipped.
- `<uuid>.lock`: exclusive for a run that wants the GPU alone, shared for a run that shares it or
  one of its slices. A run that was warned takes it if possible. `flock <uuid>.lock COMMAND` takes
  part.
- `<uuid>.slot<k>`: exclusive; every run holds the lowest free one, so the held slots count the
  runs, including those that started in spite of a warning.
- `<uuid>.slices`: shared, for the runs on MIG slices of that GPU.
- `holder.<uid>.<pid>.<random>.json`: describes the holder. The file's owner proves the user; the
  process must live, have begun at the recorded time and belong to that user. If it has ended and
  its lock is still held, its children are named. Any other record is ignored.

Several GPUs are taken all or none, never one while waiting for another. So there is no deadlock,
but runs that need few GPUs can overtake a run that waits for many.

Scope: one mount namespace (containers with their own /run/lock do not see each other) on one host.
The directory may belong to any user if its mode is 1777: the first user makes it. A hostile owner
can make locks useless, and so can any user who takes a lock; neither can do more.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from saferun.base import proc
from saferun.base.durations import seconds
from saferun.errors import BusyError
from saferun.gpu.device_names import VARIABLE, Ancestor, Device, ancestors, device_name, to_lock
from saferun.gpu.lock.lock_claim import Claim, slots_of
from saferun.gpu.lock.lock_dir import BlockedError, LockDirectory, UnusableError
from saferun.gpu.lock.lock_owner import Holder, unlink, write
from saferun.gpu.lock.slot_memory import SlotMemory
from saferun.model import Gpu
from saferun.settings import LockPolicy

GATE_LOOK_S = 0.002  # between two tries; a holder needs about a millisecond
GATE_S = 5.0  # longest wait for `admission`: a loaded machine is slow
_MUST_HOLD = ("refuse", "wait")  # policies that require locks for a start
POLL_S = (0.05, 1.0)  # first and longest pause of a waiting run between two tries


class Surroundings(NamedTuple):
    """The surroundings that a lock uses; tests replace them."""

    say: Callable[[str], None]  # takes one line for people
    clock: Callable[[], float] = time.monotonic  # returns seconds
    sleep: Callable[[float], None] = time.sleep  # takes seconds
    memory: SlotMemory | None = None  # None: made if slots need memory


def acquire(
    gpus: Sequence[Gpu],
    policy: LockPolicy,
    owner: Holder,
    environ: Mapping[str, str],
    world: Surroundings,
    directory: str | None = None,
) -> Held:
    """Take the GPUs by the policy, and return the held locks, until they are closed.

    Args:
        gpus: the GPUs and MIG slices; one without a UUID cannot be locked.
        policy: the profile's `locks`.
        owner: the holder in the record; see lock_owner.this_process.
        environ: the environment; SAFERUN_LOCKS names an ancestor's devices, and TMPDIR and PATH
            count.
        world: functions for messages, time and waiting.
        directory: the lock directory; None: the machine's.

    Raises:
        BusyError: the policy is `refuse` or `wait`, and another run has a GPU, or an object that
            cannot be locked stands in a lock file's place, or a GPU has no UUID. Any other problem
            with the files is no error: it is reported in one line, and the run continues without
            locks.
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
        bid = _Bid(place, wanted, policy, owner, world, memory, _message_names(gpus))
        claim, record = _enter(bid)
    except (UnusableError, OSError) as trouble:
        if isinstance(trouble, BlockedError) and policy.gpus in _MUST_HOLD:
            raise _blocked(trouble, policy, "have its owner or root remove that file") from None
        world.say(f"GPU locks are off for this run, so other runs will not see it: {trouble}")
        return Held(above)
    return Held(above, place, claim, record)


def slot_memory(
    policy: LockPolicy, environ: Mapping[str, str], world: Surroundings
) -> SlotMemory | None:
    """Return an object that knows the GPUs' free memory; None if slots need none.

    Args:
        policy: the profile's `locks`.
        environ: the environment; LD_LIBRARY_PATH finds NVML.
        world: functions for messages and time.
    """
    if policy.slot_memory_gib is None:
        return None
    return SlotMemory(policy.slot_memory_gib, environ, world.say, world.clock)


def load(uuids: Sequence[str], environ: Mapping[str, str]) -> dict[str, int]:
    """Return the number of runs and workers on each GPU; {} if locks cannot be read.

    Args:
        uuids: UUIDs of the GPUs.
        environ: the environment; TMPDIR may contain the lock directory.
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
    """The locks of a run. `close` frees them, and so does the kernel when its last process ends.

    Args:
        ancestors: ancestors that hold GPUs; nested runs must know them, too.
        place: the open lock directory.
        claim: the locks taken in it; None if nothing is held.
        record: file name of our record in it.
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
        """Return the variables that a nested run needs; {} if nothing is held."""
        entries = list(self._ancestors)
        if self._claim:
            mine = tuple(device.name for device in self._claim.devices)
            entries.append(Ancestor(self._pid, proc.start(self._pid), mine))
        return {VARIABLE: ";".join(entry.text() for entry in entries)} if entries else {}

    def alone(self) -> bool:
        """Return whether these GPUs are locked only for us and no other run is on them now.

        An action that may disturb another run, mainly a GPU's reset, requires this. The answer
        holds only for the moment: with `warn` the next run may start beside us. Slices and slots
        share their GPU, and only the ancestor can judge the GPUs that it holds.
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
        """Return the lock files' descriptors, for a child that must hold the GPUs with us."""
        return tuple(self._claim.files.values()) if self._claim else ()

    def inheritable(self) -> tuple[int, ...]:
        """Keep the locks over an exec of this process; return their descriptors."""
        for descriptor in self.descriptors():
            os.set_inheritable(descriptor, True)
        return self.descriptors()

    def hand_over(self) -> None:
        """Leave the locks to a child that was forked with them; the record stays until `close`."""
        if self._claim:
            self._claim.close()

    def close(self) -> None:
        """Free everything; a second call does nothing.

        Descriptors are closed, never unlocked: an unlock would also take the lock from a child that
        inherited it and may still use the GPU. In a forked child the record stays.
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
    """Return the names of numbered GPUs in messages, by device name.

    >>> _message_names([Gpu(0, "GPU-c4a0ffff-1234-5678", "NVIDIA H200")])
    {'GPU-c4a0ffff-1234-5678': 'GPU 0 (GPU-c4a0ffff…)'}
    """
    return {
        device_name(gpu.uuid): f"GPU {gpu.number} ({gpu.uuid[:12]}…)"
        for gpu in gpus
        if gpu.number is not None
    }


def in_use(names: Sequence[str], holders: Sequence[str]) -> str:
    """Return the sentence that GPUs are in use, and by which holders."""
    what = f"{names[0]} is" if len(names) == 1 else f"{len(names)} GPUs ({', '.join(names)}) are"
    more = f"; and {len(holders) - 3} more" if len(holders) > 3 else ""
    return f"{what} in use by {'; '.join(holders[:3])}{more}"


# Taking the locks


class _Bid(NamedTuple):
    """What one bid for locks is made with."""

    place: LockDirectory
    wanted: tuple[Device, ...]
    policy: LockPolicy
    owner: Holder
    world: Surroundings
    memory: SlotMemory | None
    names: Mapping[str, str]  # names of devices in messages, if different


def _enter(bid: _Bid) -> tuple[Claim, str]:
    """Try once, and again while the policy waits; return the claim and its record's name."""
    policy, world = bid.policy, bid.world
    began, reported, pause = world.clock(), False, POLL_S[0]
    try:
        while True:
            claim, record, message = _try(bid)
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
        bid.place.close()
        raise


def _try(bid: _Bid) -> tuple[Claim | None, str, str]:
    """Take all locks, or none if another run is there (except with `warn`).

    Returns:
        The claim (None if nothing was taken), the file name of its record, and a message.
    """
    policy = bid.policy
    if bid.memory:
        bid.memory.refresh()  # before others are kept out
    with _admission(bid.place, bid.world):
        claim = Claim.make(bid.place, bid.wanted, policy.slots)
        message = _obstacle(bid, claim)
        if message and policy.gpus != "warn":
            claim.close()
            return None, "", message
        if message:
            message += "; starting beside it (locks.gpus: warn)"
        record, trouble = _sign(bid, claim)
        return claim, record, "; ".join(filter(None, (message, trouble)))


@contextlib.contextmanager
def _admission(place: LockDirectory, world: Surroundings) -> Iterator[None]:
    """Hold `admission`, after a wait of at most GATE_S."""
    end = world.clock() + GATE_S
    while (descriptor := place.take("admission", alone=True)) is None and world.clock() < end:
        world.sleep(GATE_LOOK_S)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _obstacle(bid: _Bid, claim: Claim) -> str:
    """Return who else is on a claim's GPUs, or that memory is short; "" if neither."""
    if claim.clashes:
        names = [bid.names.get(name, name) for name in claim.clashes]
        return in_use(names, claim.holders(bid.place))
    return bid.memory.shortage(claim) if bid.memory else ""


def _sign(bid: _Bid, claim: Claim) -> tuple[str, str]:
    """Write the record of a successful claim; return its file name, and any error."""
    devices = [device.name for device in claim.devices]
    try:
        slots = bid.policy.slots
        return write(bid.place, bid.owner, slots, devices, claim.files), ""
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
