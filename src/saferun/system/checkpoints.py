"""The checkpoints that a job has written, and whether each is complete; torch is not needed.

A job that is killed while it saves leaves an incomplete checkpoint. The files show it: a zip
(torch, Lightning, numpy) has its directory at its end, a safetensors file has its size at its
beginning, and the libraries write one file of a directory last. A file in another format counts as
complete if it is not empty.
"""

from __future__ import annotations

import collections
import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from saferun.model import Checkpoint
from saferun.system import checkpoint_files, command

Stamp = tuple[int, int]

_DRAFTS = (".tmp", ".temp", ".part", ".partial", ".incomplete")
_STEP = re.compile(r"(?:step|iter|iteration|checkpoint|ckpt)[-_=]?(\d+)", re.IGNORECASE)
_CLOCK_NS = 2_000_000_000  # file systems that round times use at most 2 s
# Files that each rank writes: nanochat, accelerate, the HF Trainer, DeepSpeed's ZeRO.
_OF_RANKS = re.compile(
    r"(optim_\d+_rank|random_states_|rng_state_|zero_pp_rank_)\d+"
    r"(\.pt|\.pkl|\.pth|_mp_rank_\d+_optim_states\.pt)\Z"
)
# Files of a checkpoint that the HF Trainer writes before its last file.
_OF_TRAINER = re.compile(
    r"(\w*config\.json|training_args\.bin|(adapter_)?model\S*\.safetensors"
    r"|(pytorch|adapter)_model\S*\.bin)\Z"
)
_RANDOM = "random_states_"  # prefix of accelerate's files
_NANOCHAT = re.compile(r"meta_(\d+)\.json\Z")


class Found(NamedTuple):
    """One candidate on disk; `stamp` changes when a job writes to it again."""

    checkpoint: Checkpoint
    stamp: Stamp


def find(pattern: str) -> list[Found]:
    """Return the matches of a glob(7) pattern, with `**` and `~`, the newest first."""
    found: dict[str, Found] = {}
    for path in sorted(glob.glob(os.path.expanduser(pattern), recursive=True), key=os.path.islink):
        path = path.rstrip("/")
        try:
            stamp = _stamp(path)
        except OSError:  # the file has gone
            continue
        real = os.path.realpath(path)  # `last.ckpt` may be a link to another file
        if stamp[0] and real not in found and not path.endswith(_DRAFTS):
            found[real] = Found(Checkpoint(path, step_of(path), stamp[0] / 1e9), stamp)
    return sorted(found.values(), key=lambda one: (one.stamp[0], one.checkpoint.step), reverse=True)


def step_of(path: str) -> int:
    """Return the step in a checkpoint's name, or the last number in it; -1 without a number.

    >>> step_of("out/epoch=3-step=1200.ckpt"), step_of("d20/meta_000100.json"), step_of("ckpt.pt")
    (1200, 100, -1)
    """
    name = os.path.basename(path)
    numbers = _STEP.findall(name) or re.findall(r"\d+", os.path.splitext(name)[0])
    return int(numbers[-1]) if numbers else -1


def write_time_s(path: str, environ: Mapping[str, str]) -> float | None:
    """Return how long writing a checkpoint took, from the first file's birth to the last write.

    Python has no statx(2) before 3.15, so stat(1) from `environ`'s PATH is run. The result is None
    if the file system does not store the time of birth.
    """
    files = [path] if os.path.isfile(path) else [file for file, _ in _files(path)]
    asked = command.run(["stat", "-c", "%.W %.Y", "--", *files[:1000]], environ, 5.0)
    try:
        pairs = [tuple(map(float, line.split())) for line in asked.out.splitlines()]
        births, writes = zip(*pairs, strict=True)
    except ValueError:
        return None
    return max(writes) - min(births) if min(births) > 0 else None


def _stamp(path: str) -> Stamp:
    """Return the time of the last write in ns, and the size in bytes; zeros for an empty folder."""
    if not os.path.isdir(path):
        facts = os.stat(path)
        return facts.st_mtime_ns, facts.st_size
    facts_of_all = [os.stat(file) for file, _ in _files(path)]
    times = (facts.st_mtime_ns for facts in facts_of_all)
    return max(times, default=0), sum(facts.st_size for facts in facts_of_all)


