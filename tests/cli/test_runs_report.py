"""`saferun runs report`: a run that others can read, as Markdown, as one page, and as JSON."""

import base64
import hashlib
import html.parser
import json
import os
import re
import stat

import pytest
from command import call
from helpers import until
from user_machine import MITIGABLE, NOW, OK, WRONG, event, journal

import saferun

EVIL = "a\x1b[31mb\u202ec</pre></style><script>alert(1)</script><img src=x onerror=y>\"'```` ` @all"


class Page(html.parser.HTMLParser):
    """The elements of a page, with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}


def page(machine, *argv: str) -> Page:
    return Page(machine.ask("report", "last", "--html", "-", *argv))


def evil_journal(machine) -> None:
    facts = {"attempt": 1, "kind": EVIL, "root_line": EVIL, "reason": EVIL, "decided_by": [EVIL]}
    facts["stack"] = [EVIL]
    places = [{"rank": 0, "pid": 1, "what": EVIL, "frame": EVIL, "odd": True, "helpers": [EVIL]}]
    finding = {"level": "problem", "area": EVIL, "what": EVIL, "fix": EVIL}
    begun = {"gpus": 1, "versions": [EVIL], "gpu_names": [EVIL]}
    place = journal(
        machine.runs,
        "r",
        event("attempt", attempt=1, mitigations=[EVIL], by={"host": EVIL}, **begun),
        event("hang", silent_s=1, ranks=places),
        event("preflight", granted=False, findings=[finding]),
        event("fault", what=EVIL),
        event("ended", status=1, lived_s=1, action="stop", signals=[EVIL], **facts),
        event("end", status=1, reason=EVIL),
        plan={"script": EVIL, "command": [EVIL], "profile": EVIL, "env": {EVIL: {"value": EVIL}}},
    )
    (place / "attempt-1.stderr").write_text(f"{EVIL}\n" * 3, encoding="utf-8")


def test_a_run_is_told_attempt_by_attempt(machine):
    place = machine.launch(MITIGABLE, WRONG, command_line=("train.py", "--lr", "1"))
    told = machine.ask("report", place.name)
    assert told.startswith("## Failed at attempt 2: The script ended with an exc")
    first, second = told.split("\n### Attempt ")[1:]
    assert first.startswith("1: failed: nccl-shm-failed\n") or "nccl-shm-failed on rank 1" in first
    assert "decision: again: with nccl-shm-off" in first
    assert "mitigation nccl-shm-off: no segment in /dev/shm is needed; cost: " in second
    assert "changed: `NCCL_SHM_DISABLE=1`" in second
    assert ">> [rank1]: KeyError: 'label'" in second
    shown = page(machine)
    assert "New here: nccl-shm-off (NCCL_SHM_DISABLE=1)" in shown.text
    assert "deciding line: [rank1]: KeyError: 'label'" in shown.text
    assert "What to do:" in shown.text
    versions = f"saferun {saferun.__version__}"
    data = json.loads(machine.ask("report", "last", "--json"))
    assert (data["schema"], data["run"]["outcome"], data["left_out"]) == (1, "failed", 0)
    assert (data["versions"][0], data["plan"]["script"]) == (versions, "train.py")
    first, second = data["attempts"]
    assert [change["name"] for change in second["added"]] == ["nccl-shm-off"]
    (decides,) = [row["text"] for row in first["tails"][0]["rows"] if row["decides"]]
    assert decides.startswith("[rank1]: Error while creating shared memory segment /dev/shm/nccl")
    assert "\nend of stderr\n" in told
    (place / "attempt-2.stderr").replace(place / "attempt-2.stdout")  # as of one terminal
    assert "\nend of output\n" in machine.ask("report", "last")


def test_what_is_known_of_the_machine_and_of_a_crash_is_shown(machine):
    frames = [f'File "train.py", line {n} in step' for n in (7, 8)]
    facts = {"gpus": 8, "gpu_names": ["NVIDIA H100"], "versions": ["torch 2.13.0"]}
    ended = event("ended", attempt=1, status=1, lived_s=1, kind="abort-unknown", stack=frames)
    journal(machine.runs, "r", event("attempt", NOW, attempt=1, **facts), ended)
    told, shown = machine.ask("report", "r"), page(machine).text
    assert "- GPUs: 8 (NVIDIA H100)\n" in told
    assert "versions torch 2.13.0" in shown
    assert "".join(f"- stack: `{frame}`\n" for frame in frames) in told
    assert " ".join(frames) in shown
    lines = [line.split(maxsplit=1) for line in machine.ask("show", "r").splitlines()]
    assert [line for line in lines if line[:1] == ["stack"]] == [["stack", f] for f in frames]


def test_the_page_needs_nothing_else_and_its_policy_allows_nothing_else(machine):
    machine.launch(OK)
    text = machine.ask("report", "last", "--html", "-")
    shown = Page(text)
    policy = next(a["content"] for _, a in shown.elements if "http-equiv" in a)
    style = re.findall("<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style[0].encode()).digest()).decode()
    assert (len(style), f"style-src 'sha256-{digest}';" in policy) == (1, True)
    assert policy.startswith("default-src 'none'; ")
    assert not shown.tags & {"script", "link", "img", "iframe", "object", "form", "base"}
    assert not any(name in ("src", "style", "srcset") for _, a in shown.elements for name in a)


def test_what_a_job_wrote_is_no_markup(machine):
    evil_journal(machine)
    text = machine.ask("report", "last", "--html", "-")
    shown = Page(text)
    assert not shown.tags & {"script", "img"}
    assert "<script>alert(1)</script>" in shown.text
    links = [a["href"] for tag, a in shown.elements if tag == "a"]
    assert all(link.startswith("#attempt-") for link in links)
    told = machine.ask("report", "last")
    assert all(c.isprintable() or c == "\n" for c in told + text.replace("\t", ""))
    fence = re.search("^(`{5,})text\n(.*?)\n\\1$", told, re.DOTALL | re.MULTILINE)
    assert fence, told
    rest = told.replace(fence[0], "")
    outside = re.sub("(?<!`)(`+)(?!`).*?(?<!`)\\1(?!`)", "", rest)
    assert rest != outside
    assert "@all" not in outside
    assert "<script" not in outside


def test_a_price_of_the_profile_is_in_the_journal_and_another_can_be_given(machine):
    machine.launch(OK, command_line=("--set", "price_per_gpu_hour=2.5", "train.py"))
    (begun,) = json.loads(machine.ask("report", "last", "--json"))["attempts"]
    assert begun["attempt"]["price_per_gpu_hour"] == 2.5
    facts = {"attempt": 1, "gpus": 4, "price_per_gpu_hour": 2.5}
    ended = event("end", NOW + 5400, 5400, status=0)
    journal(machine.runs, "r", event("attempt", NOW, **facts), ended)
    used = "- used: 1 h 30 min, 6.00 GPU-hours, {} in money\n"
    assert used.format("15.00") in machine.ask("report", "r")
    assert used.format("6.00") in machine.ask("report", "r", "--price-per-gpu-hour", "1")
    assert (
        "6.00 in money"
        in Page(machine.ask("report", "r", "--html", "-", "--price-per-gpu-hour", "1")).text
    )


def test_a_price_is_a_number_and_needs_a_gpu(machine):
    journal(machine.runs, "r", event("attempt", attempt=1, gpus=0))
    for price in ("-1", "nan", "inf", "x"):
        machine.ask("report", "last", "--price-per-gpu-hour", price, status=2)
    argv = ("runs", "report", "r", "--price-per-gpu-hour", "2")
    done = call(*argv, environ=machine.environ, cwd=machine.cwd)
    assert "--price-per-gpu-hour: the run's journal knows of no GPU" in done.stderr


def test_the_page_is_a_private_file_written_at_once(machine):
    machine.launch(OK)
    file = machine.cwd / "report.html"
    file.write_text("old", encoding="utf-8")
    file.chmod(0o644)
    assert machine.ask("report", "last", "--html", str(file)) == ""
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert [path.name for path in machine.cwd.glob("report*")] == ["report.html"]
    told = machine.ask("report", "last", "--html", str(file), "--markdown")
    assert told.startswith("## Finished at the first attempt")


def test_what_is_no_plain_file_is_left_alone(machine):
    machine.launch(OK)
    target = machine.cwd / "target"
    target.write_text("mine", encoding="utf-8")
    (machine.cwd / "link").symlink_to(target)
    os.mkfifo(machine.cwd / "pipe")
    for name in ("link", "pipe", "."):
        assert "this is not a regular file" in machine.ask(
            "report", "last", "--html", str(machine.cwd / name), status=2
        )
    assert target.read_text(encoding="utf-8") == "mine"
    assert (machine.cwd / "link").is_symlink()
    message = machine.ask("report", "last", "--html", "/proc/none/x.html", status=69)
    assert "the report cannot be written" in message


def test_a_run_that_has_just_begun_makes_a_report(machine):
    with machine.running({"wait": str(machine.folder / "gate")}, waits_for='"started"'):
        assert "Running at the first attempt" in page(machine).text


def test_missing_facts_are_left_out(machine):
    place = journal(machine.runs, "r", event("attempt", attempt=1), plan={})
    shown = page(machine)
    for word in ("profile", "GPU", "None"):
        assert word not in shown.text
    (place / "events.jsonl").write_text("", encoding="utf-8")
    assert "saferun report" in page(machine).text


@pytest.mark.slow
def test_how_far_the_steps_have_come_is_noted_while_a_job_runs(machine):
    """The first note comes after five seconds."""
    says = "step 10 loss 3.5\nstep 20 loss 3.25\n"
    with machine.running(
        {"wait": str(machine.folder / "gate"), "says": says}, waits_for='"started"'
    ):
        (noted,) = until(lambda: list(machine.runs.glob("*/attempt-1.steps")))
        (s, step, loss) = json.loads(noted.read_text(encoding="utf-8"))
        assert (0 <= s < 60, step, loss) == (True, 20, 3.25)


def test_trials_are_summed_up(machine):
    place = journal(machine.runs, "r", event("attempt", attempt=1), event("end", status=0))
    (place / "state").mkdir()
    ended = [{"state": "COMPLETE"}, {"state": "FAIL", "cause": "cuda-oom"}]
    trials = [{"number": n, "params": {"batch": 8 << n % 2}, **ended[n % 2]} for n in range(10)]
    lines = "".join(json.dumps(one) + "\n" for one in trials)
    (place / "state" / "trials.jsonl").write_text(lines, encoding="utf-8")
    for text in (page(machine).text, " ".join(machine.ask("report", "r").split())):
        assert all(part in text for part in ("10 trials", "5 cuda-oom", "batch"))
