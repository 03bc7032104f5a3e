"""The documents agree with the code: every name is listed, every example parses."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from repo import ROOT, tool
from sandbox import text_of, write

from saferun import errors
from saferun.cli import gen_shell
from saferun.cli.commands import command_named
from saferun.knowledge import loader
from saferun.planning import request
from saferun.planning.torchrun import torchrun_args
from saferun.settings import KEYS, Key

SOURCE = ROOT / "src" / "saferun"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
MANUAL = "\n".join(text_of(page) for page in (ROOT / "README.md", *DOCS))
CONFIGURATION = text_of(ROOT / "docs" / "configuration.md")
OTHER_STATUS = {130, 141}  # 128+n, of SIGINT and of SIGPIPE
# What stands in a usage line for words that the user chooses.
PLACEHOLDER = re.compile(r"\[|…|\.\.\.|<|\bSCRIPT\b|\b[A-Z]{2,}\b(?![=_])|\b[NGTP]\b")


# --- every name is listed ------------------------------------------------------------------------


def words_of(command: click.Command, path: str) -> Iterator[str]:
    """A command with its subcommands and options, as a user writes them."""
    yield path
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield from (option for option in parameter.opts if option != "--help")
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            if not below.hidden:
                yield from words_of(below, f"{path} {name}")


def click_commands() -> dict[str, click.Command]:
    names = [name for name in torchrun_args.COMMANDS if name != "run"]
    return {name: command_named(name) for name in names}


def test_every_command_and_option_is_listed():
    named = [f"saferun {name}" for name in torchrun_args.COMMANDS]
    named += [*torchrun_args.OWN, *request.COMMAND_OPTIONS]
    for name, command in click_commands().items():
        named += [word.split(" ")[-1] for word in words_of(command, f"saferun {name}")]
    assert not {word for word in named if not re.search(rf"(?<![\w-]){word}(?![\w-])", MANUAL)}
    assert "make demo" in MANUAL
    assert "make test" in MANUAL


def test_every_exit_status_of_saferuns_own_is_listed():
    own = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", MANUAL, re.MULTILINE)}
    assert listed == own | OTHER_STATUS


def test_every_variable_of_saferuns_own_is_listed():
    files = [path for path in SOURCE.rglob("*") if path.suffix in (".py", ".yaml")]
    text = "".join(text_of(path) for path in [*files, *(ROOT / "shell").glob("*.sh")])
    used = set(re.findall(r"\bSAFERUN_[A-Z_]*[A-Z]\b", text))
    internals = text_of(ROOT / "docs" / "internals.md")
    for listed in (CONFIGURATION, internals):
        assert used == set(re.findall(r"\bSAFERUN_[A-Z_]*[A-Z]\b", listed))


def test_every_file_that_internals_names_is_there():
    text = text_of(ROOT / "docs" / "internals.md")
    rooms = "|".join(place.name for place in SOURCE.iterdir() if (place / "__init__.py").exists())
    named = set(re.findall(rf"`((?:{rooms})/[\w/]+)(?:\.py)?`", text))
    missing = [name for name in named if not (SOURCE / name).is_dir()]
    assert [name for name in missing if not (SOURCE / f"{name}.py").exists()] == []


@pytest.mark.slow
def test_every_variable_that_a_job_finds_is_torchruns_own_or_listed(tmp_path):
    write(tmp_path / "t.py", "import os; os.write(1, ' '.join(os.environ).encode())")
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}

    def found(*argv: str) -> set[str]:
        run = [sys.executable, "-m", *argv, "--standalone", "t.py"]
        done = subprocess.run(run, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return set(done.stdout.split())

    ours = found("saferun") - found("torch.distributed.run")
    assert "SAFERUN_RANK_PID" in ours
    assert {name for name in ours if f"| `{name}`" not in CONFIGURATION} == set()


def test_every_profile_key_is_listed_as_it_is_declared():
    """Its values with the default first, its unit and its meaning; the page may add links."""
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \| (.*) \|$", CONFIGURATION, re.MULTILINE)
    listed = [(key, values, without_links(doc)) for key, values, doc in rows if key in KEYS]
    declared = [(name, values_of(key), key.doc.replace("`", "")) for name, key in KEYS.items()]
    assert listed == declared


def without_links(text: str) -> str:
    text = re.sub(r" \(\[[^]]+\]\([^)]+\)\)", "", text)  # one in brackets says where more is said
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text).replace("`", "")


def values_of(key: Key) -> str:
    words = ", ".join(f"`{word}`" for word in key.choices)
    if key.kind == "choice":
        return words
    if key.default is None:
        return f"`none` ({key.unit})" if key.unit else "`none`"
    default = re.sub(r"\.0\b", "", json.dumps(key.default))
    return f"`{default}` {key.unit}".strip() + (f", of {words}" if words else "")


def test_every_hook_has_its_row():
    text = text_of(ROOT / "docs" / "hooks.md")
    hooks = loader.load("words.yaml")["hooks"]
    assert [name for name, does in hooks.items() if f"| `{name}` | {does} |" not in text] == []
    assert hooks.keys() == {key.split(".")[1] for key in KEYS if key.startswith("hooks.")} - {
        "required"
    }


def test_every_shipped_profile_is_listed():
    text = text_of(ROOT / "docs" / "profiles.md")
    assert not [p.stem for p in (ROOT / "profiles").glob("*.yaml") if f"`{p.stem}`" not in text]


# --- the documents agree with the tree -----------------------------------------------------------


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def test_every_relative_link_leads_somewhere():
    broken = []
    for page in [*PAGES, ROOT / "shell" / "README.md"]:
        text = text_of(page)
        pictures = re.findall(r'(?:srcset|src)="([^"]+)"', text)
        for target in [*re.findall(r"\]\(([^)\s]+)\)", text), *pictures]:
            if "://" in target:
                continue
            name, _, part = target.partition("#")
            found = page.parent / name if name else page
            if not found.exists() or (part and part not in anchors(found)):
                broken.append(f"{page.name}: {target}")
    assert not broken


def test_one_variable_has_the_address_of_the_project():
    """Its links, badges and way to install are made of it."""
    made, readme = tool("package_page"), text_of(ROOT / "README.md")
    assert made.with_address(readme, made.ADDRESS) == readme
    address = "https://example.org/o/saferun"
    there = made.with_address(readme, address)
    assert f"    pip install git+{address} " in there
    assert f"[![tests]({address}/actions/" in there
    assert made.with_address(there, made.ADDRESS) == readme
    page = made.page(there, address)
    assert f"]({address}/blob/main/docs/start.md)" in page
    assert f'src="{address}/raw/main/docs/pictures/report-light.png"' in page
    assert not re.search(r'\]\((?!https?:)|(?:src|srcset)="(?!https:)', page)
    assert all(url.startswith(address) for url in made.urls(address).values())


def test_every_page_is_linked_from_the_readme():
    text = text_of(ROOT / "README.md")
    assert not [page.name for page in DOCS if f"(docs/{page.name})" not in text]


def test_every_file_of_the_source_that_the_docs_name_exists():
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir()}
    missing = []
    for page in DOCS:
        for name in re.findall(r"`([\w./-]+/[\w.-]*)`", text_of(page)):
            if name.split("/")[0] in rooms:
                name = f"src/saferun/{name}"
            if name.startswith(("src/", "shell/", "tests/", "tools/", "profiles/")):
                found = ROOT / name
                if not (found.exists() or found.with_name(found.name + ".py").exists()):
                    missing.append(f"{page.name}: {name}")
    assert not missing


# --- every example parses ------------------------------------------------------------------------


class Example(NamedTuple):
    """One command line of saferun's in a document."""

    where: str
    words: tuple[str, ...]  # behind `saferun`
    usage: bool  # it has placeholders


