"""Pure: replace torchrun by saferun in a script, wherever it is started, and nothing else.

A word is changed only if a shell would start it as a command: by itself, after another program
(`srun`, `nohup`), in an array, a default or a variable that the script starts, and in text for a
shell (`bash -c "…"`). Commands that start ranks but cannot be changed with certainty get a remark.

`python -m torch.distributed.run` is torchrun. `python -m torch.distributed.launch` is torchrun that
also gives the script `--local-rank=N`, unless `--use-env` is given (torch/distributed/launch.py and
run.py). torchrun replaces `${local_rank}` in the script's arguments
(torch/distributed/elastic/utils/api.py), so the argument is written with it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from saferun.export.shell_words import Command, Region, Word, commands
from saferun.knowledge.torchrun_options import OPTIONS

OURS = "saferun"
SHELL_ENDINGS = ("sh", "bash", "zsh", "ksh", "slurm", "sbatch", "sb", "pbs", "job", "lsf")
_NO_SCRIPTS = ("makefile", "dockerfile", "justfile", "readme")
_WHICH = r"(?:which|command -v|type -P)"
# A word that means torchrun: torchrun itself, a default, or the result of a search of PATH.
_LAUNCHERS = [
    re.compile(r"""["']?(?P<word>torchrun)["']?"""),
    re.compile(r"""["']?\$\{(?P<name>\w+):?[-=]["']?(?P<word>torchrun)["']?\}["']?"""),
    re.compile(rf"""["']?(?:\$\(|`)\s*{_WHICH}\s+(?P<word>torchrun)\b[^()`]*[)`]["']?"""),
]
_BY_PATH = re.compile(r"""["']?[^\s"'=]*[^\s"'=(`]/torchrun[}"']*""")
_MODULE = re.compile(r"torch\.distributed\.(run|launch)")
# A word that means the first Python on PATH, which usually is torchrun's.
_PYTHON = re.compile(
    r"""["']?(?:python[\d.]*|\$\{\w+:-["']?python[\d.]*["']?\}"""
    rf"""|\$\({_WHICH} python[\d.]*\))["']?"""
)
_ASSIGNED = re.compile(r"""(\w+)(?:\[[^]]*\])?\+?=(.*)""", re.DOTALL)
_VARIABLE = re.compile(r"""["']?\$\{?(\w+)(?:\[[@*]\])?(?::?[-=][^}]*)?\}?["']?""")
_BEFORE = (  # words after which a command or an assignment stands
    *("if", "then", "elif", "else", "do", "while", "until", "!", "{", "time", "command", "env"),
    *(_DECLARES := ("export", "declare", "local", "readonly", "typeset")),
)
_OTHERS = re.compile(r"accelerate launch|deepspeed .+")  # other launchers
_TESTS = ("[", "[[", "test", "case", "for", "select")
_LOOKS = ("which", "type", "hash")
_KILLS = ("pkill", "pgrep", "killall")
# Programs that only print, search or pass on a word or text.
_TALKS = re.compile(
    r"(?:.*_)?(?:echo|printf?|log|info|warn\w*|err\w*|die|say|usage|note|debug|fail|msg)(?:_.*)?"
    r"|grep|egrep|sed|awk|find|git|pip3?|curl|jq|ls|cp|mv|rm|mkdir|cat|tee|unset|alias|:"
)
_RUNS_CODE = re.compile(r"(?:.*/)?(?:python[\d.]*|perl|node|ruby)")
# Programs that start the command after them, for places that may also contain prose.
_STARTERS = re.compile(
    r"srun|mpirun|mpiexec|nohup|exec|env|time|timeout|sudo|setsid|stdbuf|nice|ionice|numactl|taskset"
    r"|uv|poetry|pipenv|pdm|pixi|conda|mamba|micromamba|singularity|apptainer|docker|podman|enroot"
    r"|nsys|ncu|ssh|pdsh|xargs|(?:env_)?parallel|sem|eval|(?:.*/)?(?:ba|z|k|da)?sh|command|sbatch|kubectl|tmux|screen"
)
# Options whose value is the name of a launcher, or of anything else.
_ASKS = re.compile(r"--?[\w-]*(?:launch|backend|driver|engine|runner|mode|strategy|method|type)\w*")
_NAMES = re.compile(r"--[\w-]*(?:name|title|session|tag)|-[sJt]")
_ARGUMENT = re.compile(r"""["'\\]{0,8}(?:[-$]|\S*\.py\b)|:{3,4}\+?$|\S*\{[^}\s]*\}""")
_FEEDS = re.compile(r"xargs|(?:env_)?parallel")  # the command's arguments come from their input
_TAKES = {name for one in OPTIONS if not one.flag for name in one.strings}
_USE_ENV = re.compile(r"--use[_-]env\b")
# A pattern of a `case`.
_PATTERN = re.compile(r"""(?m)^[ \t]*\(?["']?torchrun["']?[ \t]*(?:\|[^)\n]*)?\)""")
_IS_SHELL = re.compile(r"#(?:!.*sh\b|SBATCH|PBS)")
_SCRIPT_FILE = re.compile(r"""["']?\S*\.(?:sh|bash|slurm|sbatch|job|pbs)["']?""")
# Outside shell scripts: text that may precede a command in a Makefile, a Dockerfile, YAML,
# Markdown.
_MARK = re.compile(r"[ \t]*(?:(?:[-*>$@%+|]+|\d+\.|RUN|CMD|ENTRYPOINT|[\w-]+:)[ \t]+)*[@-]*")
_LISTED = re.compile(
    r"""(?<=[\[(])\s*["']?(torchrun)["']?(?=\s*,\s*["']?-)"""
    r"""|(?m:^)[ \t]*- +["']?(torchrun)["']?[ \t]*(?=\n[ \t]*- +["']?-)"""
)
_LOGICAL_LINE = re.compile(r"(?:[^\\\n]|\\(?:\r?\n|.))+")
_HOLDS = re.compile(r"(?<![\w./-])torchrun(?![\w./-])")
# A function with torchrun's name, and, outside shell scripts, a line that gives a variable a value.
_FUNCTION = re.compile(r"(?m)(?:^|[;{])[ \t]*(?:function[ \t]+torchrun\b|torchrun[ \t]*\([ \t]*\))")
_VALUE = re.compile(r"(?m)^[ \t]*(?:(?:export|ENV|ARG)[ \t]+)?(\w+)[ \t]*[:?+]{0,3}=[^\n#]*")
_IN_PYTHON = re.compile(
    r"""["'](?:torchrun["']\s*,\s*(?:f?["']-|\*)|torchrun\s+[-{]|[^"'\n]*torch\.distributed\.(?:run|launch)\b)"""
)

