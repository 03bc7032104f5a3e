"""Pure data: tokens that are recognised by their beginning, or by the words around them.

The services publish these forms. Two well-kept collections were examined and not used:
detect-secrets reads source files line by line with plugins and half a second of import, and
gitleaks' rule file is written for Go's expressions and needs a context that tails do not have.
Masking also runs inside generated scripts, which have only the standard library.
"""

from __future__ import annotations

BEGINNINGS: tuple[tuple[bytes, bytes], ...] = (  # (beginning of a token, the whole token)
    (b"hf_", rb"hf_(?:(?=[A-Za-z]{0,64}[0-9])[A-Za-z0-9]{12,}|[A-Za-z0-9]{30,})"),
    (b"api_org_", rb"api_org_[A-Za-z0-9]{30,}"),
    (b"gh", rb"gh[pousr]_[A-Za-z0-9]{20,}"),
    (b"github_pat_", rb"github_pat_[A-Za-z0-9_]{20,}"),
    (b"gl", rb"gl(?:pat|dt|rt|soat|cbt)-[A-Za-z0-9_-]{16,}"),
    (b"gl", rb"gl(?:sa|c)_[A-Za-z0-9_+/=-]{20,}"),  # Grafana
    (b"sk-", rb"sk-(?=[A-Za-z_-]{0,64}[0-9])[A-Za-z0-9_-]{16,}"),
    (b"sk_", rb"sk_(?:live|test)_[A-Za-z0-9]{16,}"),  # Stripe
    (b"rk_", rb"rk_(?:live|test)_[A-Za-z0-9]{16,}"),
    (b"whsec_", rb"whsec_[A-Za-z0-9+/=]{16,}"),
    (b"xox", rb"xox[a-z]-[A-Za-z0-9-]{10,}"),  # Slack
    (b"xapp-", rb"xapp-[A-Za-z0-9-]{16,}"),
    (b"AKIA", rb"AKIA[0-9A-Z]{16}(?![0-9A-Za-z])"),
    (b"ASIA", rb"ASIA[0-9A-Z]{16}(?![0-9A-Za-z])"),
    (b"AIza", rb"AIza[0-9A-Za-z_-]{30,}"),
    (b"ya29.", rb"ya29\.[0-9A-Za-z_-]{20,}"),  # Google's OAuth
    (b"GOCSPX-", rb"GOCSPX-[0-9A-Za-z_-]{20,}"),
    (b"nvapi-", rb"nvapi-[A-Za-z0-9_-]{20,}"),
    (b"wandb_v1_", rb"wandb_v1_[A-Za-z0-9_]{20,}"),
    (b"npm_", rb"npm_[A-Za-z0-9]{30,}"),
    (b"pypi-", rb"pypi-[A-Za-z0-9_-]{40,}"),
    (b"dckr_", rb"dckr_(?:pat|oat)_[A-Za-z0-9_-]{16,}"),
    (b"hv", rb"hv[sbr]\.[A-Za-z0-9_-]{20,}"),  # Vault
    (b"SG.", rb"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"),  # SendGrid
    (b"dapi", rb"dapi[0-9a-f]{32}(?:-[0-9]{1,2})?"),  # Databricks
    (b"do", rb"do[opr]_v1_[0-9a-f]{40,}"),  # DigitalOcean
    (b"shp", rb"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32,}"),  # Shopify
    (b"key-", rb"key-[0-9a-f]{32}(?![0-9a-f])"),  # Mailgun
    (b"r8_", rb"r8_[A-Za-z0-9]{30,}"),  # Replicate
    (b"gsk_", rb"gsk_[A-Za-z0-9]{30,}"),  # Groq
    (b"xai-", rb"xai-[A-Za-z0-9_-]{30,}"),
    (b"pplx-", rb"pplx-[A-Za-z0-9]{30,}"),
    (b"rpa_", rb"rpa_[A-Za-z0-9]{30,}"),  # RunPod
    (b"lin_api_", rb"lin_api_[A-Za-z0-9]{30,}"),
    (b"ntn_", rb"ntn_[A-Za-z0-9]{30,}"),  # Notion
    (b"tskey-", rb"tskey-[a-z]{2,16}-[A-Za-z0-9-]{16,}"),  # Tailscale
    (b"ATATT3", rb"ATATT3[A-Za-z0-9_=-]{30,}"),  # Atlassian
    (b"AGE-SECRET-KEY-1", rb"AGE-SECRET-KEY-1[0-9A-Z]{30,}"),
    (b"eyJ", rb"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?"),
)
SURROUNDINGS: tuple[tuple[bytes, bytes], ...] = (  # (word, pattern of it and the token: group 1)
    (b"earer", rb"[Bb]earer[ \t]{1,4}([A-Za-z0-9._~+/-]{16,}=*)"),
    (
        b"andb",
        rb"[Ww]andb[ _-]?(?:login|api|key)[^\n]{0,64}?(?<![0-9a-f])([0-9a-f]{40})(?![0-9a-f])",
    ),
    (b"hooks.slack.com/", rb"hooks\.slack\.com/[a-z]{4,16}/([A-Za-z0-9_/-]{16,200})"),
    (b"/webhooks/", rb"/api/webhooks/[0-9]{5,25}/([A-Za-z0-9_-]{16,200})"),  # Discord
    (b":AA", rb"(?<![0-9A-Za-z])(?:bot)?([0-9]{6,12}:AA[A-Za-z0-9_-]{30,60})"),  # Telegram
    (
        b"-u",  # curl; docker's -u 1000:1000 is no secret
        rb"""(?:[ \t'"]-u|--(?:proxy-)?user)[ \t=]{1,4}["']?[^\s:"'/]{1,128}:
             (?![0-9]{1,12}(?:\s|\Z))([^\s"'@/]{8,512})""",
    ),
    (
        b"ookie",
        rb"""[Cc]ookie["']?[ \t]{0,4}:[ \t]{0,4}["']?
             ([^\s=;"']{1,128}=[^\r\n"']{6,4096})""",
    ),
    (
        b"assword",  # netrc
        rb"(?:login|user)[ \t\r\n]{1,8}\S{1,128}[ \t\r\n]{1,8}password[ \t]{1,8}(\S{4,512})",
    ),
    (
        b":",  # pgpass
        rb"(?m:^)[\w.*-]{1,253}:(?:[0-9]{4,5}|\*):[\w*-]{1,63}:[\w*.@-]{1,63}:([^\s:]{8,256})(?m:$)",
    ),
)
