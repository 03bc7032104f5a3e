"""Which forms of secrets are found in text, and which harmless lines stay: the whole lists.

What is known to pass: a token behind a word and a blank alone (`token …`), and `sig=` outside of an
address.
"""

from cases import check_cases
from secret_shapes import SECRETS, R

from saferun.system.redact import MASK, Masker
from saferun.system.secret_names import is_secret

MASKER = Masker({}, ())
HARMLESS = [
    "key: value",
    "sort_key=name",
    "primary key: id",
    "token_ids: [1, 2, 3]",
    "Cookie jar is empty",
    "auth_method=kubernetes",
    "password: None",
    "secrets.token_hex",
    "the token bucket algorithm",
    "state_dict key model.layers.0.weight",
    'unexpected key(s) in state_dict: "a.b"',
    "special_tokens_map.json",
    "from_pretrained(token=True)",
    "hotkey: ctrl+c",
    "keyboard interrupt",
    "key_padding_mask=None",
    "--token-limit 4096",
    "| key | value |",
    "-u root",
    "docker run -u 1000:1000 image",
    "rsync -e ssh",
    "PGP signature verified",
    "md5 0123456789abcdef0123456789abcdef",
    "uuid GPU-14e799be-cee2-7364-1ed2-56588c2c62e3",
    "node1:1234:5678 [0] NCCL INFO Bootstrap",
    "sk-learn 1.2",
    "https://hooks.example.com/x",
    "bypass=1",
    "secretary: bob",
    "credential_process",
    "tokenized dataset at /data/tok",
    "KeyError: 'api_key'",
    "RuntimeError: key 'a.b' not found",
    "weight_key: q_proj",
    "Bearer of bad news everywhere",
    "signature: (x, y) -> z",
    "def f(token: str, key: int)",
    "cookie_policy=lax",
]
NAMES = [
    "GITHUB_PAT",
    "SLACK_WEBHOOK",
    "COOKIE",
    "VAULT_SECRET_ID",
    "DOCKER_AUTH_CONFIG",
    "NETRC",
    "PGPASSFILE",
    "SENTRY_DSN",
    "AWS_CREDS",
    "BLOB_SAS",
    "MY_JWT",
    "AZURE_STORAGE_CONNECTION_STRING",
    "HF_TOKEN",
    "WANDB_API_KEY",
    "DB_PWD",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "DB_PASS",
    "NPM_AUTH",
    "MY_PASSWD",
    "SSH_PASSPHRASE",
    "VAULT_ROLE",
    "hf_token",
    "TOKENIZERS_PARALLELISM",  # the patterns are the contract, harmless ones included
    "KEYBOARD_LAYOUT",
]
NAMES_OF_NONE = ["VAULT_ADDR", "XAUTHORITY", "SSH_AUTH_SOCK", "GIT_ASKPASS", "PATH", "AUTHOR"]
NAMES_OF_NONE += ["PYTHONHASHSEED", "PWD", "NCCL_DEBUG", ""]


def test_a_secret_of_each_form_is_masked():
    def check(text):
        masked = MASKER.data(text.encode()).decode()
        left = (R[:20], R[::-1][:20], R.upper()[:20], "0123456789abcdef" * 2, "0123456789ABCDEF")
        assert not any(part in masked for part in left), masked
        assert MASK in masked

    check_cases([(text,) for text in SECRETS], check)


def test_a_harmless_line_stays():
    assert [text for text in HARMLESS if MASKER.data(text.encode()).decode() != text] == []


def test_a_name_tells_whether_its_variable_holds_a_secret():
    assert [name for name in NAMES if not is_secret(name)] == []
    assert [name for name in NAMES_OF_NONE if is_secret(name)] == []


def test_the_other_lines_of_a_private_key_without_its_first_line_stay():
    text = f"step 1\n{R}\n{R}\n-----END PRIVATE KEY-----\nstep 2\n"
    assert MASKER.text(text) == f"step 1\n{MASK}-----END PRIVATE KEY-----\nstep 2\n"
