"""mkdocs' hooks: the reference pages, made of the data, and the files beside docs/ that pages name.

`make docs` runs it. The text of the reference is that of `saferun help`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from saferun.cli import reference
from saferun.profile import files as profiles

ROOT = Path(__file__).resolve().parent.parent
BESIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/RESULTS.md", "shell/README.md")
EXAMPLES = ("examples/kubernetes/pytorchjob.yaml", "examples/kubernetes/trainjob.yaml")
ENVIRON = {"HOME": "/nonexistent"}  # shipped profiles only
REFERENCE = reference.Reference(ENVIRON)
PAGES = {
    "kinds of failure": ("failures", "Kinds of failure"),
    "mitigations": ("mitigations", "Mitigations"),
    "variables": ("variables", "Variables"),
    "hooks": ("hooks", "Hooks"),
    "profile keys": ("keys", "Profile keys"),
}
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

    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)", moved, markdown)


def _front() -> str:
    """Return the README as the site's first page: its links are those of the repository's root."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r'(srcset|src)="docs/', r'\1="', text)
    return re.sub(r"\]\(docs/", "](", re.sub(r"\]\((?!docs/|https?:|#)", "](../", text))


def _page(what: str, title: str, words: list[str]) -> Iterator[str]:
    yield f"# {title}\n\n`saferun help WORD` prints the same in a terminal.\n"
    for word in words:
        for entry in REFERENCE.entries(word):
            if entry.word == word and entry.what.split()[0] in what:
                yield f"## {word}\n\n_{entry.what}_\n"
                yield from (f"{_markdown(text)}\n" for text in entry.paragraphs)


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
