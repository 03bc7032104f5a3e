"""GPU locks and slots: who else is on these GPUs, asked of the kernel and told by name.

A lock is a flock(2) on an empty file that all users share, so util-linux `flock` and the `filelock`
package take part, and the kernel frees what a dead process held. That package is not used here,
after reading 4.2: it has no shared flock(2) (a MIG slice needs one on its parent), falls back to a
lock of another kind where flock(2) is missing, cannot open below a directory that was checked,
truncates the file in its older releases (its #591), and its import takes 25 of the 60 ms that a
launch may take.

The protocol, for whoever else takes part (open without O_CREAT first: fs.protected_regular):

- `admission`: exclusive for the milliseconds in which one run looks around and takes its locks, so
  that of two that start together exactly one is first. After 5 s it is gone past.
- `<uuid>.lock`: exclusive for a run that wants the GPU alone, shared for one that shares it or one
  of its slices. A run that was warned has it if it can. `flock <uuid>.lock COMMAND` takes part.
- `<uuid>.slot<k>`: exclusive; every run holds the lowest free one, so the slots that are held count
  the runs, those included that were warned and started all the same.
- `<uuid>.slices`: shared, for the runs on MIG slices of that GPU.
- `holder.<uid>.<pid>.<random>.json`: says who holds. Its owner is proof of the user; the process
  must live, have begun when the record says and belong to that user. Where it has ended and its
  lock is still held, its children are spoken of. Anything else is ignored.

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
from typing import NamedTuple

from saferun.errors import BusyError
from saferun.gpu.lock_dir import Place, UnusableError
from saferun.gpu.lock_owner import Holder, Record, plain, read_all, unlink, who, write
from saferun.model import LockPolicy
from saferun.system import procfs

VARIABLE = "SAFERUN_LOCKS"  # what ancestors hold: "<pid>:<start>:<device>,<device>;…"
SLOTS = 64  # runs on one GPU that are told apart
GATE_S = 5.0  # the most seconds that `admission` is waited for: a loaded machine is slow
POLL_S = (0.05, 1.0)  # first and longest pause between two looks of a run that waits


class Device(NamedTuple):
    """A GPU or a MIG slice by the name that its files have."""

    name: str
    parent: str = ""  # of a slice, where it is known


class _World(NamedTuple):
    """What talks, tells the time and waits."""

    say: Callable[[str], None]
    clock: Callable[[], float]
    sleep: Callable[[float], None]


def acquire(
    uuids: Sequence[str],
    policy: LockPolicy,
    *,
    environ: Mapping[str, str],
    owner: Holder,
    say: Callable[[str], None],
    directory: str | None = None,
    parents: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Held:
    """Take the GPUs as the policy says, and return what is held until it is closed.

    Args:
        uuids: of GPUs and MIG slices; "" is a GPU without one, which cannot be locked.
        policy: `gpus` (warn, refuse, wait, off), `wait_s`, `slots`, as in a profile's `locks`.
        environ: for SAFERUN_LOCKS, what an ancestor holds, and TMPDIR.
        owner: who the record names; see `this_process`.
        say: takes one line for people.
        directory: the lock directory; where it is left out, the machine's.
        parents: the GPU of each slice; slices named in the old form tell it themselves.
        clock: monotonic, in seconds.
        sleep: takes seconds.

    Raises:
        BusyError: `refuse` or `wait`, and another run has a GPU. Trouble with the files is never
            an error: one line, and the run goes on without locks.
    """
    ancestors = tuple(_ancestors(environ.get(VARIABLE, "")))
    if policy.gpus == "off":
        return Held(ancestors, "locks.gpus: off")
    if "" in uuids:
        say("a GPU without a UUID is not locked; other runs will not see this one on it")
    wanted = to_lock(uuids, parents or {}, {name for a in ancestors for name in a.devices})
    if not wanted:
        return Held(ancestors, "an ancestor holds the GPUs" if ancestors else "no GPU to lock")
    try:
        place = Place.find(directory, environ)
        held = _enter(place, wanted, policy, owner, _World(say, clock, sleep))
    except (UnusableError, OSError) as trouble:
        say(f"GPU locks are off for this run, others will not see it: {trouble}")
        return Held(ancestors, f"locks are off: {trouble}")
    held.ancestors = ancestors
    return held


class Held:
    """What a run holds. `close` gives it back; so does the kernel when its last process ends."""

    def __init__(self, ancestors: Sequence[_Ancestor], text: str) -> None:
        self.ancestors = tuple(ancestors)
        self._text = text
        self._pid = os.getpid()
        self._claim: _Claim | None = None
        self._place: Place | None = None
        self._record = ""
        self.beside: tuple[str, ...] = ()  # who else is on these GPUs, for the journal

    def hold(self, place: Place, claim: _Claim, record: str) -> None:
        """Take over an open directory, the descriptors of a claim and its record."""
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
            entries.append(_Ancestor(self._pid, procfs.start(self._pid), mine))
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
        slots = [slot for device in claim.devices for slot in _slots(device.name, names)]
        return not any(place.is_held(slot, shared=True) for slot in slots)

    def descriptors(self) -> tuple[int, ...]:
        """Return the lock files' descriptors, for a child that shall hold the GPUs with us."""
        return tuple(self._claim.files.values()) if self._claim else ()

    def inheritable(self) -> tuple[int, ...]:
        """Keep the locks over an exec of this process; return the descriptors."""
        for descriptor in self.descriptors():
            os.set_inheritable(descriptor, True)
        return self.descriptors()

    def close(self) -> None:
        """Give everything back; again is harmless.

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


# Names and sentences (pure)


def device_name(uuid: str) -> str:
    """Return the one spelling of a UUID that files have: no separators, hexadecimal in lower case.

    >>> device_name("MIG-GPU-5D5BA0D6/13/0")
    'MIG-GPU-5d5ba0d6_13_0'
    """
    low = uuid.strip().lower()
    prefix = next((p for p in ("mig-gpu-", "mig-", "gpu-") if low.startswith(p)), "")
    rest = low[len(prefix) :][:120]
    return prefix.upper() + "".join(
        c if (c.isascii() and c.isalnum()) or c == "-" else "_" for c in rest
    )


def to_lock(uuids: Sequence[str], parents: Mapping[str, str], held: set[str]) -> tuple[Device, ...]:
    """Return the devices to lock, sorted, without those that an ancestor holds."""
    devices: set[Device] = set()
    for uuid in filter(None, uuids):
        name, parent = device_name(uuid), parents.get(uuid, "")
        if not parent and name.startswith("MIG-GPU-"):
            parent = uuid.strip()[len("MIG-") :].partition("/")[0]
        devices.add(Device(name, device_name(parent)))
    covered = held | {device.name for device in devices}  # a slice comes with its whole GPU
    return tuple(sorted(d for d in devices if d.name not in held and d.parent not in covered))


def in_use(names: Sequence[str], holders: Sequence[str]) -> str:
    """Return the sentence that GPUs are in use, and by whom."""
    what = f"{names[0]} is" if len(names) == 1 else f"{len(names)} GPUs ({', '.join(names)}) are"
    more = f"; and {len(holders) - 3} more" if len(holders) > 3 else ""
    return f"{what} in use by {'; '.join(holders[:3])}{more}"


# One look around, and what it takes


def _enter(
    place: Place,
    wanted: tuple[Device, ...],
    policy: LockPolicy,
    owner: Holder,
    world: _World,
) -> Held:
    """Look, and look again while the policy waits; then hold, and say who else is there."""
    began, told, pause = world.clock(), False, POLL_S[0]
    try:
        while True:
            held, sentence = _look(place, wanted, policy, owner, world)
            if held is not None:
                if sentence:
                    world.say(sentence)
                return held
            left = began + policy.wait_s - world.clock() if policy.gpus == "wait" else 0.0
            if left <= 0:
                raise _busy(sentence, policy)
            if not told:
                bound = f"up to {policy.wait_s:g} s (locks.gpus: wait)"
                world.say(f"{sentence}; waiting for {bound}")
            told, pause = True, min(pause * 1.5, POLL_S[1])
            world.sleep(min(pause, left))
    except BaseException:
        place.close()
        raise


def _look(
    place: Place,
    wanted: tuple[Device, ...],
    policy: LockPolicy,
    owner: Holder,
    world: _World,
) -> tuple[Held | None, str]:
    """Take all, or nothing where another is there (but for `warn`); with what there is to say."""
    with _Gate(place, world):
        claim = _Claim.make(place, wanted, policy.slots)
        if not claim.clashes:
            return _sign(place, claim, policy.slots, owner)
        beside = tuple(claim.holders(place))
        sentence = in_use(list(claim.clashes), beside)
        if policy.gpus != "warn":
            claim.close()
            return None, sentence
        held, trouble = _sign(place, claim, policy.slots, owner)
        held.beside = beside
        sentence += "; starting beside it (locks.gpus: warn)"
        return held, "; ".join(text for text in (sentence, trouble) if text)


def _sign(place: Place, claim: _Claim, slots: int, owner: Holder) -> tuple[Held, str]:
    """Leave the record of a claim that stands; return it with what went wrong."""
    held = Held((), f"holds {', '.join(sorted(claim.files)) or 'nothing'} in {place.path}")
    trouble = ""
    try:
        record = write(place, owner, slots, [device.name for device in claim.devices], claim.files)
    except OSError as error:
        record, trouble = "", f"others cannot learn who holds the lock: {error.strerror}"
    held.hold(place, claim, record)
    return held, trouble


def _busy(sentence: str, policy: LockPolicy) -> BusyError:
    waited = f", {policy.wait_s:g} s" if policy.gpus == "wait" else ""
    return BusyError(
        sentence,
        where=f"locks.gpus: {policy.gpus}{waited}",
        fix="wait for it to end, choose other GPUs (CUDA_VISIBLE_DEVICES), "
        "or start beside it: --set locks.gpus=warn",
    )


class _Claim:
    """The lock files that one look has taken, and the clashes that it met."""

    def __init__(self, devices: tuple[Device, ...], slots: int, records: list[Record]) -> None:
        self.devices = devices
        self.slots = slots
        self.records = records
        self.files: dict[str, int] = {}  # name -> descriptor
        self.clashes: dict[str, list[str]] = {}  # device -> the files that others hold

    @classmethod
    def make(cls, place: Place, devices: tuple[Device, ...], slots: int) -> _Claim:
        """Take what is free of all devices, in sorted order, and note what is not."""
        names = place.names()
        claim = cls(devices, slots, list(read_all(place, names)))
        try:
            claim._sweep(place)
            for device in devices:
                met = claim._device(place, device, names)
                if device.parent:
                    met += claim._parent(place, device.parent, names)
                if met:
                    claim.clashes[device.name] = met
        except BaseException:
            claim.close()
            raise
        return claim

    def _device(self, place: Place, device: Device, names: frozenset[str]) -> list[str]:
        name, met = device.name, []
        if not self._take(place, f"{name}.lock", alone=self.slots == 1):
            met.append(f"{name}.lock")
            if self.slots == 1:
                self._take(place, f"{name}.lock", alone=False)  # whoever resets it must see us
        others = [slot for slot in _slots(name, names) if place.is_held(slot, shared=True)]
        signed = [r.slots for r in self.records if r.alive and name in r.devices]
        if len(others) >= min([self.slots, SLOTS, *signed]):
            met += others
        for slot in (f"{name}.slot{k}" for k in range(SLOTS)):
            if slot not in others and self._take(place, slot, alone=True):
                break
        slices = f"{name}.slices"
        return [*met, slices] if slices in names and place.is_held(slices, shared=False) else met

    def _parent(self, place: Place, parent: str, names: frozenset[str]) -> list[str]:
        """A slice shares its GPU with other slices, not with a run on the whole of it."""
        met = [slot for slot in _slots(parent, names) if place.is_held(slot, shared=True)]
        self._take(place, f"{parent}.slices", alone=False)
        if not self._take(place, f"{parent}.lock", alone=False):
            met.append(f"{parent}.lock")
        return met

    def _take(self, place: Place, name: str, *, alone: bool) -> bool:
        if name in self.files:
            return True  # the parent of two slices
        descriptor = place.take(name, alone=alone)
        if descriptor is not None:
            self.files[name] = descriptor
        return descriptor is not None

    def _sweep(self, place: Place) -> None:
        """Remove our own user's records (root: all) whose process has ended and left no lock."""
        for record in self.records:
            if not record.alive and os.geteuid() in (record.uid, 0):
                slots = [f for f in record.files if ".slot" in f]
                if not any(place.is_held(slot, shared=True) for slot in slots):
                    unlink(place, record.file)

    def holders(self, place: Place) -> list[str]:
        """Return who holds what stands in the way: by record, else as the kernel knows them."""
        files = {file for met in self.clashes.values() for file in met}
        named = [r for r in self.records if r.alive and files & set(r.files)]
        signed = {file for record in named for file in record.files}
        named += [r for r in self.records if not r.alive and (files - signed) & set(r.files)]
        signed.update(file for record in named for file in record.files)
        pids = {pid for file in files - signed for pid in place.locked_by(file)}
        unsigned = [f"pid {pid} ({plain(procfs.comm(pid))})" for pid in sorted(pids)]
        return [who(r) for r in named] + unsigned or ["a process that has left no record"]

    def close(self) -> None:
        """Close every descriptor; the kernel frees what no other process has inherited."""
        while self.files:
            os.close(self.files.popitem()[1])


