"""One codec: a text means the same in `--set`, in YAML and in a generated script."""

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from saferun.errors import ProfileError
from saferun.export import settings_codec
from saferun.profile.values import read_value, write_value
from saferun.profile.yaml_reader import parse
from saferun.settings import KEYS, Value

GOOD = [
    ("hooks.compile.autotune", "off", "off"),
    ("hooks.compile.fallback", "yes", "on"),
    ("hooks.init.timeout_s", "1e5", 100000.0),
    ("hooks.init.timeout_s", "1_000.5", 1000.5),
    ("retry.attempts", "0x3", 3),
    ("retry.deadline_s", "~", None),
    ("retry.deadline_s", "", None),
    ("retry.debug_last", "On", True),
    ("retry.backoff_s", "[1, 2]", (1.0, 2.0)),
    ("retry.backoff_s", "[ .5,1e1 ]", (0.5, 10.0)),
    ("retry.resume_args", "[--resume, 'x y']", ("--resume", "x y")),
    ("retry.resume_args", '["it\'s", \'say ""\', "on", 3]', ("it's", 'say ""', "on", "3")),
    ("retry.resume_args", "[]", ()),
    ("retry.resume.checkpoints", "out/step-*", "out/step-*"),
    ("retry.resume.checkpoints", "'{--out}/[0-9]*'", "{--out}/[0-9]*"),
    ("retry.resume.checkpoints", "{--a={--b=c d}}/{X}/*", "{--a={--b=c d}}/{X}/*"),
    ("retry.resume.checkpoints", "~", ""),
    ("retry.resume.args", "[--from={checkpoint}]", ("--from={checkpoint}",)),
    (
        "retry.resume.args",
        "[ {checkpoint}, '{step}',x{A=b}y ]",
        ("{checkpoint}", "{step}", "x{A=b}y"),
    ),
    ("mitigate.never", "[compile-off, split-size]", ("compile-off", "split-size")),
]
# Open sections take the text as it is; YAML has rules of its own for what is no text there.
OPEN = [
    ("env.A", "off", "off"),
    ("env.A", "", ""),
    ("env.A", "{a: b}", "{a: b}"),
    ("torchrun.nproc-per-node", "2", "2"),
    ("torchrun.standalone", "true", "true"),
    ("torchrun.standalone", "on", "true"),
    ("torchrun.no_python", "No", "false"),
]
BAD = [
    ("hooks.compile.autotun", "off", ["unknown key", "`hooks.compile.autotune`"]),
    ("hooks.compile", "off", ["is a group", "hooks.compile.autotune"]),
    (
        "retry.attempts",
        "",
        ["an empty value", "--set retry.attempts", "whole number of at least 1"],
    ),
    ("retry.attempts", "[", ["`[`", "whole number"]),
    ("retry.attempts", "0", ["at least 1"]),
    ("retry.attempts", '"2"', ["whole number"]),
    ("retry.backoff_s", "[2, 1]", ["two numbers"]),
    ("retry.resume_args", "--resume", ["a list"]),
    ("retry.resume_args", "[a, on]", ["a list"]),
    ("retry.resume.args", "[--from={checkpoint: x}]", ["a list", "quotes"]),
    ("hooks.compile.autotune", "of", ["`off`"]),
    ("locks.gpu", "warn", ["`locks.gpus`"]),
    ("hooks.init.timeout_s", "inf", ["a number"]),
    ("hooks.init.timeout_s", "9" * 400, ["a number"]),
    ("env.1A", "x", ["cannot be a variable's name"]),
    ("env.SAFERUN_RETRIES", "x", ["saferun's own"]),
    ("env.A", "a\0b", ["NUL"]),
    ("torchrun.standalone", "maybe", ["true or false"]),
    ("torchrun.nproc", "2", ["unknown torchrun option"]),
]


def from_set(key: str, text: str) -> Value:
    return read_value(key, text, "--set").value