def examples() -> Iterator[Example]:
    for page in PAGES:
        text = re.sub(r"\\\n\s*", " ", text_of(page))
        for number, line in enumerate(text.splitlines(), 1):
            alone = re.match(r"(\s{4,}|\$ |)(?:\S*/)?saferun (?!-+>|-+ )(?P<words>.*)", line)
            if alone is not None and not alone[1] and not fenced(text, line):
                continue  # prose may begin with `saferun`, too
            if found := alone or re.search(r"\$\(saferun (?P<words>[^)]*)\)", line):
                words = re.split(r"\s(?:#|>|\|)|\s{3}", found["words"])[0]
                usage = bool(PLACEHOLDER.search(re.sub("'.*?'", "", words)))
                yield Example(f"{page.name}, {number}", tuple(shlex.split(words)), usage)


def fenced(text: str, line: str) -> bool:
    """Tell whether a line stands in a fenced block."""
    before = text.partition(f"\n{line}\n")[0]
    return len(re.findall(r"^```", before, re.MULTILINE)) % 2 == 1


def problem(example: Example) -> str:
    """Why a command line would be refused; empty where it would not be."""
    first, *rest = example.words
    if example.usage:
        known = (*torchrun_args.COMMANDS, *torchrun_args.OWN, "SCRIPT", "COMMAND")
        return "" if first.startswith("[") or first in known else f"no command: {first}"
    try:
        if first == "plan":
            request.read_command(tuple(rest), {})
        elif first == "gen-shell":
            gen_shell.read(tuple(rest), {})
        elif first in torchrun_args.COMMANDS and first != "run":
            parse_command(click_commands()[first], rest)
        else:
            line = torchrun_args.parse(example.words).line
            script = line.script or ""
            return line.refusal or ("" if script.endswith(".py") else f"no script: {script}")
    except (errors.SaferunError, click.ClickException) as error:
        return str(error)
    return ""


def parse_command(command: click.Command, words: list[str]) -> None:
    """Read the words as click would, and run nothing.

    Raises:
        click.ClickException: they would be refused.
    """
    if isinstance(command, click.Group):
        below = command.commands.get(words[0]) if words else None
        if below is None:
            raise click.UsageError(f"no such command: {words}")
        parse_command(below, words[1:])
    else:
        command.make_context("saferun", words)


def test_every_command_line_in_the_documents_parses():
    shown = list(examples())
    assert len(shown) > 30
    assert not [f"{each.where}: {why}" for each in shown if (why := problem(each))]
    for wrong in (
        "profile list",
        "runs lst",
        "doctor --ful",
        "--standalone",
        "diagnose --exit-code x",
    ):
        assert problem(Example("here", tuple(wrong.split()), usage=False)), "it is not found"
