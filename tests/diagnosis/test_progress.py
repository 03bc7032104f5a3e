"""How far a job came: the first and the last step in its output, and whether it ran for long."""

import pytest
from cases import check_cases
from hypothesis import given
from hypothesis import strategies as st
from job_logs import TRACEBACK, diagnose

from saferun.diagnosis.reading import log_reader, progress
from saferun.diagnosis.reading.progress import HEAD_BYTES, first_step, last_step

OUTPUTS = {
    "plain steps": (b"step 1 loss 3\nstep 2 loss 2\n", 1),
    "resumed": (b"resumed at step 10\nstep 11 loss 3\nstep 12 loss 2\n", 11),
    "logged every hundredth": (b"iter 100: loss 3\niter 200: loss 2\n", 100),
    "nanoGPT resumed": (b"iter 2000: loss 3.1, time 9ms\niter 2010: loss 3.0, time 9ms\n", 2000),
    "a bar": (b"  0%|  | 0/90 [00:00<?]\r  1%|  | 1/90 [00:01<?]\r", 0),
    "a resumed bar": (b" 50%|## | 45/90 [00:00<?]\r 51%|## | 46/90 [00:01<?]\r", 45),
    "loading first": (
        b"Loading shards: 1/3 [00:01]\rLoading shards: 2/3 [00:02]\r"
        b" 50%|##| 500/1000 [00:01<9]\r 50%|##| 501/1000 [00:02<9]\r",
        500,
    ),
    "a dictionary": (b"{'step': 40, 'loss': 1}\n{'step': 50, 'loss': 1}\n", 40),
    "with a time in front": (b"12:00:01 step: 7\n12:00:02 step: 8\n", 7),
    "after other words": (b"hello\nstep 7\nstep 8\n", 7),
    "two counters": (b"batch 1\nstep 5\nbatch 2\nstep 6\n", 5),
    "of Megatron": (
        b" [2025-10-02 12:20] iteration       47/      50 | skipped iterations:   0 |\n"
        b" [2025-10-02 12:20] iteration       48/      50 | skipped iterations:   1 |\n",
        47,
    ),
    "of diffusers": (
        b"Steps:  44%|####4     | 440/1000 [00:01<9]\rSteps:  45%|####5     | 450/1000 [00:02<9]\r",
        440,
    ),
    "of fairseq": (b"epoch 002:     90 / 400 loss=3\nepoch 002:    100 / 400 loss=3\n", 90),
    "of PyTorch's examples": (b"Epoch: [3][  10/5005]\tTime\nEpoch: [3][  20/5005]\tTime\n", 10),
    "of OpenMMLab": (
        b"Epoch(train)  [1][ 50/925]  lr: 1e-4\nEpoch(train)  [1][100/925]  lr: 1e-4\n",
        50,
    ),
    "of timm": (b"Train: 0 [  50/1251 (  4%)]  Loss\nTrain: 0 [ 100/1251 (  8%)]  Loss\n", 50),
    "of a build": (b"[1/9] nvcc -c train.cu\n[2/9] nvcc -c train.cu\n", None),
    "a logger's place": (b"[stage3.py:1991:step] 1 flush\n[stage3.py:1991:step] 2 flushes\n", None),
    "a thousand in words": (b"steps = 4,875\nsteps = 5,875\n", None),
    "seconds of a step": (b"iter 0.25 s\niter 1.25 s\n", None),
    "one number only": (b"step 5 loss 3\n", None),
    "settings": (b"max_steps: 20000\nsave_steps=500\nwarmup steps: 100\n", None),
    "the same number again": (b"step 5 rank 0\nstep 5 rank 1\n", None),
    "nothing": (b"", None),
}


def test_the_first_step_of_an_attempt_is_read_from_the_beginning_of_its_output():
    found = {name: first_step(output) for name, (output, _) in OUTPUTS.items()}
    assert found == {name: step for name, (_, step) in OUTPUTS.items()}


LAST = {
    "plain steps": (b"step 1 loss 3\nstep 2 loss 2\nboom\n", 2),
    "a validation after": (b"step 8\nstep 9\nval batch 1\nval batch 2\n", 9),
    "ranks mixed": (b"step 7 rank 0\nstep 8 rank 0\nstep 7 rank 1\n", 8),
    "a bar": (b" 50%|## | 45/90 [00:00<?]\r 51%|## | 46/90 [00:01<?]\r", 46),
    "settings": (OUTPUTS["settings"][0], None),
}


def test_the_last_step_of_an_attempt_is_read_from_the_end_of_its_output():
    found = {name: last_step(output) for name, (output, _) in LAST.items()}
    assert found == {name: step for name, (_, step) in LAST.items()}


def test_the_lines_of_a_log_and_the_bytes_of_an_output_have_the_same_steps():
    for name, (output, step) in OUTPUTS.items():
        log = log_reader.read([output.replace(b"\r", b"\n")])
        steps = progress.steps(log.lines, 0, len(log.lines))
        assert step is None or step in {one.number for one in steps}, name


