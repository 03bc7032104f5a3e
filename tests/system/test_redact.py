"""Secrets never reach the disk, and a log stays readable for a person."""

import base64
import html
import json
import re
import urllib.parse

import pytest
from backtracking import grows_faster_than_the_text
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from saferun.system.redact import MASK, Masker

SECRET = "s3cr3t-Value/with+odd=chars"
PLAIN = Masker({}, [])


def masker(*argv: str, **environ: str) -> Masker:
    return Masker(environ, argv)


# Names (test_secret_forms.py has more of them)


def test_a_setting_is_masked_whole_where_its_name_is_a_secrets():
    assert PLAIN.setting("WANDB_API_KEY", "x") == MASK
    assert PLAIN.setting("PWD", "/usr/bin:/bin") == "/usr/bin:/bin"
    assert (
        masker(HF_TOKEN=SECRET).setting("URL", f"https://h/?a={SECRET}") == f"https://h/?a={MASK}"
    )


# The values of this run's secrets, wherever they stand


@pytest.mark.parametrize(
    "write",
    [
        lambda value: value,
        lambda value: urllib.parse.quote(value, safe=""),
        urllib.parse.quote,
        urllib.parse.quote_plus,
        lambda value: re.sub("%..", lambda m: m[0].lower(), urllib.parse.quote(value)),
        lambda value: value.replace("/", "\\/"),
        lambda value: json.dumps(value)[1:-1],
        lambda value: json.dumps(value, ensure_ascii=False)[1:-1],
        lambda value: repr(value)[1:-1],
        lambda value: json.dumps(json.dumps(value))[3:-3],
        lambda value: repr(value.encode())[2:-1],
        lambda value: value.replace("'", "'\\''"),
        html.escape,
        lambda value: html.escape(value, quote=False),
        lambda value: base64.b64encode(value.encode()).decode().rstrip("="),
        lambda value: base64.urlsafe_b64encode(value.encode()).decode().rstrip("="),
    ],
)
@pytest.mark.parametrize(
    "value",
    [
        "größe-schlüssel-€",
        "it's a secret",
        "p&s <w>'q\"é\\z/9K=Lm",
        "Zq8rTy2LpWm4KxVn7Bd3",
        "?>?>~~~ÿÿÿ",
    ],
)
def test_a_secret_is_masked_as_other_programs_write_it(write, value):
    assert masker(MY_TOKEN=value).text(f"<{write(value)}>") == f"<{MASK}>"


def test_a_secret_that_base64_has_with_what_follows_it_is_masked():
    written = base64.b64encode(b"Zq8rTy2LpWm4KxVn7Bd\n").decode()
    masked = masker(MY_TOKEN="Zq8rTy2LpWm4KxVn7Bd").text(written)
    assert masked.removeprefix(MASK) in (written[-4:], written[-2:])  # of the last group at most


def test_each_line_of_a_private_key_is_masked_alone_too():
    lines = ["b3BlbnNzaC1rZXktdjEAAAAABG5vbmU", "QyNTUxOQAAACBvrk4vbjQ2cnUyb3Zh"]
    given = masker(DEPLOY_KEY="\n".join(lines))
    assert given.text(f"read {lines[1]} ok") == f"read {MASK} ok"


def test_overlapping_secrets_leave_no_part_of_either():
    given = masker(A_TOKEN="abcdefgh1234", B_TOKEN="1234ijklmnop")
    assert given.text("<abcdefgh1234ijklmnop>") == f"<{MASK}>"


def test_a_secret_of_bytes_that_are_no_text_is_masked():
    value = b"\xff\xfebinary-token".decode("utf-8", "surrogateescape")  # as os.environ has it
    assert masker(X_TOKEN=value).data(b"a \xff\xfebinary-token b\xff") == b"a *** b\xff"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "disabled"),
        ("MAX_TOKENS", "16777216"),
        ("RANDOM_KEY", "12345678"),
        ("KEYBOARD_LAYOUT", "qwertzuiop"),
        ("TOKENIZER_NAME", "mistralai/Mistral-7B"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/root/gcp/credentials.json"),
        ("SSH_KEY_FILE", "/x/y"),
        ("SHORT_TOKEN", "seven77"),
        ("SECRET_FLAG", "undefined"),
    ],
)
def test_a_variable_with_an_ordinary_value_masks_no_words_of_a_log(name, value):
    text = f"step {value} of {value}, done"
    assert Masker({name: value}, []).text(text) == text


