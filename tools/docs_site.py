"""mkdocs' hooks: the reference pages, made of the data, and the files beside docs/ that pages name.

`make docs` runs it. The text of the reference is that of `saferun help`. Every page is in the site
as plain Markdown, too, and llms.txt lists them: people paste pages into assistants. A search for an
error message finds its kind of failure: the messages are tags of its entry in the search index.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from mkdocs.structure.files import File, Files

from saferun.cli import reference
from saferun.profile import files as profiles

ROOT = Path(__file__).resolve().parent.parent
BESIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/RESULTS.md", "shell/README.md")
EXAMPLES = ("examples/kubernetes/pytorchjob.yaml", "examples/kubernetes/trainjob.yaml")
DRAWING = (
    "![Command line, profile, GPU facts and variables become one plan; saferun, keeper, torchrun "
    "and ranks run it; a failure is diagnosed and leads to the next plan](how-it-works.svg)"
)
ENVIRON = {"HOME": "/nonexistent"}  # shipped profiles only
REFERENCE = reference.Reference(ENVIRON)
PAGES = {
    "kinds of failure": ("failures", "Kinds of failure"),
    "mitigations": ("mitigations", "Mitigations"),
    "variables": ("variables", "Variables"),
    "hooks": ("hooks", "Hooks"),
    "profile keys": ("keys", "Profile keys"),
}
FAILURES = ROOT / "src" / "saferun" / "knowledge" / "failures.yaml"
SHOWN, TAGS = 12, 6  # messages of a kind on its page, and for the search: more weigh less
PLAIN: dict[str, tuple[str, str]] = {}  # a page's path -> its title and its Markdown
# In a text of the data: code and links, and what Markdown would take for markup.
PARTS = re.compile(r"`[^`]*`|https?://[^\s)]*[^\s).,;:]|[*_\[\]<|]")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that do not lie in docs/."""
    for path in (*BESIDE, *EXAMPLES):
        files.append(File.generated(config, path, content=(ROOT / path).read_text()))
    files.append(File.generated(config, "index.md", content=_front()))
    words = REFERENCE.words()
    for what, (name, title) in PAGES.items():
        text = "\n".join(_page(what, title, words[what]))
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    text = "\n".join(_profiles())
    files.append(File.generated(config, "reference/profiles.md", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Lead links to files of the repository to where they are in the site, or make them names."""
    here = os.path.dirname(page.file.src_uri)

    def moved(found: re.Match[str]) -> str:
        text, target, anchor = found.groups(default="")
        own = here if page.file.src_uri in BESIDE else f"docs/{here}"
        path = os.path.normpath(os.path.join(own, target))
        inside = path.removeprefix("docs/")
        is_beside = not path.startswith("docs/") or page.file.src_uri in BESIDE
        if is_beside and files.get_file_from_path(inside) is None:
            return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"
        return f"[{text}]({os.path.relpath(inside, here or '.')}{anchor})"

    text = re.sub(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)", moved, markdown)
    PLAIN[page.file.src_uri] = page.title, text
    return text


def on_post_build(*, config: Any) -> None:
    """Write the pages as Markdown, llms.txt, and each kind's messages into the search index."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", ""]
    for path, (title, text) in PLAIN.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text, encoding="utf-8")
        lines.append(f"- [{title}]({path})")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    index = site / "search" / "search_index.json"
    found = json.loads(index.read_text(encoding="utf-8"))
    said = messages()
    for entry in found["docs"]:
        place, _, kind = entry["location"].partition("#")
        if place == "reference/failures.html" and kind in said:
            entry["tags"] = _telling(said[kind])
    index.write_text(json.dumps(found), encoding="utf-8")


def _telling(phrases: list[str]) -> list[str]:
    """Return those that the search knows: a word that a kind has often would weigh more."""
    told: set[str] = set()
    chosen = []
    for phrase in phrases:
        if words := set(re.findall(r"\w+", phrase.lower())) - told:
            told |= words
            chosen.append(phrase)
    return chosen[:TAGS]


def messages() -> dict[str, list[str]]:
    """Return what is printed at each kind of failure: CUDA's words first, then torch's."""
    found: dict[str, list[tuple[int, str]]] = {}
    known = yaml.safe_load(FAILURES.read_text(encoding="utf-8"))
    of_cuda = known["numbers"]["cuda"]
    for sign in known["signs"]:
        says = sign.get("says", [])
        by_library = says if isinstance(says, dict) else {"": says}
        of_kind = found.setdefault(sign["kind"], [])
        for library, phrases in by_library.items():
            plain = (phrase.replace(" ... ", " … ").strip(" :") for phrase in phrases)
            rank = 1 if library.startswith("torch") else 2
            of_kind += [(0 if phrase in of_cuda else rank, phrase) for phrase in plain]
        of_kind += [(2, name) for name in sign.get("types", [])]
    ordered = {kind: sorted(pairs, key=lambda pair: pair[0]) for kind, pairs in found.items()}
    return {
        kind: list(dict.fromkeys(phrase for _, phrase in pairs))[:SHOWN]
        for kind, pairs in ordered.items()
    }


def _front() -> str:
    """Return the README as the site's first page: its links are those of the repository's root."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r'(srcset|src)="docs/', r'\1="', text)
    text = text.replace("\n## More\n", f"\n## How it works\n\n{DRAWING}\n\n## More\n")
    text = f"---\nhide: [toc]\n---\n{text}"
    return re.sub(r"\]\(docs/", "](", re.sub(r"\]\((?!docs/|https?:|#)", "](../", text))


def _page(what: str, title: str, words: list[str]) -> Iterator[str]:
    said = messages() if title == "Kinds of failure" else {}
    yield f"# {title}\n\n`saferun help WORD` prints the same in a terminal.\n"
    for word in words:
        for entry in REFERENCE.entries(word):
            if entry.word == word and entry.what.split()[0] in what:
                yield f"## {word}\n\n_{entry.what}_\n"
                yield from (f"{_markdown(text)}\n" for text in entry.paragraphs)
                if said.get(word):
                    yield f"Messages: {', '.join(map(_code, said[word]))}.\n"


def _code(text: str) -> str:
    """Return a message as code, which no backtick in it can close."""
    return f"`{text}`" if "`" not in text else f"`` {text} ``"


def _profiles() -> Iterator[str]:
    yield "# Shipped profiles\n\n`saferun profiles show NAME` prints the same in a terminal.\n"
    for found in profiles.known(ENVIRON):
        doc = profiles.load(found, ENVIRON)
        yield f"## {doc.name}\n\n{_markdown(doc.description)}.\n"
        if doc.extends:
            yield f"Extends {', '.join(doc.extends)}.\n"
        yield "| value | why |\n| --- | --- |"
        for key, leaf in doc.leaves.items():
            why = _markdown(f"{leaf.why} {leaf.source}".replace("\n", " "))
            yield f"| `{key} = {leaf.value}` | {why} |"
        yield ""


def _markdown(text: str) -> str:
    """Return a text of the data as Markdown: its links are links, and nothing else is markup."""

    def part(found: re.Match[str]) -> str:
        if found[0].startswith("http"):
            return f"<{found[0]}>"
        return found[0] if found[0].startswith("`") else f"\\{found[0]}"

    return PARTS.sub(part, text)