def test_steps_are_those_between_two_lines():
    lines = log_reader.of_text("step 1\nstep 2\nstep 3\nstep 4\n").lines
    assert [one.number for one in progress.steps(lines, 1, 3)] == [2, 3]


RESUMED = " 50%|##   | 45/90 [00:00<?, ?it/s]\n"
# The last lines before a failure, and what they show.
LONG = [
    ("step 499", False), ("step 500", True), ("epoch 9", False), ("epoch 10", True),
    ("9/90 [29:59<1:00]", False), ("9/90 [30:00<1:00]", True), ("9/90 [30:01<1:00]", True),
    ("9/90 [0:30:00<1:00]", True), ("9/90 [1:00:00<1:00]", True), ("9/90 [00:10<1:00]", False),
    ("step 900 " + RESUMED, False), (RESUMED + "step 900", True), ("", False),
    ("Epoch 0:  5%|# | 500/9000 [00:10<1:00]", True), ("train: 5%|# | 499/900 [00:10<1:00]", False),
    ("  5%|# | 500/9000 [00:10<1:00, loss=2.1]", True), (" 5%|# | 500/9000 [00:10<1:00]", False),
    ("Loading: 5%|# | 500/9000 [00:10<1:00, loss=2]", False),
    ("tokenize train: 5%|# | 500/9000 [00:10<1:00]", False), ("500/9000 [00:10<1:00]", False),
    ("step 900\n" + "x\n" * 199, True), ("step 900\n" + "x\n" * 200, False),
    ("| 9/90 [00:30:cut", True), ("| 9/90 [00:29:cut", False), ("| 9/90 [1:00:cut", True),
    ("    0:30:00<", True), ("    0:29:59<", False), ("    :00:00<", True),
]  # fmt: skip
EARLY = [
    ("step 0", True), ("step 1", True), ("step 2", False), ("", False), (RESUMED, True),
    (RESUMED + "step 2", False), ("step 20\nstep 1", True), ("step 21\nstep 1", False),
    ("epoch 1 step 1", True), ("epoch 2 step 1", False), ("1/90 [00:01<1:00]", True),
    ("9/90 [00:01<1:00]", False), ("30/30 [00:09<0:00]\nstep 1", True),
    ("30/30 [00:09<0:00]", False), ("step 1\n" + "x\n" * 200, False),
]  # fmt: skip
DIVERGED = [
    ("loss: nan", True), ("loss=-inf", True), ("loss 2.5", False), ("loss: 12345", True),
    ("loss: 1234", False), ("loss: nan\n" + "x\n" * 19, True), ("loss: nan\n" + "x\n" * 20, False),
    ("x" * 500 + " loss: nan", True), ("loss: nan " + "x" * 500, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("shows", "cases"),
    [(progress.is_long, LONG), (progress.is_early, EARLY), (progress.diverged, DIVERGED)],
    ids=["long", "early", "diverged"],
)
def test_what_the_last_lines_show(shows, cases):
    def check(text, shown):
        assert shows(log_reader.of_text(text.removesuffix("\n")).lines) is shown

    check_cases(cases, check)


def test_a_bar_that_is_no_trainings_has_the_age_of_a_wait():
    def check(text, age_s, shown):
        assert progress.bar_of_age(log_reader.of_text(text).lines, age_s) is shown

    cases = [
        ("9/90 [01:34<1:00]", 100, False), ("9/90 [01:35<1:00]", 100, True),
        ("9/90 [01:50<1:00]", 100, True), ("9/90 [01:51<1:00]", 100, False),
        ("90/90 [01:40<0:00]", 100, False), ("9/90 [01:40<1:00] loss=2", 100, False),
        ("9it [01:40, 1it/s]", 100, True), ("9/90 [2:00:10<1:00]", 7210, True),
        ("9/90 [2:00:10<1:00]", 6000, False), ("90/90 [01:40<0:00]\n9/90 [01:40<1:0]", 100, True),
        ("9/90 [01:40<1:00]\n" + "x\n" * 200, 100, False), ("", 100, False),
        ("9/90 [01:40<1:00]" + "x" * 500, 100, False),
    ]  # fmt: skip
    check_cases(cases, check)


@pytest.mark.parametrize(
    ("output", "went_on"),
    [
        ("step 1\nstep 2\nstep 3\n", True),
        ("step 1\nstep 2\nstep 2\n", False),
        ("step 3\nstep 2\nstep 1\n", False),
        ("[rank1]: step 1\n[rank1]: step 2\n[rank1]: step 3\n", False),
        ("900/900 [00:01<00:00]\nstep 1\nstep 2\nstep 3\n", True),
        ("batch 1\nstep 50\nbatch 2\nstep 60\nbatch 3\nstep 70\n", True),
        ("step 1\n[rank1]: step 9\nstep 2\nstep 3\n", True),
        ("step 0\nstep 1\nstep 0\nstep 2\n", True),
        ("step 0\nstep 1\nstep 0\nstep 1\n", False),
        ("Epoch 0.5\nEpoch 1.0\nEpoch 1.5\n", True),  # no steps
        ("Trial 7 finished\nTrial 8 pruned\nTrial 9 finished\n", True),
        ("[1/9] a.c\n[2/9] b.c\n[3/9] c.c\n", True),
    ],
)
def test_three_growing_steps_of_a_rank_mean_that_the_job_went_on(output, went_on):
    lines = log_reader.of_text(output).lines
    assert progress.went_on(progress.steps(lines, 0, len(lines)), 0, None) == went_on


@pytest.mark.parametrize("step", [first_step, last_step])
@given(data=st.binary(max_size=3000))
def test_any_bytes_are_read(step, data):
    assert step(data) is None or step(data) >= 0


def test_only_the_beginning_and_the_end_are_looked_at():
    assert first_step(b"x" * HEAD_BYTES + b"\nstep 1\nstep 2\n") is None
    assert last_step(b"step 1\nstep 2\n" + b"x" * HEAD_BYTES) is None


ILLEGAL = "RuntimeError: CUDA error: an illegal memory access was encountered"
SPORADIC = [  # the line before it, and what was measured; whether it may pass
    ("", {"age_s": 20.0, "step": 3}, False),
    ("", {"age_s": 7200.0}, True),
    ("", {"age_s": 60.0, "step": 9000}, True),
    ("Epoch: [2][300/7922] loss 1", {}, False),
    ("Epoch: [19][300/7922] loss 1", {}, True),
    ("    85/299     10.4G   0.05  640:  25%|###", {}, True),
    ("     3/299     10.4G   0.05  640:  25%|###", {}, False),
]


def test_how_far_the_job_came_tells_a_sporadic_fault():
    def check(line, known, passes):
        found = diagnose(f"{line}\n{TRACEBACK}{ILLEGAL}", **known)
        assert found.kind == "cuda-illegal-access" + "-sporadic" * passes

    check_cases(SPORADIC, check)


def of_two_ranks(form: str, first: tuple[int, int], amount: int = 1) -> bytes:
    steps = range(0, 4 * amount, amount)
    lines = [form.format(r=rank, n=first[rank] + step) for step in steps for rank in (0, 1)]
    return "\n".join([*lines, ""]).encode()


RESUMED = of_two_ranks("rank {r} step {n} loss fixed", (20, 0))
ALIKE = of_two_ranks("rank {r} step {n} loss fixed", (20, 20))
APART = {
    "a rank that begins anew": (RESUMED, "20, 0"),
    "by a prefix": (of_two_ranks("[rank{r}]: iter {n}: loss 3.1", (20, 0)), "20, 0"),
    "by torchrun's prefix": (of_two_ranks("[default{r}]:step: {n}", (20, 30)), "20, 30"),
    "epochs": (of_two_ranks("[GPU{r}] Epoch {n} | Batchsize: 32 | Steps: 8", (2, 0)), "2, 0"),
    "steps before the rank": (of_two_ranks("step {n} (local_rank={r})", (7, 0)), "7, 0"),
    "every tenth step": (of_two_ranks("[R{r}] step {n}", (30, 10), 10), "30, 10"),
    "a comma": (of_two_ranks("Rank {r}, step {n}, loss 1", (30, 10)), "30, 10"),
    "one save": (of_two_ranks("[R{r}] step {n}", (20, 10), 10), "20, 10 near"),
    "alike": (ALIKE, ""),
    "in turns": (of_two_ranks("rank {r} step {n}", (20, 21), 2), ""),
    "a first line that is lost": (ALIKE.replace(b"rank 1 step 20 loss fixed\n", b"", 1), ""),
    "one line each": (b"rank 0 step 20\nrank 1 step 0\n", None),
    "no ranks": (of_two_ranks("step {n}", (20, 0)), None),
    "settings": (b"rank 0 batch 4\nrank 1 batch 8\n" * 3, None),
    "memory": (of_two_ranks("GPU {n}.5 GiB of {r}", (20, 0)), None),
    "counts otherwise": (b"rank 0 step 1\nrank 1 step 9\nrank 0 step 2\nrank 1 step 11\n", None),
}


def glued(log: bytes) -> bytes:
    """The same where the ends of lines come late, as with `python -u`."""
    lines = log.split(b"\n")
    return b"\n".join(a + b + b"\n" for a, b in zip(lines[::2], lines[1::2], strict=False)) + b"\n"


@pytest.mark.parametrize("made", [bytes, glued])
def test_ranks_that_begin_at_different_steps_are_told_from_those_that_take_turns(made):
    said = {}
    for name, (log, _) in APART.items():
        found = progress.apart(log_reader.read([made(log)]).lines)
        said[name] = found and found.difference + " near" * bool(
            found.difference and not found.is_far
        )
    wanted = {}
    for name, (_, text) in APART.items():
        steps = text.removesuffix(" near").split(", ") if text else []
        named = ", ".join(f"rank {rank} at {step}" for rank, step in enumerate(steps))
        wanted[name] = text and named + " near" * text.endswith(" near")
    if made is glued:  # whose ends torchrun itself writes, and what is no step then either
        for name in ("by torchrun's prefix", "no ranks", "memory"):
            del said[name], wanted[name]
    assert said == wanted