@pytest.mark.parametrize("value", ["/AbC9+dEfGhIjKlMnOpQrStUvWxYz0123456789Ab", "12345678"])
def test_a_secret_that_looks_harmless_is_masked_where_its_name_leaves_no_doubt(value):
    assert Masker({"AWS_SECRET_ACCESS_KEY": value}, []).text(f"a {value} b") == f"a {MASK} b"


def test_the_password_of_an_exported_url_is_a_secret_everywhere():
    given = masker(HTTPS_PROXY="http://me:pr0xyPassw0rd@proxy:3128")
    assert given.text("tried pr0xyPassw0rd twice") == f"tried {MASK} twice"


def test_a_secret_of_the_command_line_is_a_secret_everywhere():
    for arguments in (["--hf-token", SECRET], [f"--api_key={SECRET}"], [f"wandb.api_key={SECRET}"]):
        assert masker("train.py", *arguments).text(f"got {SECRET}") == f"got {MASK}"


# Tails


def test_the_end_of_a_secret_at_the_beginning_of_a_tail_is_masked():
    given = masker(MY_TOKEN=SECRET)
    assert given.data(SECRET[9:].encode() + b" and on") == b"*** and on"
    assert given.data(SECRET[-4:].encode() + b" and on") == b"*** and on"
    assert given.data(SECRET[-3:].encode() + b" and on") == SECRET[-3:].encode() + b" and on"
    inside_a_letter = "schlüsselwörter".encode()[5:]
    assert masker(MY_TOKEN="schlüsselwörter").data(inside_a_letter + b"!") == b"***!"


# Text: by name, by place, by shape

MASKED = {
    "https://user:hunter2@host/x": "https://user:***@host/x",
    "postgres://u:p@ss@db:5432/x": "postgres://u:***@db:5432/x",
    "git clone https://0123456789abcdef0123@github.com/a/b": "git clone https://***@github.com/a/b",
    "GET https://h/p?a=1&access_token=abc&b=2": "GET https://h/p?a=1&access_token=***&b=2",
    "https://h/p?key=abc#x": "https://h/p?key=***#x",
    "https://s3/o?X-Amz-Signature=0a1b&x=1": "https://s3/o?X-Amz-Signature=***&x=1",
    "export WANDB_API_KEY='a b c'": "export WANDB_API_KEY='***'",
    "password: hunter2": "password: ***",
    '{"api_key": "value", "lr": 1}': '{"api_key": "***", "lr": 1}',
    r'{"api_key": "va\"lue"}': '{"api_key": "***"}',
    r'"{\"apiKey\": \"value\"}"': r'"{\"apiKey\": \"***\"}"',
    "Namespace(hf_token='abc', lr=3)": "Namespace(hf_token='***', lr=3)",
    "{'client_secret': b'abc'}": "{'client_secret': b'***'}",
    'os.environ["HF_TOKEN"] = "abc"': 'os.environ["HF_TOKEN"] = "***"',
    "Authorization: Bearer abc.def": "Authorization: Bearer ***",
    "curl -H 'Authorization: Basic YTpi' x": "curl -H 'Authorization: Basic ***' x",
    "'authorization': 'Bearer abc'": "'authorization': 'Bearer ***'",
    "sent Bearer abcdefghij0123456789": "sent Bearer ***",
    "run t.py --hf-token abc --lr 3": "run t.py --hf-token *** --lr 3",
    "['t.py', '--wandb-key', 'abc', '-v']": "['t.py', '--wandb-key', '***', '-v']",
    "x hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567 y": "x *** y",
    "wandb login 0123456789abcdef0123456789abcdef01234567": "wandb login ***",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nab==\n-----END RSA PRIVATE KEY-----": (
        "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----"
    ),
    "-----BEGIN PRIVATE KEY-----\nMIIE": "-----BEGIN PRIVATE KEY-----***",
}


KEPT = (
    "KeyError: 'lm_head.weight'",
    "TypeError: got an unexpected keyword argument 'key'",
    "Missing key(s) in state_dict: 'a.b', 'c.d'",
    "unexpected token: '}'",
    "max_tokens=512, max_new_tokens: 4096, tokens/s: 123.4",
    "tokens=123456 loss=2.3",
    "pad_token: '<pad>', eos_token='</s>', \"mask_token\": \"[MASK]\"",
    "TOKENIZERS_PARALLELISM=(true | false)",
    "tokenizer=gpt2 num_key_value_heads=8 cache_key: abc sorted(x, key=len)",
    "Namespace(hf_token=None, api_key='') token_type='word' token_id_map=abc",
    "--tokenizer gpt2 --max-tokens 8 --use-token --lr 3",
    "HF_TOKEN=$HF_TOKEN python t.py",
    "git@github.com:a/b.git ssh://git@host/x http://localhost:8080/@x",
    "commit 0123456789abcdef0123456789abcdef01234567",
    "hf_hub_download hf_transfer disk-usage-of-sk-learn-0123456789abcdef",
    "the bearer of bad news, a token of love, the key to it: patience",
    "std::token::value keys: ['a', 'b']",
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
)


