"""Each phrase of failures.yaml is printed by the releases that it claims; what the tool finds."""

import pathlib
import struct

import pytest
from repo import installed_torch, read_yaml, tool
from sandbox import text_of, write

message_texts, messages = tool("message_texts"), tool("messages")
RELEASES = {"torch": ["2.4.1", "2.5.1", "2.10.0"], "nccl": ["2.20.5"]}


def record(**found: dict[str, tuple[str, ...]]) -> object:
    by_digest = {messages.digest(phrase.replace("_", " ")): by for phrase, by in found.items()}
    return messages.Record(RELEASES, by_digest)


def test_each_phrase_is_printed_by_the_releases_that_it_claims():
    says = messages.claimed(read_yaml(text_of(messages.FAILURES)))
    assert sum(claim != messages.UNCLAIMED for claim in says.values()) > 400
    assert messages.misfits(says, messages.load()) == []


@pytest.mark.parametrize("library", ["torch", "nccl", "triton", "transformers", "deepspeed"])
def test_the_record_holds_several_releases_of_a_library(library):
    assert len(messages.load().releases[library]) > 4


@pytest.mark.parametrize(
    ("claim", "fits"),
    [
        ("torch 2.4..", False),
        ("torch 2.4..2.5", True),
        ("torch 2.5..2.10", False),
        ("nccl 2.20..", False),
        pytest.param("elsewhere", True, id="other programs print what they like"),
    ],
)
def test_a_phrase_that_a_release_lost_is_named_with_where_it_is(claim, fits):
    wrong = messages.misfits({"it hung": claim}, record(it_hung={"torch": ("2.4", "2.5")}))
    assert wrong == ([] if fits else [f"`it hung` claims {claim}, and is in torch 2.4..2.5"])


def test_a_claim_of_a_release_that_nobody_looked_at_is_an_error():
    with pytest.raises(ValueError, match=r"2\.7"):
        messages.misfits({"it hung": "torch 2.7.."}, record(it_hung={"torch": ("2.4",)}))


def test_a_record_says_the_same_when_it_is_written_and_read(tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "RECORD", tmp_path / "messages.yaml")
    found = record(it_hung={"torch": ("2.4", "2.10"), "nccl": ("2.20",)}, it_died={})
    messages.write(found)
    read = messages.load()
    assert read.releases == RELEASES
    assert read.found == {key: by for key, by in found.found.items() if by}


def test_a_release_that_is_added_leaves_what_is_known_of_the_others():
    old = record(it_hung={"torch": ("2.4", "2.10")}, it_died={"torch": ("2.4",)})
    texts = {"torch": {"2.10.1": message_texts.Texts(("the job has died",), ())}}
    says = ["it hung", "the job has died"]
    new = messages.merged(old, messages.looked_up(says, texts), says)
    assert new.releases["torch"] == ["2.4.1", "2.5.1", "2.10.1"]
    assert {name: by["torch"] for name, by in new.found.items()} == {
        messages.digest("it hung"): ("2.4",),
        messages.digest("the job has died"): ("2.10",),
    }


# What a package prints


@pytest.mark.parametrize(
    ("source", "phrase"),
    [
        pytest.param('raise ValueError("Rank is lost")', "rank is lost", id="literal"),
        pytest.param('f"Rank {rank} is lost"', "rank ... is lost", id="filled"),
        pytest.param('x = "Rank " + str(rank) + " is lost"', "rank ... is lost", id="added"),
        pytest.param('x = ("Rank is "\n     "lost")', "rank is lost", id="two-lines"),
        pytest.param("class RankIsLostError(Exception): ...", "rankislosterror", id="class"),
    ],
)
def test_a_message_in_python_is_found(tmp_path, source, phrase):
    write(tmp_path / "module.py", f"x = 1\nx = {source}" if source[0] == "f" else source)
    assert prints(tmp_path, phrase)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param('"""The rank is lost."""', id="document"),
        pytest.param("# the rank is lost", id="comment"),
        pytest.param('x = "is lost: the rank"', id="another-order"),
        pytest.param('x, y = "the rank", "is lost"', id="two-messages"),
    ],
)
def test_what_is_no_message_is_not_found(tmp_path, source):
    write(tmp_path / "module.py", source)
    assert not prints(tmp_path, "the rank ... is lost")
    assert not prints(tmp_path, "the rank is lost")


def test_a_message_in_c_that_is_built_later_is_found(tmp_path):
    write(tmp_path / "driver.c", 'const char *prefix = "Rank is lost: ";')
    assert prints(tmp_path, "rank is lost")


def test_tests_of_a_package_print_nothing(tmp_path):
    write(tmp_path / "tests" / "test_a.py", 'x = "the rank is lost"')
    assert not prints(tmp_path, "the rank is lost")


def test_the_constants_of_a_library_are_messages_and_the_rest_of_it_is_not(tmp_path):
    (tmp_path / "libx.so").write_bytes(elf(b"\0Rank %d is lost\0", b"\0and more code\0"))
    assert prints(tmp_path, "rank ... is lost")
    assert not prints(tmp_path, "and more code")


def test_releases_are_told_apart_by_what_they_print():
    older = message_texts.Texts(("the rank is lost", "ok then"), ("from nccl",))
    newer = message_texts.Texts(("ok then",), ("from nccl", "the rank is gone"))
    both = message_texts.Releases([older, newer])
    assert both.that_print("The rank is lost") == {0}
    assert both.that_print("the rank is ... gone") == {1}
    assert both.that_print("ok then") == both.that_print("from ... nccl") == {0, 1}
    assert both.that_print("nobody says this") == set()


def prints(package: pathlib.Path, phrase: str) -> bool:
    return bool(message_texts.Releases([message_texts.read(package)]).that_print(phrase))


def elf(constants: bytes, code: bytes) -> bytes:
    """Return a 64-bit ELF file with the sections .rodata and .text."""
    names = b"\0.rodata\0.text\0.shstrtab\0"
    parts = [constants, code, names]
    offsets = [64, 64 + len(constants), 64 + len(constants) + len(code)]
    table = offsets[2] + len(names)
    heads = b"".join(
        struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, offset, len(part), 0, 0, 1, 0)
        for name, offset, part in zip((1, 9, 15), offsets, parts, strict=True)
    )
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQ", 3, 62, 1, 0, 0, table)
    head += struct.pack("<IHHHHHH", 0, 64, 0, 0, 64, 3, 2)
    return head + b"".join(parts) + heads


@pytest.mark.slow
def test_the_record_agrees_with_the_installed_torch():
    """After an upgrade of torch this asks for `python tools/messages.py add torch==X`."""
    folder, release = installed_torch()
    known = messages.load()
    assert release in known.releases["torch"], f"python tools/messages.py add torch=={release}"
    says = messages.claimed(read_yaml(text_of(messages.FAILURES)))
    texts = message_texts.read(folder)
    found = messages.looked_up(says, {"torch": {release: texts}}).found
    recorded = {
        key for key, by in known.found.items() if messages.minor(release) in by.get("torch", ())
    }
    assert set(found) - recorded == set()