def from_yaml(key: str, text: str) -> Value:
    """The value that a profile file gives, where the text stands behind the key as it is."""
    *groups, name = key.split(".")
    lines = [f"{'  ' * depth}{group}:" for depth, group in enumerate(groups)]
    lines.append(f"{'  ' * len(groups)}{name}: {text}")
    return parse("\n".join(["schema: 1", *lines, ""]), "p.yaml").leaves[key].value


def from_script(key: str, text: str) -> Value:
    """The value that a generated script hands over, where a person has written the text in it."""
    return settings_codec.read([*("p.yaml", "", key, text)], "run.sh").chain[0].leaves[key].value


@pytest.mark.parametrize("read", [from_set, from_yaml, from_script])
def test_a_text_means_the_same_wherever_it_stands(read):
    meant = [(key, text, read(key, text)) for key, text, _ in GOOD]
    assert meant == GOOD


@pytest.mark.parametrize("read", [from_set, from_script])
def test_open_sections_take_the_text_as_it_is(read):
    assert [(key, text, read(key, text)) for key, text, _ in OPEN] == OPEN


def test_what_does_not_fit_is_one_line_with_place_and_fix():
    for key, text, parts in BAD:
        with pytest.raises(ProfileError) as caught:
            from_set(key, text)
        message = str(caught.value)
        assert [part for part in parts if part not in message] == [], (key, text, message)
        with pytest.raises(ProfileError):
            from_script(key, text)


# Surrogates are no text; the two that are hidden braces meanwhile are no characters.
CHARACTERS = st.characters(exclude_categories=("Cs",), exclude_characters="\ufdd0\ufdd1")


def values_of(key: str) -> st.SearchStrategy[Value]:
    """Any value that a key can hold."""
    spec = KEYS[key]
    least = spec.least if spec.least is not None else -1e9
    numbers = st.floats(least, 1e300, allow_nan=False)
    found: dict[str, st.SearchStrategy[Value]] = {
        "choice": st.sampled_from(spec.choices or ("",)),
        "bool": st.booleans(),
        "int": st.integers(int(least), 2**63),
        "number": numbers,
        "text": st.text(CHARACTERS),
        "texts": st.lists(st.text(CHARACTERS)).map(tuple),
        "range": st.tuples(numbers, numbers).map(lambda pair: (min(pair), max(pair))),
    }
    if spec.kind == "texts" and spec.choices:
        return st.lists(st.sampled_from(spec.choices)).map(tuple)
    return found[spec.kind] | st.none() if spec.nullable else found[spec.kind]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(KEYS)).flatmap(lambda k: st.tuples(st.just(k), values_of(k))))
def test_every_value_survives_set_yaml_and_script(pair):
    key, value = pair
    text = write_value(key, value)
    assert from_set(key, text) == value
    assert from_script(key, text) == value
    tree: object = json.loads(json.dumps(value))
    for name in reversed(key.split(".")):
        tree = {name: tree}
    assert isinstance(tree, dict)
    document = yaml.safe_dump({"schema": 1, **tree})
    assert parse(document, "p.yaml").leaves[key].value == value


# Texts near the edges of every kind, as a person might type them.
SCALARS = "1e5 0x3 017 1_0 .5 5. -1 +3 1e 0b1 1:30 2026-01-01 on OFF Yes null ~ none true keep off"
LISTS = ("[1, 2]", "[a, 'b c']", '["x", y]', "[]", "[1]", "[[1], 2]", "[a", "[on, a]", "[1e1, 2e1]")
WORDS = st.sampled_from([*SCALARS.split(), "''", '"on"', *LISTS])


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(KEYS)), WORDS)
def test_set_yaml_and_script_agree_on_what_a_person_types(key, text):
    def meaning(read) -> object:
        try:
            return read(key, text)
        except ProfileError:
            return "refused"

    assert meaning(from_set) == meaning(from_yaml) == meaning(from_script)
