"""Which forms of secrets are found in text, and which harmless lines stay: the whole lists.

What is known to pass: a token behind a word and a blank alone (`token …`), and `sig=` outside of an
address.
"""

from __future__ import annotations

from cases import check_cases
from secret_shapes import SECRETS, R

from saferun.system.redact import MASK, Masker
from saferun.system.secret_names import is_secret

MASKER = Masker({}, ())
HARMLESS = [
    "tokens/s: 123456",
    "max_tokens=512",
    "pad_token: '<pad>'",
    "KeyError: 'lm_head.weight'",
    "tokenizer=gpt2",
    "key: value",
    "sort_key=name",
    "primary key: id",
    "token_ids: [1, 2, 3]",
    "num_tokens: 4096",
    "train/tokens 1234567",
    "seq_len=1024 tokens=4096",
    "Cookie jar is empty",
    "auth: none",
    "auth_method=kubernetes",
    "author: Jane",
    "passes: 3",
    "password: None",
    "secrets.token_hex",
    "the token bucket algorithm",
    "keys: ['a', 'b']",
    "state_dict key model.layers.0.weight",
    "missing keys: lm_head.weight",
    'unexpected key(s) in state_dict: "a.b"',
    "special_tokens_map.json",
    "tokenizer_config.json",
    "from_pretrained(token=True)",
    "use_auth_token=False",
    "loss=2.13 tok/s=123",
    "monkey=1",
    "hotkey: ctrl+c",
    "keyboard interrupt",
    "key_padding_mask=None",
    "n_keys=12",
    "cache_key=abc",
    "--token-limit 4096",
    "eos_token='</s>'",
    "step 100 | loss 3.2 | tok/sec 123456",
    "| key | value |",
    "│ loss │ 2.13 │",
    "-u root",
    "docker run -u 1000:1000 image",
    "chown -R user:group",
    "rsync -e ssh",
    "PGP signature verified",
    "git sha: 0123456789abcdef0123456789abcdef01234567",
    "md5 0123456789abcdef0123456789abcdef",
    "uuid GPU-14e799be-cee2-7364-1ed2-56588c2c62e3",
    "port 29500:29500:tcp",
    "10.0.0.1:29500",
    "node1:1234:5678 [0] NCCL INFO Bootstrap",
    "sk-learn 1.2",
    "https://hooks.example.com/x",
    "passed: 12",
    "compass: north",
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
    "sig=inspect",
    "cookie_policy=lax",
]
NAMES = [
    "GITHUB_PAT",
    "REGISTRY_AUTH",
    "BASIC_AUTH",
    "SLACK_WEBHOOK",
    "DISCORD_WEBHOOK_URL",
    "COOKIE",
    "SESSION_COOKIE",
    "VAULT_SECRET_ID",
    "VAULT_ROLE",
    "DOCKER_AUTH_CONFIG",
    "NETRC",
    "PGPASSFILE",
    "SENTRY_DSN",
    "AWS_CREDS",
    "BLOB_SAS",
    "MY_JWT",
    "AZURE_STORAGE_CONNECTION_STRING",
    "NPM_AUTH",
    "HF_TOKEN",
    "WANDB_API_KEY",
    "DB_PWD",
    "hf_token",
    "AWS_SECRET_ACCESS_KEY",
    "Password",
    "MY_PASSWD",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "SSH_PASSPHRASE",
    "DB_PASS",
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