def _files(directory: str) -> Iterator[tuple[str, str]]:
    """Yield path and name of each file in a directory and its subdirectories."""
    for folder, _, names in os.walk(directory):
        for name in names:
            yield os.path.join(folder, name), name


# --- whether one is complete ---------------------------------------------------------------------


def problem(path: str, ranks: int = 1, others: Iterable[str] = ()) -> str:
    """Return why a checkpoint is incomplete, as a clause for people; "" if it is complete.

    Args:
        path: a file or a directory. For nanochat it is the checkpoint's `meta_` file.
        ranks: number of ranks on this machine. If each rank writes its own file, there must be as
            many.
        others: other checkpoints of the same program, which show the files that it writes.
    """
    try:
        if os.path.isdir(path):
            written = [[name for _, name in _files(other)] for other in others if other != path]
            return _directory_problem(path, ranks, written)
        if nanochat := _NANOCHAT.match(os.path.basename(path)):
            return _nanochat_problem(path, nanochat[1], ranks)
        return checkpoint_files.problem(path) if os.path.getsize(path) else "it is empty"
    except OSError as error:
        return f"{error.filename or path}: {error.strerror}"


def _nanochat_problem(path: str, step: str, ranks: int) -> str:
    """Check nanochat's three kinds of files; each rank writes its own optimizer state.

    https://github.com/karpathy/nanochat/blob/master/nanochat/checkpoint_manager.py
    """
    folder = os.path.dirname(path) or "."
    ours = [name for name in os.listdir(folder) if name.startswith(f"optim_{step}_rank")]
    if missing := _missing_ranks(ours, ranks):
        return missing
    if f"optim_{step}_rank0.pt" not in ours:
        return f"optim_{step}_rank0.pt is missing"
    whole = (os.path.join(folder, name) for name in (f"model_{step}.pt", *ours))
    return _first_problem((path, *whole))


def _directory_problem(path: str, ranks: int, others: Sequence[Sequence[str]]) -> str:
    files = list(_files(path))
    if not files:
        return "it is empty"
    names = [name for _, name in files]
    if reason := _trainer_problem(os.path.basename(path), names, others):
        return reason
    for folder in dict.fromkeys([path, *(os.path.dirname(file) for file, _ in files)]):
        if reason := _library_problem(folder):
            return reason
    return _missing_ranks(names, ranks, others) or _first_problem(file for file, _ in files)


def _trainer_problem(name: str, names: Sequence[str], others: Sequence[Sequence[str]]) -> str:
    """Return the file that a trainer writes last if it is missing.

    The HF Trainer writes trainer_state.json last (Trainer._save_checkpoint); accelerate writes
    random_states_N.pkl, and after it the objects that the program has registered
    (save_accelerator_state). Many programs name their checkpoints `checkpoint-N` like the Trainer:
    a checkpoint with the same files as another one is complete.
    """
    if "trainer_state.json" in names:
        return ""
    if any(one.startswith(_RANDOM) for one in names):
        count, most = _registered(names), max(map(_registered, others), default=0)
        return f"{count} of {most} files custom_checkpoint_N are there" if count < most else ""
    if "optimizer.bin" in names:
        return "random_states_0.pkl is missing, which accelerate writes last"
    if not re.fullmatch(r"checkpoint-\d+", name) or {".metadata", "latest"} & set(names):
        return ""
    is_trainers = any("trainer_state.json" in other for other in others)
    has_form = any(_forms(other) == _forms(names) for other in others)
    if not is_trainers and (has_form or not any(_OF_TRAINER.match(name) for name in names)):
        return ""
    return "trainer_state.json is missing, which the Trainer writes last"


def _registered(names: Sequence[str]) -> int:
    """Return the number of saved objects that the program has registered with accelerate."""
    return sum(name.startswith("custom_checkpoint_") for name in names)