_PATH = (
    "names one torchrun by its path, and saferun takes the first on PATH: "
    "write PATH=ITS_DIRECTORY:$PATH saferun"
)
_OF_PYTHON = (
    "starts torchrun by a Python of its own: write saferun, with that Python's torchrun on PATH"
)
_LOCAL_RANK = (
    "torch.distributed.launch gives the script --local-rank, and where the script stands is not "
    "known: let it read LOCAL_RANK, add --use_env here, and adopt again"
)
_ARGUMENT_OF = "is an argument of another program, which may start torchrun itself"
_HELD = "holds the word torchrun: write saferun there, if a job is started by it"
_NAMED = (
    "a function has torchrun's name, and what called it now starts saferun without it: give it "
    "another name, or write in its place what it adds"
)
_COMPARED = "is compared or passed on, not started here"
_PROCESSES = "looks for processes by name: write saferun there too, else the run tries again"
_IN_CODE = (
    "Python starts torchrun here, and Python is not changed: write saferun in its place, or put a "
    "torchrun that leads to saferun first on PATH (`What to type` in docs/usage.md)"
)
_ITSELF = "starts the ranks itself: `What to type` in docs/usage.md says what to write"


@dataclass(frozen=True, slots=True)
class Adoption:
    """A changed script, and the places that a person should check."""

    text: str
    remarks: tuple[tuple[int, str], ...]  # (line in the old text, remark)


@dataclass(frozen=True, slots=True)
class _Place:
    """The context of a command."""

    strict: bool = False  # there may be prose, so only known programs start torchrun
    array: bool = False
    captured: bool = False  # its output is captured
    assigned: bool = False  # it is the value of a variable
    quotes: int = 0  # enclosing double quotes, each of which halves the backslashes


