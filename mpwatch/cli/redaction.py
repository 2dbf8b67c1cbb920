"""Takes secrets out of a command line before it is written to run.json.

Pure. Errs towards hiding: a harmless value lost costs little, a token in a shared directory much.
"""

import re
from collections.abc import Sequence
from typing import Final

HIDDEN: Final = "[redacted]"

# Words that make a name secret wherever they stand in it, and pairs that do so together:
# `--wandb-api-key`, `HF_TOKEN=`, `logger.apiKey=`. `tokens` and `tokenizer` are other words.
_WORDS: Final = frozenset(
    {
        "token",
        "secret",
        "secrets",
        "password",
        "passwd",
        "passphrase",
        "pwd",
        "credential",
        "credentials",
        "cookie",
        "apikey",
        "accesskey",
        "secretkey",
        "privatekey",
        "authtoken",
        "bearer",
        "authorization",
    }
)
_KEY_OWNERS: Final = frozenset(
    {"api", "access", "secret", "private", "auth", "account", "wandb", "encryption"}
)
# What follows "token" in names that count or describe tokens of text.
_TEXT_TOKEN: Final = frozenset(
    {"id", "ids", "dim", "dims", "len", "length", "size", "count", "type", "types", "limit"}
)

_PATTERNS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"hf_[A-Za-z0-9]{16,}",
        r"sk-[A-Za-z0-9_-]{16,}",
        r"(?:gh[pousr]_|github_pat_|glpat-|pypi-|xox[abprs]-)[A-Za-z0-9_-]{16,}",
        r"(?:AKIA|ASIA)[A-Z0-9]{16}",
        r"AIza[A-Za-z0-9_-]{30,}",
        r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?",
        r"(?i:(?<=bearer )|(?<=basic ))[A-Za-z0-9._~+/=-]{8,}",
        # Keys of 32 and more hexadecimal digits: trackers' keys, and hashes that look like them.
        r"(?<![A-Za-z0-9])[0-9a-fA-F]{32,}(?![A-Za-z0-9])",
    )
)
_LONG = re.compile(r"(?<![A-Za-z0-9_/.-])[A-Za-z0-9+_-]{32,}={0,2}(?![A-Za-z0-9_/.-])")
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")
# `name=value` up to the next parameter; `name: value` (headers, JSON) up to the next member.
_ASSIGNMENTS: Final = (
    re.compile(r"""([A-Za-z_+~][\w.+~-]*)(["']?=)([^&\s]+)"""),
    re.compile(r"""([A-Za-z_][\w.-]*)(["']?:\s*)(?!//)([^,}]+)"""),
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def redact(words: Sequence[str]) -> list[str]:
    """`words` of a command line without the secrets in them.

    Example:
        >>> redact(["train.py", "--api-key", "abc", "HF_TOKEN=xyz", "--max-tokens", "512"])
        ['train.py', '--api-key', '[redacted]', 'HF_TOKEN=[redacted]', '--max-tokens', '512']
    """
    redacted = []
    value_follows = False
    for word in words:
        if value_follows and not word.startswith("--"):
            redacted.append(HIDDEN)
            value_follows = False
            continue
        value_follows = word.startswith("-") and "=" not in word and is_secret_name(word)
        redacted.append(_redact_word(word))
    return redacted


def is_secret_name(name: str) -> bool:
    """Whether a flag, variable or key of this name holds a secret."""
    parts = [part for part in re.split(r"[^a-z0-9]+", _CAMEL.sub("_", name).lower()) if part]
    for position, part in enumerate(parts):
        follower = parts[position + 1] if position + 1 < len(parts) else ""
        if part == "key" and position and parts[position - 1] in _KEY_OWNERS:
            return True
        if part in _WORDS and not (part == "token" and follower in _TEXT_TOKEN):
            return True
    return False


def _redact_word(word: str) -> str:
    word = _URL_LOGIN.sub(f"{HIDDEN}@", word)
    for pattern in _PATTERNS:
        word = pattern.sub(HIDDEN, word)
    word = _LONG.sub(lambda found: HIDDEN if _looks_random(found[0]) else found[0], word)
    name, equals, value = word.partition("=")
    if equals and value and is_secret_name(name) and "?" not in name:
        return f"{name}={HIDDEN}"
    for pattern in _ASSIGNMENTS:
        word = pattern.sub(_hide_value, word)
    return word


def _hide_value(found: re.Match[str]) -> str:
    return found[1] + found[2] + HIDDEN if is_secret_name(found[1]) else found[0]


def _looks_random(word: str) -> bool:
    kinds = (str.isupper, str.islower, str.isdigit)
    return all(sum(map(kind, word)) >= 2 for kind in kinds)