def _forms(names: Sequence[str]) -> set[str]:
    return {re.sub(r"\d+", "#", name) for name in names}


def _library_problem(folder: str) -> str:
    """Check one directory by the rules of torch.distributed.checkpoint and of DeepSpeed."""
    names = os.listdir(folder)
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return _dcp_problem(folder, names)
    if "latest" in names and not os.path.isdir(os.path.join(folder, "latest")):
        with open(os.path.join(folder, "latest"), encoding="utf-8", errors="replace") as file:
            tag = file.read(4096).strip()
        return "" if tag and os.path.isdir(os.path.join(folder, tag)) else f"`{tag}` is missing"
    if any(name.endswith("_model_states.pt") for name in names):
        return _deepspeed_problem(folder)
    return ""


def _deepspeed_problem(folder: str) -> str:
    """Check one tag: DeepSpeed names it in `latest`, beside it, when every rank has written.

    A kill during the write of `latest` leaves it empty. A save begins after the previous one is
    finished on every rank, so only the last tag is in doubt.

    https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/engine.py
    """
    try:
        with open(os.path.join(os.path.dirname(folder), "latest"), encoding="utf-8") as file:
            latest = file.read(4096).strip()
    except OSError:
        return "no file `latest` names it, which DeepSpeed writes last"
    if not latest:
        name = re.sub(r"\d+", "*", glob.escape(os.path.basename(folder)))
        tags = glob.glob(os.path.join(glob.escape(os.path.dirname(folder)), name))
        is_last = _stamp(folder)[0] >= max(_stamp(tag)[0] for tag in tags)
        return "`latest` is empty, and no later save was begun" if is_last else ""
    return f"`latest` names {latest}" if step_of(latest) < step_of(folder) else ""


def _dcp_problem(folder: str, names: Sequence[str]) -> str:
    """Check a directory of torch.distributed.checkpoint: `.metadata` comes last, and names all.

    See torch/distributed/checkpoint/filesystem.py. Without coordination each rank writes its own.
    """
    heads = [name for name in names if name.endswith(".metadata")]
    if not heads:
        return ".metadata is missing, which torch.distributed.checkpoint writes last"
    from saferun.system import dcp_metadata  # `pickle` costs 4 ms, only for such checkpoints

    sizes: dict[str, int] = {}
    for head in heads:
        found = dcp_metadata.sizes(os.path.join(folder, head))
        if found is None:
            return f"{head} was cut"
        sizes |= found
    for name, size in sizes.items():
        if name not in names:
            return f"{name} is missing"
        if os.path.getsize(os.path.join(folder, name)) < size:
            return f"{name} has less than the {size} bytes that .metadata says"
    written = max(os.stat(os.path.join(folder, head)).st_mtime_ns for head in heads)
    for name in (name for name in names if name.endswith(".distcp")):
        if os.stat(os.path.join(folder, name)).st_mtime_ns > written + _CLOCK_NS:
            return f"{name} is newer than .metadata: another save was not finished"
    return ""


def _missing_ranks(names: Sequence[str], ranks: int, others: Sequence[Sequence[str]] = ()) -> str:
    """Return the kind of file that is missing for some ranks.

    accelerate loads a checkpoint with only the main process's random state, which is all that
    diffusers' examples save. So more are expected only if another checkpoint has more.
    """
    counts, most = _of_ranks(names), [_of_ranks(other) for other in others]
    for stem, count in counts.items():
        wanted = ranks
        if stem == _RANDOM and f"{_RANDOM}0.pkl" in names:
            wanted = min(ranks, max((other.get(stem, 0) for other in most), default=0))
        if count < wanted:
            return f"{count} of {wanted} files {stem}N are there"
    return ""


def _of_ranks(names: Sequence[str]) -> Mapping[str, int]:
    """Return the number of files of each kind that every rank may write."""
    return collections.Counter(kind[1] for kind in map(_OF_RANKS.match, names) if kind)


def _first_problem(paths: Iterable[str]) -> str:
    return next(filter(None, map(checkpoint_files.problem, paths)), "")