def adopt(text: str, name: str) -> Adoption:
    """Return a script in which saferun replaces torchrun.

    Args:
        text: the script's text.
        name: the file's name; its suffix tells shell scripts, Python files and other files apart.
    """
    first = text.partition("\n")[0]
    name = name.lower()
    ending = name.rpartition(".")[2] if "." in name else ""
    if ending in ("py", "ipynb") or (first.startswith("#!") and "python" in first):
        found = [(m.start(), _IN_CODE) for m in _IN_PYTHON.finditer(text)]
        return Adoption(text, _by_line(text, found))
    shell = re.match(r"#!.*\b(?:ba|z|k|da)?sh\b", first) or re.search(r"(?m)^#(?:SBATCH|PBS)", text)
    work = _Work(text)
    if shell or ending in SHELL_ENDINGS or not (ending or name in _NO_SCRIPTS):
        work.walk(0, len(text), _Place())
        work.remarks |= {found.start(): _NAMED for found in _FUNCTION.finditer(text)}
    else:
        work.lines()
    return Adoption(work.edited(), _by_line(text, work.remarks.items()))


def _by_line(text: str, found: Iterable[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    return tuple(sorted({(text.count("\n", 0, at) + 1, what) for at, what in found}))


class _Work:
    """The edits of one script, collected command by command."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.edits: dict[int, tuple[int, str]] = {}  # start -> end, new text
        self.remarks: dict[int, str] = {}
        self.values: dict[str, list[tuple[int, int]]] = {}  # variable -> where it is torchrun
        self.used: set[str] = set()  # variables that are started as commands
        self.compared: set[str] = set()
        self.looped: set[tuple[str, int]] = set()  # variable of a loop, where torchrun stands
        # What holds torchrun in a way that only a person can follow: where, and its name.
        self.held: list[tuple[int, int, str]] = []
        self.pythons: dict[str, bool] = {}  # variable -> whether it is PATH's first python

    def edited(self) -> str:
        """Return the text with all edits, including those that depend on a variable's use."""
        for name, spans in self.values.items():
            for start, end in spans:
                if name in self.used - self.compared:
                    self.edits[start] = (end, OURS)
                else:
                    self.remarks[start] = f"{name} is torchrun, which {_COMPARED}"
        for name, start in self.looped:
            if name in self.used - self.compared:
                self.edits[start] = (start + len("torchrun"), OURS)
        for start, end, name in self.held:
            if not any(start <= at < end for at in (*self.edits, *self.remarks)):
                self.remarks[start] = f"{name} {_HELD}"
        parts, at = list[str](), 0
        for start, (end, new) in sorted(self.edits.items()):
            parts += [self.text[at:start], new]
            at = end
        return "".join([*parts, self.text[at:]])

    def lines(self) -> None:
        """Examine each line separately, in a text that is not a shell script."""
        for line in _LOGICAL_LINE.finditer(self.text):
            marked = _MARK.match(self.text, line.start(), line.end())
            assert marked is not None, "a mark may be empty"
            self.walk(marked.end(), line.end(), _Place(strict=True))
        for value in _VALUE.finditer(self.text):
            self._hold(value[1], value.start(1), value.end())
        for found in _LISTED.finditer(self.text):
            group = found.lastindex or 1
            self.edits[found.start(group)] = (found.end(group), OURS)

    def walk(self, start: int, end: int, place: _Place) -> None:
        """Examine each command in a part of the text, and the commands inside it.

        Args:
            start: where the part begins.
            end: where it ends.
            place: the context of the part.
        """
        for command in commands(self.text, start, end, array=place.array):
            self._command(command, place)

    # --- one command

    def _command(self, command: Command, place: _Place) -> None:
        words, at = command.words, 0
        while at < len(words) and (
            words[at].text in _BEFORE
            or (at and words[at].text[0] == "-" and words[at - 1].text in _DECLARES)
            or self._assignment(words[at], place)
        ):
            at += 1
        head = words[at].plain if at < len(words) else ""
        self._inside(command, at, place)
        if head == "alias":
            for word in words[at + 1 :]:
                self._hold(f"alias {word.text.partition('=')[0]}", word.start, word.end)
        elif head in _TESTS:
            self._test(words)
        elif head == ":":  # : "${LAUNCHER:=torchrun}"
            for word in words:
                if found := _LAUNCHERS[1].fullmatch(word.text):
                    self._value(found["name"], word.start, found)
        elif head in _KILLS and any("torchrun" in word.text for word in words):
            self.remarks[words[at].start] = f"{head} {_PROCESSES}"
        elif (head not in ("", *_LOOKS) and not _TALKS.fullmatch(head)) or (
            head == "echo" and place.captured
        ):
            for index in range(at, len(words)):
                self._word(words, index, at, place)

    def _hold(self, name: str, start: int, end: int) -> None:
        """Remember what holds torchrun; whether that is changed is known only at the end."""
        if _HOLDS.search(self.text, start, end):
            self.held.append((start, end, name))

    def _test(self, words: Sequence[Word]) -> None:
        """Remember variables that are compared with torchrun, or that a loop sets to it."""
        plain = [word.plain for word in words]
        if plain[0] in ("for", "select"):
            self.looped |= {
                (plain[1], word.start + word.text.index("torchrun"))
                for word in words[2:]
                if word.plain == "torchrun"
            }
            return
        if "torchrun" in plain or (plain[0] == "case" and _PATTERN.search(self.text)):
            self.compared |= {m[1] for word in words if (m := _VARIABLE.fullmatch(word.text))}

    def _inside(self, command: Command, at: int, place: _Place) -> None:
        """Examine the content of words and here-documents that a shell would run."""
        words = command.words
        head = words[at].plain if at < len(words) else ""
        pairs = itertools.pairwise(words)
        writes = any(
            one.text in (">", "tee") and _SCRIPT_FILE.fullmatch(two.text) for one, two in pairs
        )
        silent = head in _TESTS or _RUNS_CODE.fullmatch(head) is not None
        silent = silent or (_TALKS.fullmatch(head) is not None and not writes)
        for word in words[at:]:
            for region in word.regions:
                self._region(region, silent, place)
        for body in command.documents:
            script = self.text[body.start : body.end]
            if writes or _STARTERS.fullmatch(head) or _IS_SHELL.match(script.lstrip()):
                self.walk(body.start, body.end, _Place())
            elif head == "read" or place.captured:
                self.walk(body.start, body.end, _Place(strict=True, assigned=True))

    def _region(self, region: Region, silent: bool, place: _Place, assigned: bool = False) -> None:
        """Examine the commands in a part of a word; in quoted text only if it may be run."""
        start, end = region.start, region.end
        if region.kind == "substitution":
            self.walk(start, end, _Place(place.strict, captured=True, quotes=place.quotes))
        elif region.kind == "array":
            self.walk(start, end, _Place(array=True, quotes=place.quotes))
        elif not silent and re.search(r"\s", self.text[start:end]):
            quotes = place.quotes + (region.quote == '"')
            self.walk(start, end, _Place(strict=True, assigned=assigned, quotes=quotes))

    def _assignment(self, word: Word, place: _Place) -> bool:
        """Examine `NAME=VALUE`; return whether the word is an assignment."""
        found = _ASSIGNED.fullmatch(word.text)
        if found is None:
            return False
        name, value = found.groups()
        self._hold(name, word.start, word.end)
        if launcher := _launcher(value):
            self._value(name, word.start + found.start(2), launcher)
            return True
        if _BY_PATH.fullmatch(value):
            self.remarks[word.start] = f"{value} {_PATH}"
        is_python = _PYTHON.fullmatch(value) is not None
        self.pythons[name] = self.pythons.get(name, True) and is_python
        for region in word.regions:
            self._region(region, False, place, assigned=True)
        return True

    def _value(self, name: str, offset: int, launcher: re.Match[str]) -> None:
        """Remember that a variable is torchrun; whether it is started is known only at the end."""
        span = (offset + launcher.start("word"), offset + launcher.end("word"))
        self.values.setdefault(name, []).append(span)

    # --- one word

    def _word(self, words: Sequence[Word], index: int, head: int, place: _Place) -> None:
        """Change one word of a command if it starts torchrun."""
        word, following = words[index], _text(words, index + 1)
        variable = _VARIABLE.fullmatch(word.text)
        is_behind = _STARTERS.fullmatch(words[head].plain) is not None
        if variable and (index == head or is_behind or _ARGUMENT.match(following)):
            self.used.add(variable[1])
        if index == head and not place.strict and _OTHERS.fullmatch(f"{word.plain} {following}"):
            self.remarks[word.start] = f"{word.plain} {_ITSELF}"
        if module := _MODULE.fullmatch(word.plain):
            self._module(words, index, module[1], place)
            return
        launcher, path = _launcher(word.text), _BY_PATH.fullmatch(word.text)
        python = _interpreter(words, index)
        if (
            launcher
            and launcher.re is _LAUNCHERS[-1]
            and python >= 0
            and self._is_first(words[python])
        ):
            self.edits[words[python].start] = (word.end, OURS)  # python `which torchrun`
        elif not (launcher or path) or not self._starts(words, index, head, place):
            return
        elif launcher:
            start = word.start + launcher.start("word")
            self.edits[start] = (word.start + launcher.end("word"), OURS)
        else:
            self.remarks[word.start] = f"{word.plain} {_PATH}"

    def _starts(self, words: Sequence[Word], index: int, head: int, place: _Place) -> bool:
        """Return whether the word at `index` is started, rather than an argument or prose."""
        following = _text(words, index + 1)
        has_arguments = _ARGUMENT.match(following) is not None
        if index == head and not has_arguments:
            alone = place.array and not following
            return alone or (bool(following) and not place.strict and not place.array)
        if index == head:
            return True
        if _FEEDS.fullmatch(words[head].plain) and not following:
            return True
        is_behind = _STARTERS.fullmatch(words[head].plain) is not None
        option_before = words[index - 1].text.startswith("-")
        if not has_arguments and (option_before or not is_behind):
            return False
        if _NAMES.fullmatch(words[index - 1].text):
            return False
        if _ASKS.fullmatch(words[index - 1].text) or _RUNS_CODE.fullmatch(words[head].plain):
            self.remarks[words[index].start] = f"torchrun {_ARGUMENT_OF}"
            return False
        return is_behind or not place.strict

    # --- python -m torch.distributed.run, and .launch

    def _module(self, words: Sequence[Word], index: int, name: str, place: _Place) -> None:
        python = _interpreter(words, index - 1)
        where = words[index].start
        if python < 0 or words[index - 1].plain != "-m" or not self._is_first(words[python]):
            self.remarks[where] = f"torch.distributed.{name} {_OF_PYTHON}"
        elif name == "launch" and not self._local_rank(words, index, place):
            self.remarks[where] = _LOCAL_RANK
        else:
            self.edits[words[python].start] = (words[index].end, OURS)

    def _is_first(self, word: Word) -> bool:
        """Return whether a word is the first Python on PATH, like torchrun's."""
        if _PYTHON.fullmatch(word.text):
            return True
        variable = _VARIABLE.fullmatch(word.text)
        return variable is not None and self.pythons.get(variable[1], False)

    def _local_rank(self, words: Sequence[Word], index: int, place: _Place) -> bool:
        """Remove `--use_env`, or give the script --local-rank; return whether that was possible."""
        for at in range(index + 1, len(words)):
            if _USE_ENV.fullmatch(words[at].plain):
                self.edits[words[at - 1].end] = (words[at].end, "")
                return True
        script = _script(words[index + 1 :])
        has_variables = any(re.match(r"\"?\$\w|\"?\$\{", word.text) for word in words[index + 1 :])
        if script is None or place.assigned or (has_variables and _USE_ENV.search(self.text)):
            return False
        backslashes = "\\" * (2 ** (place.quotes + 1) - 1)
        behind = words[words.index(script) + 1 :]
        # argparse drops a `--`.
        end = behind[0].end if behind and behind[0].text == "--" else script.end
        self.edits[end] = (end, f" --local-rank={backslashes}${{local_rank}}")
        return True


def _launcher(text: str) -> re.Match[str] | None:
    """Return the match of a word that means torchrun; its group `word` must be replaced."""
    return next(filter(None, (pattern.fullmatch(text) for pattern in _LAUNCHERS)), None)


def _interpreter(words: Sequence[Word], index: int) -> int:
    """Return the place of the word whose options stand before `index`."""
    at = index - 1
    while at > 0 and (words[at].plain.startswith("-") or words[at - 1].plain in ("-W", "-X")):
        at -= 1
    return at


def _text(words: Sequence[Word], index: int) -> str:
    return words[index].text if index < len(words) and words[index].text not in "<>" else ""


def _script(words: Sequence[Word]) -> Word | None:
    """Return the script in a launcher's arguments; None if it is not certain."""
    skip = is_module = False
    unknown = None
    for word in words:
        if word.text in "<>":
            break
        if skip:
            skip = False
        elif word.plain.startswith("-"):
            skip = word.plain in _TAKES
            is_module = is_module or word.plain in ("-m", "--module")
        elif ".py" in word.text or (is_module and not word.plain.startswith("$")):
            return word
        elif not word.plain.startswith("$"):
            return word if unknown is None else None
        else:
            unknown = word
    return unknown if unknown is not None and unknown.text.startswith('"') else None
