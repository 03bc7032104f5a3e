"""The parser of profiles: what is accepted, and the message for what is not."""

import textwrap

import pytest
from cases import check_cases

from saferun.errors import ProfileError
from saferun.profile import yaml_reader


def read(text: str) -> dict:
    doc = yaml_reader.parse(textwrap.dedent(text), "p.yaml")
    return {key: leaf.value for key, leaf in doc.leaves.items()}


def refusal(text: str) -> str:
    with pytest.raises(ProfileError) as caught:
        yaml_reader.parse(textwrap.dedent(text), "p.yaml")
    assert caught.value.code == 78
    return str(caught.value)


def test_a_value_may_be_bare_or_carry_its_reasons_and_its_condition():
    doc = yaml_reader.parse(
        textwrap.dedent("""
        schema: 1
        hooks:
          compile:
            autotune: no
            enabled: {value: off, why: it breaks, source: "x", when: {torch: ">=2.8,<2.10"}}
        """),
        "p.yaml",
    )
    assert doc.leaves["hooks.compile.autotune"].value == "off"
    leaf = doc.leaves["hooks.compile.enabled"]
    assert (leaf.value, leaf.why, leaf.source) == ("off", "it breaks", "x")
    assert leaf.when == (("torch", ">=2.8,<2.10"),)
    assert leaf.line == 6


def test_a_number_for_a_variable_stays_as_it_was_typed():
    env = "env: {A: 0x10, B: 010, C: 1e3, D: 1_000, E: 2025-01-02, F: '', G: 1:30}"
    assert read(f"schema: 1\n{env}") == {
        "env.A": "0x10",
        "env.B": "010",
        "env.C": "1e3",
        "env.D": "1_000",
        "env.E": "2025-01-02",
        "env.F": "",
        "env.G": "1:30",
    }


WRONG = {
    "unknown section": (
        "schema: 1\nenv:\n  A: '1'\nhoks: {}",
        ["unknown key `hoks`", "p.yaml, line 4", "did you mean `hooks`?"],
    ),
    "unknown key in a group": (
        "schema: 1\nhooks:\n  compile:\n    autotun: off",
        ["unknown key `autotun`", "line 4", "`hooks.compile`", "did you mean `autotune`?"],
    ),
    "duplicate key": (
        "schema: 1\nenv:\n  A: '1'\n  A: '2'",
        ["duplicate key `A`", "line 4", "first given on line 3"],
    ),
    "wrong type": (
        "schema: 1\nhooks: {init: {timeout_s: soon}}",
        ["`soon`", "line 2", "hooks.init.timeout_s", "a number of at least 1 (s)"],
    ),
    "boolean variable": (
        "schema: 1\nenv: {A: off}",
        ["a boolean where text belongs", 'put it in quotes, "off"'],
    ),
    "empty variable": ("schema: 1\nenv: {A: }", ["nothing where text belongs", "quotes"]),
    "list variable": ("schema: 1\nenv: {A: [1]}", ["a list where text belongs"]),
    "scalar for a group": (
        "schema: 1\nhooks: {compile: off}",
        ["a boolean where a mapping belongs", "enabled, autotune, cudagraphs, fallback"],
    ),
    "torchrun option": (
        "schema: 1\ntorchrun: {nproc_per_nod: 2}",
        ["unknown torchrun option `nproc_per_nod`", "nproc-per-node"],
    ),
    "annotation": (
        "schema: 1\nenv: {A: {valu: x}}",
        ["unknown key `valu`", "did you mean `value`?"],
    ),
    "condition": (
        "schema: 1\nenv: {A: {value: x, when: {torch: new}}}",
        ["`new` is not a condition on `torch`", ">=2.8,<2.10"],
    ),
    "half a GPU": ("schema: 1\nenv: {A: {value: x, when: {gpus: '1.5'}}}", ["on `gpus`", ">=2,<8"]),
    "unknown condition": (
        "schema: 1\nenv: {A: {value: x, when: {cuda: '12'}}}",
        ["unknown condition `cuda`"],
    ),
    "schema": ("schema: 2", ["schema 2 is not known", "`schema: 1`"]),
    "no schema": ("name: x", ["has no `schema`", "add `schema: 1`"]),
    "a list": ("- a\n- b", ["a list where a mapping belongs", "line 1"]),
    "empty": ("", ["the file is empty"]),
    "broken YAML": ("a: [1\nb: 2", ["not readable as YAML", "line 2"]),
    "extends": ("schema: 1\nextends: {a: b}", ["a list of profile names"]),
    "match": ("schema: 1\nmatch: {cpu: x}", ["unknown key `cpu`"]),
    "odd key": ("schema: 1\n? [a]\n: b", ["a key that is not a word"]),
    "a tag makes no object": (
        "schema: 1\nenv: !!python/object/apply:os.system ['touch x']",
        ["a list where a mapping belongs"],
    ),
    "recursive": ("schema: 1\nextends: &a [*a]", ["a list of profile names"]),
    "deep": ("[" * 3000, ["not readable as YAML"]),
    "half a character": ('schema: 1\nenv: {X: "\\ud800"}', ["lone surrogate"]),
    "large": ("a: " + "x" * 300_000, ["300,003 characters"]),
}


def test_what_is_wrong_is_said_with_place_and_fix():
    def check(text, parts):
        message = refusal(text)
        for part in parts:
            assert part in message
        assert "\n" not in message

    check_cases(WRONG, check)


def test_all_errors_of_a_file_are_found_and_counted():
    text = "schema: 1\nhoks: {}\nenv: {A: off}\nretry: {attempts: x}"
    assert len(yaml_reader.check(text, "p.yaml")[1]) == 3
    noted = "schema: 1\nretry: {attempts: {value: maybe, why: [1], source: on}}"
    assert len(yaml_reader.check(noted, "p.yaml")[1]) == 3
    assert "2 more: saferun profiles check p.yaml" in refusal(text)


def test_aliases_are_allowed_and_cannot_blow_up():
    bomb = "schema: 1\nx: &a [1,1,1,1,1,1,1,1]\n" + "".join(
        f"y{i}: &b{i} [{', '.join(['*a' if i == 0 else f'*b{i - 1}'] * 8)}]\n" for i in range(8)
    )
    assert "unknown key `x`" in refusal(bomb)
    assert read("schema: 1\nenv: {A: &v one, B: *v}") == {"env.A": "one", "env.B": "one"}


@pytest.mark.parametrize(
    "text",
    [
        "schema: 1\nextends: [" + "a," * 125_000 + "]\n",
        "schema: 1\nretry: {backoff_s: [" + "1," * 125_000 + "]}\n",
        "schema: 1\nx: " + "[" * 120_000,
    ],
    ids=["a list", "a list of numbers", "nested"],
)
def test_a_file_with_very_many_entries_is_refused_before_it_is_read_whole(text):
    doc, (error, *_) = yaml_reader.check(text, "x.yaml")
    assert doc is None
    assert "more than 20,000 entries" in str(error) or "RecursionError" in str(error)
