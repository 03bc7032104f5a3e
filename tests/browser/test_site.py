"""The documents' site in a real browser: error messages find their kind, nothing is cut."""

import functools
import http.server
import pathlib
import threading
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from browser import Browser
from helpers import until
from repo import ROOT
from sandbox import text_of

pytestmark = pytest.mark.browser

SITE = ROOT / "out" / "site"
# What a person has on the screen, and the kind of failure that should be the first result.
SEARCHES = {
    "cuda out of memory": "cuda-oom",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB": "cuda-oom",
    "device-side assert triggered": "device-side-assert",
    "an illegal memory access was encountered": "cuda-illegal-access",
    "address already in use": "port-in-use",
    "no space left on device": "disk-full",
    "too many open files": "too-many-open-files",
    "watchdog caught collective operation timeout": "nccl-timeout",
    "no kernel image is available": "cuda-no-kernel-image",
    "invalid device ordinal": "cuda-invalid-device-ordinal",
    "cannot re-initialize cuda in forked subprocess": "cuda-fork-reinit",
    "fallen off the bus": "gpu-lost",
    "driver/library version mismatch": "nvml-version-mismatch",
    "uncorrectable ecc error": "gpu-ecc-uncorrectable",
    "expected to have finished reduction in the prior iteration": "ddp-unused-parameters",
    "default process group has not been initialized": "process-group-not-initialized",
    "failed to find c compiler": "compile-toolchain-missing",
    "size mismatch for": "state-dict-mismatch",
    "unrecognized arguments": "user-args-error",
    "stale file handle": "stale-file-handle",
}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    if not (SITE / "index.html").is_file():
        pytest.skip("no site (make docs)")
    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def results(browser: Browser, address: str, words: str) -> list[str]:
    """The places that a search leads to, the best first."""
    browser.open(f"{address}/index.html?q={quote(words)}")
    links = "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
    until(lambda: browser.evaluate(f"{links}.length"), words, 60)
    return browser.evaluate(links)


def test_an_error_message_finds_its_kind_of_failure_first(browser, address):
    wrong = {}
    for words, kind in SEARCHES.items():
        links = [link for link in results(browser, address, words) if "/failures.html#" in link]
        kinds = [named for link in links if (named := link.rpartition("#")[2])]
        if kinds[:1] != [kind]:
            wrong[words] = (kind, kinds[:4])
    assert not wrong


def test_the_terminal_of_the_home_page_is_whole_and_first_columns_do_not_break(browser, address):
    browser.show_at(1280, "light")
    browser.open(f"{address}/index.html")
    cut = "[...document.querySelectorAll('pre code')].filter(c => c.scrollWidth > c.clientWidth)"
    assert browser.evaluate(f"{cut}.length") == 0
    browser.open(f"{address}/usage.html")
    cells = "[...document.querySelectorAll('td:first-child code')]"
    assert browser.evaluate(f"{cells}.every(c => getComputedStyle(c).wordBreak === 'normal')")


def test_each_picture_of_the_home_page_has_the_width_of_a_phone(browser, address):
    browser.show_at(390, "light")
    browser.open(f"{address}/index.html")
    pictures = "[...document.querySelectorAll('picture img')]"
    assert browser.evaluate(f"{pictures}.length") == 3
    until(lambda: browser.evaluate(f"{pictures}.every(i => i.complete)"), "the pictures", 60)
    widths = browser.evaluate(f"{pictures}.map(i => i.getBoundingClientRect().width)")
    assert min(widths) > 300, widths


def test_every_page_is_there_as_plain_markdown():
    if not (SITE / "llms.txt").is_file():
        pytest.skip("no site (make docs)")
    named = [line for line in text_of(SITE / "llms.txt").splitlines() if line[:2] == "- "]
    assert len(named) > 25
    files = [SITE / line.partition("](")[2].rstrip(")") for line in named]
    assert [file for file in files if not pathlib.Path(file).is_file()] == []
    assert text_of(SITE / "trials.md").startswith("# Trials")
