"""A report's page in a real browser: no error, no request, no scrolling sideways, accessible."""

import json
import os
import pathlib

import pytest
from browser import Browser
from command import call
from repo import ROOT
from sandbox import text_of, write
from user_machine import NOW, event, journal

pytestmark = pytest.mark.browser

WIDTHS = (390, 1280)
SCHEMES = ("light", "dark")
LONG = "/" + "x" * 3000 + "</pre><script>document.title = 'owned'</script>"
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}


@pytest.fixture(scope="module")
def axe() -> str:
    folder = pathlib.Path(os.environ.get("SAFERUN_TEST_AXE", ROOT / ".axe"))
    found = sorted(folder.rglob("axe.min.js"))
    if not found:
        pytest.skip("no axe-core (make test-browser)")
    return text_of(found[0])


def everything(base: pathlib.Path) -> None:
    """A run in which all that a page can show is there, long and hostile."""
    events = []
    for number in range(1, 41):
        begun = {"attempt": number, "gpus": 8, "price_per_gpu_hour": 2.5, "by": {"host": "node-1"}}
        names = ["autotune-off", LONG] if number > 1 else []
        events.append(event("attempt", NOW + number * 100, mitigations=names, **begun))
        if number == 1:
            places = [{"rank": n, "pid": 100 + n, "what": LONG, "frame": LONG} for n in range(40)]
            events.append(event("hang", silent_s=700, ranks=places, stacks="hang-1.txt"))
        failed = {"status": 1, "kind": "nccl-timeout", "root_rank": 3, "root_line": LONG}
        good = {"status": 0, "action": "done"}
        end = good if number == 40 else {**failed, "action": "again", "reason": LONG}
        events.append(event("ended", attempt=number, lived_s=80, decided_by=[LONG], **end))
    place = journal(
        base,
        "r",
        event("nodes", attempt=1, hosts={str(n): f"node-{n}" for n in range(200)}),
        *events,
        event("end", NOW + 4100, 4100, status=0, advice=LONG),
        plan={"script": LONG, "command": ["torchrun", LONG], "env": {"A": {"value": LONG}}},
    )
    write(place / "hang-1.txt", f"{LONG}\n" * 50)
    write(place / "attempt-1.stderr", f"step 1\n{LONG}\n" * 300)
    steps = "".join(f"step {n} loss {9 / n}\n" for n in range(1, 500))
    write(place / "attempt-2.stdout", steps + '  File "/lib/python3.9/a.py", line 1\n')
    for folder in ("receipts", "state"):
        (place / folder).mkdir()
    for rank in range(64):
        head = {"v": 1, "at": 1.0, "pid": 100 + rank, "rank": rank}
        lines = [{**head, "hook": "bootstrap", "outcome": "applied"}]
        lines += [{**head, "hook": "compile", "outcome": "failed", "error": LONG + str(rank)}]
        path = place / "receipts" / f"a1-r0-rank{rank}-pid{100 + rank}.jsonl"
        write(path, "".join(json.dumps(line) + "\n" for line in lines))
    trials = [
        {"number": n, "state": "FAIL", "cause": LONG, "params": {LONG: n % 2}} for n in range(9)
    ]
    best = {"study": LONG, "values": [0.5], "direction": "minimize"}
    trials = [{**one, **best, "cause": "SIGSEGV" * (one["number"] > 4) or LONG} for one in trials]
    trials.append({**best, "number": 9, "state": "COMPLETE", "cause": "", "params": {LONG: 0}})
    lines = "".join(json.dumps(one) + "\n" for one in trials)
    write(place / "state" / "trials.jsonl", lines)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("report")
    everything(place / "runs")
    argv = ("runs", "report", "r", "--run-dir", "runs", "--html", str(place / "r.html"))
    done = call(*argv, environ={"HOME": str(place), "PATH": os.defpath}, cwd=place)
    assert done.returncode == 0, done.stderr
    return (place / "r.html").as_uri()


@pytest.fixture(params=[(width, scheme) for width in WIDTHS for scheme in SCHEMES], ids=str)
def shown(request: pytest.FixtureRequest, browser: Browser, url: str) -> Browser:
    """The page at a width, light or dark, with all its parts open."""
    browser.ask("Page.setBypassCSP", enabled=False)
    browser.show_at(*request.param)
    browser.open(url)
    browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    return browser


def test_the_page_has_all_that_is_tried_here(shown):
    for part in ("polyline.step", "polyline.loss", "line.fails", ".fold", ".next", "#search"):
        assert shown.evaluate(f"!!document.querySelector('{part}')"), part


def test_a_phone_shows_the_duration_beside_its_attempt(shown):
    rows = "[...document.querySelectorAll('.timeline li:not(.gap)')]"
    edges = f"{rows}.map(li => [li.querySelector('a'), li.querySelector('.took')].map("
    tops = shown.evaluate(f"{edges}one => one.getBoundingClientRect().top))")
    assert tops
    assert all(abs(one - other) < 6 for one, other in tops)


def test_the_page_makes_no_error_and_no_request(shown):
    assert shown.complaints() == []
    assert "owned" not in shown.evaluate("document.title").partition(";")[0]
    assert shown.evaluate("document.querySelectorAll('script, img').length") == 0


def test_its_style_is_in_force_in_both_schemes(shown):
    colour = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    dark = shown.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    red = int(colour.removeprefix("rgb(").partition(",")[0])
    assert red < 60 if dark else red > 200


def test_nothing_scrolls_sideways(shown):
    wide = "[...document.querySelectorAll('*')].filter(one => one.scrollWidth > innerWidth)"
    assert shown.evaluate(f"{wide}.map(one => one.outerHTML.slice(0, 80))") == []
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_its_policy_stops_what_would_be_put_into_it(shown):
    """A style, an image and a script of another: none has an effect."""
    put = "document.body.insertAdjacentHTML('beforeend', '<style>body {color: red}</style>"
    put += "<img src=data:image/gif;base64,R0lGODlhAQABAAAAACw= onerror=window.owned=1>"
    put += '<p id=p style="color: red">\')'
    shown.evaluate(put)
    red = "rgb(255, 0, 0)"
    assert shown.evaluate("getComputedStyle(document.body).color") != red
    assert shown.evaluate("getComputedStyle(document.querySelector('#p')).color") != red
    refused = [one for one in shown.complaints() if "Content Security Policy" in one]
    assert len(refused) >= 3
    assert shown.evaluate("window.owned === undefined")


def test_axe_finds_no_violation(shown, axe, url):
    shown.ask("Page.setBypassCSP", enabled=True)  # for axe alone
    shown.open(url)
    shown.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    shown.evaluate(f"{axe}; null")
    found = shown.evaluate(f"axe.run(document, {json.dumps(RULES)})")
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found["violations"]] == []
    assert len(found["passes"]) > 15
