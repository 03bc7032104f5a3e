"""When a training's loss is not a number any more, in the words of ten programs, and when not."""

# ruff: noqa: E501 (what programs print is not wrapped)

import pytest

from saferun.diagnosis.evidence import NoNumber
from saferun.diagnosis.losses import Losses, sentence
from saferun.diagnosis.reading import progress

BAR = "\rEpoch 3:  {n}%|##        | {n}/100 [00:01<00:10,  8.60it/s, v_num=0, train_loss={loss}]"
MEGATRON = (
    " [2026-01-01 10:00:00] iteration {n:8}/ 1000 | consumed samples:  160 | elapsed time per "
    "iteration (ms): 123.4 | learning rate: 1.5E-04 | lm loss: {loss} | loss scale: 1.0 | grad "
    "norm: {loss} | number of nan iterations: 0 |"
)
ULTRALYTICS = (
    "        1/3      2.61G  {loss:>9}      {loss}      {loss}   18   640: 9%|# | {n}/80 [00:01<"
)
# The line of a step `{n}` with its loss.
FORMS = {
    "plain": "loss: {loss}",
    "tensor": "{n} loss tensor({loss}, device='cuda:0')",
    "transformers 5": "{{'loss': '{loss}', 'grad_norm': '1.2', 'epoch': '0.{n}'}}",
    "Lightning": BAR,
    "Lightning 2": BAR.replace("train_loss", "train_loss_step"),
    "nanoGPT": "iter {n}: loss {loss}, time 150.23ms, mfu 12.30%",
    "nanochat": "step {n:05}/21400 (0.05%) | loss: {loss} | lrm: 1.00 | dt: 5.00ms",
    "Megatron": MEGATRON,
    "DeepSpeed": "steps: {n} loss: {loss} iter time (s): 0.12 samples/sec: 260.1",
    "timm": "Train: 0 [{n:4}/1251 (  8%)]  Loss: {loss} ({loss})  Time: 0.5s",
    "ultralytics": ULTRALYTICS,
    "torchtitan": (
        "\x1b[0m[titan] 2026-01-01 - root - INFO - \x1b[31mstep: {n:2}  \x1b[32mloss:  {loss}  "
        "\x1b[33mgrad_norm:  1.2"
    ),
    "Keras": "{n}/100 ━━━━ 1s 10ms/step - accuracy: 0.1 - loss: {loss} - val_loss: 1.0",
    "Keras 2": " {n}/100 [>.............................] - ETA: 1:32 - loss: {loss} - accuracy: 0.09",
    "Keras in a terminal": "\x1b[1m {n}/100\x1b[0m \x1b[32m━\x1b[0m\x1b[37m━\x1b[0m \x1b[1m1s\x1b[0m - loss: {loss}",
    "mmengine": (
        "01/02 10:00:00 - mmengine - INFO - Epoch(train)  [1][ {n}/2931]  lr: 2.0000e-02  eta: "
        "0:39:15  memory: 2389  loss: {loss}  loss_rpn_cls: {loss}  acc: 0.0000"
    ),
    "mmdetection 2": (
        "2026-01-02 10:00:00,649 - mmdet - INFO - Epoch [1][{n}/7517]\tlr: 0.00125, eta: 4:33:09, "
        "loss_rpn_cls: 0.0989, loss_bbox: 0.1484, loss: {loss}"
    ),
    "fairseq": (
        "2026-01-02 10:00:00 | INFO | train_inner | epoch 001:   {n} / 160368 loss={loss}, "
        "nll_loss={loss}, ppl=611.12, num_updates={n}, gnorm=3.23"
    ),
    "NeMo": (
        "Training epoch 0, iteration {n}/99 | lr: 1.499e-06 | global_step: {n} | "
        "reduced_train_loss: {loss} | train_step_timing in s: 0.35"
    ),
    "Composer": "[batch={n}/1000]:\n\t Train loss/train/total: {loss}",
    "torchtune": "1|{n}|Loss: {loss}:  10%|# | {n}/100 [00:10<01:30,  1.00s/it]",
    "detectron2": "[01/02 10:00:00 d2.utils.events]:  eta: 1:00  iter: {n}  total_loss: {loss}  loss_cls: 1",
    "TRL": "{{'loss': {loss}, 'grad_norm': 0.5, 'rewards/chosen': -1.09, 'epoch': 0.{n}}}",
    "llm.c": "step   {n}/74 | loss     {loss} (+nanz)| norm    {loss} (+nanz)| lr 3e-4",
    "brackets": "[R0] | E4 iter[ {n}/150] | [Loss] {loss} | [exp] ./e | [time] 0.4m",
    "a loss of several": "[train: 9, {n} / 125] FPS: 21.6 ,  Loss/total: {loss}  ,  Loss/bbox: 0.1",
    "a wide colon": "第 {n} 次, Loss\uff1a{loss}",
    "infinite": "step {n} train_loss={loss}",
}
# How a form writes a number, and what is none; all others write 2.31 and nan.
WRITTEN = {
    "Lightning": ("2.310", "nan.0"),
    "Megatron": ("9.9E+00", "NAN"),
    "Keras": ("2", "nan"),
    "infinite": ("2.0", "inf"),
}
WRITING = [(form, *WRITTEN.get(name, ("2.31", "nan"))) for name, form in FORMS.items()]


def told(lines: list[str], *, has_numbers: bool = False) -> NoNumber | None:
    losses = Losses(0.0, has_numbers=has_numbers)
    return losses.take(["\n".join([*lines, ""]).encode()], 2.0)


def lines(form: str, value: str, begin: int, end: int) -> list[str]:
    return [form.format(n=n, loss=value) for n in range(begin, end)]