def test_secrets_in_text_are_masked():
    for masked_by in (PLAIN.text, lambda text: PLAIN.data(text.encode()).decode()):
        found = {text: masked_by(text) for text in MASKED}
        assert found == MASKED


def test_masked_text_and_text_without_secrets_stay():
    assert {text: PLAIN.text(text) for text in (*MASKED.values(), *KEPT)} == {
        text: text for text in (*MASKED.values(), *KEPT)
    }


def test_no_line_of_real_failures_is_changed(corpus):
    for line in (corpus / "failure_logs.jsonl").read_text(encoding="utf-8").splitlines():
        log = json.loads(line)["log"]
        assert PLAIN.text(log) == log


# Command lines


def test_a_command_line_is_masked_word_by_word():
    arguments = "t.py --hf-token abc --token=x -token y --api_key=z HF_TOKEN=q a.api_key=r --lr 3"
    masked = "t.py --hf-token *** --token=*** -token *** --api_key=*** HF_TOKEN=*** a.api_key=***"
    assert PLAIN.argv(arguments.split()) == [*masked.split(), "--lr", "3"]
    assert PLAIN.argv(["--api_key=two words", "--token", "-x1_word"]) == [
        "--api_key=***",
        "--token",
        MASK,
    ]
    for plain in (["--tokenizer", "gpt2", "--use-token"], ["--token", "-v", "", "-", "--"]):
        assert PLAIN.argv(plain) == plain


# Laws

TEXT = st.text(st.characters(exclude_categories=()), max_size=60)
VALUES = st.text(st.characters(exclude_categories=("Cs", "Cc", "Z")), min_size=8, max_size=40)


@settings(deadline=None)
@given(VALUES, TEXT, TEXT, st.sampled_from(["A_TOKEN", "MY_SECRET", "apiKey", "PASSWORD"]))
@example("***abcde", "***abcde", "abcdeabcde", "A_TOKEN")
@example("***abcde", "***", "abcde" * 100, "A_TOKEN")
@example("********", "***", "**********", "A_TOKEN")
def test_no_secret_survives_in_any_surrounding(value, before, after, name):
    assume(not re.fullmatch(r"[0-9.,_+-]+([eE][-+]?\d+)?|[<\[{$./~].*", value))
    assume(value.lower() not in ("disabled", "undefined", "required", "optional"))
    masked = Masker({name: value}, []).text(before + value + after)
    assert value not in masked


PIECES = st.sampled_from(
    [*MASKED, *MASKED.values(), "token", "=", ": ", '"', "'", "\\", " ", "--", "key", "@", "://"]
)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.one_of(PIECES, st.text(max_size=4)), max_size=8), VALUES)
def test_masking_twice_is_masking_once(pieces, value):
    given = masker(A_TOKEN=value)
    once = given.text("".join(pieces))
    assert given.text(once) == once


@settings(deadline=None)
@given(st.binary(max_size=200), VALUES)
def test_bytes_without_secrets_pass_unchanged(data, value):
    assume(not any(value.encode().endswith(data[:n]) for n in range(4, 41)))
    assume(value.encode() not in data)
    assume(not re.search(rb"[=:@-]", data))
    assert masker(A_TOKEN=value).data(data) == data


# Time

LOG_LINE = "[rank0] step 100 tokens=123456 loss=2.345 lr=1e-4 tokens/s: 123.4\n"
PIECES_OF_LONG_INPUT = (
    *("a", "-", "key", "://", "sk-", "token=", "\\", "--a", "tokenizer=", "'", "Bearer ", "eyJ."),
    LOG_LINE,
)


def test_no_input_takes_more_than_linear_time():
    """Four times the input takes about four times as long; if squared, it takes sixteen times."""
    masker_of_a_token = masker(A_TOKEN="an-ordinary-secret")

    def use(text: str) -> bytes:
        return masker_of_a_token.data(text.encode())

    slow = [p for p in PIECES_OF_LONG_INPUT if grows_faster_than_the_text(use, p, 240_000)]
    assert slow == []