def _slots(name: str, names: frozenset[str]) -> list[str]:
    return [slot for k in range(SLOTS) if (slot := f"{name}.slot{k}") in names]


class _Gate:
    """`admission`, held while one run looks around; a stopped process cannot hold it for good."""

    def __init__(self, place: Place, world: _World) -> None:
        self._place, self._world = place, world
        self._descriptor: int | None = None

    def __enter__(self) -> None:
        end = self._world.clock() + GATE_S
        while self._descriptor is None:
            self._descriptor = self._place.take("admission", alone=True)
            if self._descriptor is None:
                if self._world.clock() >= end:
                    return
                self._world.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


# Ancestors


class _Ancestor(NamedTuple):
    """An ancestor of this process and the devices that it holds."""

    pid: int
    start: int | None
    devices: tuple[str, ...]

    def text(self) -> str:
        return f"{self.pid}:{self.start or 0}:{','.join(self.devices)}"


def _ancestors(variable: str) -> list[_Ancestor]:
    """Return the entries of SAFERUN_LOCKS that are true: the process lives and is above us."""
    if not variable:
        return []
    above, found = dict(procfs.lineage(os.getpid())), []
    for entry in variable.split(";"):
        pid, _, rest = entry.partition(":")
        start, _, devices = rest.partition(":")
        if pid.isdecimal() and start.isdecimal() and above.get(int(pid[:10])) == int(start[:20]):
            names = tuple(device_name(name) for name in devices.split(",") if name)
            found.append(_Ancestor(int(pid), int(start), names))
    return found