@pytest.mark.parametrize(("form", "good", "bad"), WRITING, ids=FORMS)
def test_a_loss_that_stays_no_number_is_known_in_each_form(form, good, bad):
    before = lines(form, good, 10, 15)
    assert told(before + lines(form, bad, 15, 19)) is None, "four lines are not enough"
    found = told(before + lines(form, bad, 15, 20))
    assert (found.value, found.good) == ("infinite" if bad == "inf" else "nan", good)
    assert found.step in (15, None)
    assert told(lines(form, good, 10, 40)) is None
    output = "\n".join([*before, ""]).encode()  # what a watcher sees is the same loss
    assert progress.last_loss(output) == good
    assert progress.last_loss(output.replace(good.encode(), bad.encode())) == bad
    if found.step:
        assert progress.reports(output)[-1][0] == 14


def test_the_same_step_of_another_epoch_is_another_place():
    """One line an epoch, at its last step: no bar that is drawn again."""
    form = "Epoch {n}: 100%|####| 40/40 [00:01<00:00, 8.60it/s, v_num=0, train_loss={loss}]"
    found = told(lines(form, "2.0", 0, 3) + lines(form, "nan", 3, 8))
    assert (found.step, found.epoch) == (40, 3)


@pytest.mark.parametrize(
    ("line", "epoch"),
    [
        ("Epoch(train)  [4][  {n}/2931]  loss: {loss}", 4),
        ("Epoch: [4]  [  {n}/1251]  eta: 0:20:11  loss: {loss} (7.1)", 4),
        ("Train: 4 [  {n}/1251 (  8%)]  Loss: {loss} (6.9)", 4),
        ("Train Epoch: 4 [{n}/60000 (1%)]\tLoss: {loss}", 4),
        ("epoch 004:  {n} / 160368 loss={loss}, ppl=6", 4),
        (ULTRALYTICS.replace(" 1/3 ", " 4/9 "), 4),
        ("{{'loss': {loss}, 'epoch': 4.27}}", 4),
        ("Epoch 4/10\n  {n}/100 [=====>........] - ETA: 1s - loss: {loss}", 4),
        ("step {n} loss {loss}", None),
    ],
)
def test_the_epoch_of_a_loss_is_known_where_it_is_told(line, epoch):
    found = told(lines(line, "2.0", 10, 15) + lines(line, "nan", 15, 40))
    assert found.epoch == epoch


HEALTHY = {
    "a scaler that skips steps": lines("step {n} loss: 2.1 grad-norm: {loss}", "nan", 0, 30),
    "no number yet": lines("step {n} best loss: {loss} loss: {loss}", "inf", 0, 30),
    "the best loss so far": ["loss: 2.0", *lines("best loss: {loss}", "inf", 0, 30)],
    "an evaluation without data": [
        *lines("step {n} loss 2.0", "", 0, 9),
        *lines("step {n} val_loss {loss}", "nan", 0, 9),
        *lines("Validation {n} | loss: {loss}", "nan", 0, 9),
        *lines("Test set: Average loss: {loss}", "nan", 0, 9),
        *lines("{{'eval_loss': {loss}, 'epoch': 1.0}}", "nan", 0, 9),
    ],
    "another loss beside it": [
        "aux_loss=1.0 loss=2.0",
        *lines("aux_loss={loss} loss=2.0", "nan", 0, 9),
    ],
    "it comes back": [
        *lines("loss: {loss}", "2.0", 0, 3),
        *lines("loss: {loss}", "nan", 0, 30),
        "loss: 2.2",
    ],
    "ranks without a loss": [
        line
        for n in range(30)
        for line in (f"[rank0] step {n} loss: nan", f"[rank1] step {n} loss: 2.{n}")
    ],
    "a bar that is drawn again": [BAR.format(n=4, loss="2.0"), *[BAR.format(n=5, loss="nan")] * 30],
}


@pytest.mark.parametrize("output", HEALTHY.values(), ids=HEALTHY)
def test_other_things_that_are_no_number_are_no_reason(output):
    assert told(output) is None


def test_twenty_steps_are_enough_where_few_of_them_are_printed():
    form = "step {n}0 loss {loss}"
    assert told(lines(form, "2.0", 1, 5) + lines(form, "nan", 5, 7)) is None
    found = told(lines(form, "2.0", 1, 5) + lines(form, "nan", 5, 8))
    assert found is not None
    assert sentence(found) == "the loss is nan since step 50 (2.0 at step 40)"


def test_the_step_of_a_dictionary_is_that_of_the_bar_above_it():
    bar = "  1%|          | {n}/1000 [00:01<00:10,  1.2s/it]\r"
    output = [
        line
        for n in range(10, 20)
        for line in (bar.format(n=n), f"{{'loss': {'nan' if n > 13 else 2.0}, 'epoch': 0.1}}")
    ]
    found = told(output)
    assert (found.step, found.good_step) == (14, 13)


def test_after_such_an_end_an_attempt_need_not_print_a_number_first():
    output = lines("step {n} loss {loss}", "nan", 0, 5)
    assert told(output) is None
    assert told(output, has_numbers=True) is not None


def test_what_was_saved_before_the_look_that_did_not_show_the_number_yet_is_older():
    losses = Losses(100.0)
    good, more = lines("step {n} loss 2.0", "", 0, 5), lines("step {n} loss 1.9", "", 5, 9)
    bad = lines("step {n} loss {loss}", "nan", 9, 20)
    for at_s, output in ((110.0, good), (120.0, good), (130.0, good + more)):
        assert losses.take(["\n".join([*output, ""]).encode()], at_s) is None
    found = losses.take(["\n".join([*good, *more, *bad, ""]).encode()], 140.0)
    assert found.good_at_s == 120.0
