"""No frame of ours stands in a traceback that a user sees."""

import json
import sys

import pytest
from interpreters import SITE, fake_torch
from repo import source

FAULTS = {
    "DDP": "DDP(torch.nn.Identity())",
    "a sampler": "torch.utils.data.RandomSampler([])",
    "a loader": "torch.utils.data.DataLoader([1], batch_size=-1)",
    "the second group": "dist.init_process_group('gloo')",
    "fully_shard": "fully_shard(torch.nn.Linear(2, 2), mesh=3)",
    "FSDP": "FSDP(3)",
}


OLDER = pytest.mark.skipif(sys.version_info < (3, 11), reason="older: Python puts the entry back")


@OLDER
def test_what_torch_raises_has_no_frame_of_ours(run_ranks):
    job = run_ranks(
        source("inject/raise_in_torch"), environ={"FAULTS": json.dumps([*FAULTS.values()])}
    )
    lines = job.out.splitlines()
    assert len(lines) == len(FAULTS), job.err
    assert not [line for line in lines if not line.endswith(" False")]


@OLDER
def test_an_import_that_fails_has_the_traceback_that_it_has_without_us(interpreters):
    fake = fake_torch(interpreters.folder, "raise OSError('broken torch')")
    script = "import torch"
    bare = interpreters.run(script, PYTHONPATH=str(fake))
    ours = interpreters.run(script, hooks={"excepthook": "on"}, PYTHONPATH=f"{SITE}:{fake}")
    assert ours.err == bare.err


@pytest.mark.parametrize("cause", ["", " from ValueError('first')"], ids=["alone", "caused"])
def test_what_ends_a_rank_is_printed_without_our_frames_in_every_python(interpreters, cause):
    """A wrapper stands for all: 3.9 and 3.10 have its frame until it is printed."""
    script = f"""
import _saferun.inject.hidden_frames as trace
def users(): raise KeyError("the error"){cause}
trace.wrapped(users, lambda original: original())()
"""
    error_file = str(interpreters.folder / "error.json")
    ran = interpreters.run(
        script, hooks={"excepthook": "on"}, RANK="0", TORCHELASTIC_ERROR_FILE=error_file
    )
    assert "in users" in ran.err
    assert "inject" not in ran.err
