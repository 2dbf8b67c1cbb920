"""Secrets never reach run.json; ordinary arguments stay readable."""

import pytest

from mpwatch.cli.redaction import HIDDEN, redact

HEX = "0123456789abcdef" * 2
SECRETS = [
    ["--token", "S3CRET"],
    ["--token=S3CRET"],
    ["--api-key", "S3CRET"],
    ["--wandb_api_key=S3CRET"],
    ["--apiKey", "S3CRET"],
    ["--password", "-S3CRET"],
    ["--db-password=S3CRET with spaces"],
    ["HF_TOKEN=S3CRET"],
    ["AWS_SECRET_ACCESS_KEY=S3CRET"],
    ["+logger.api_key=S3CRET"],
    ["--url=https://me:S3CRET@host/path"],
    ["postgres://me:S3CRET@host:5432/db"],
    ["https://host/x?a=1&token=S3CRET&b=2"],
    ["Authorization: Bearer S3CRET-S3CRET"],
    ['{"api_key": "S3CRET"}'],
    ["hf_S3CRETabcdefghijklmnop"],
    ["x,sk-S3CRETabcdefghijklmnop,y"],
    ["ghp_S3CRETabcdefghijklmnopqrstuv"],
    ["--key=" + HEX.replace("0123", "53C2E7", 1)],
    ["AKIAS3CRETABCDEFGHIJ"],
    ["eyJhbGciOiJIUzI1NiJ9.S3CRETpayload.S3CRETsignature"],
    ["run.sh", "Zk9S3CRETxq83hGh2kLmPzR7tVwYbN4c"],
]


@pytest.mark.parametrize("words", SECRETS, ids=lambda words: words[0])
def test_hidden(words: list[str]) -> None:
    redacted = " ".join(redact(["train.py", *words, "--lr", "0.1"]))
    assert "S3CRET" not in redacted
    assert "53C2E7" not in redacted
    assert HIDDEN in redacted
    assert redacted.startswith("train.py ")
    assert redacted.endswith(" --lr 0.1")


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "--lr=0.1", "--name", "baseline-large-uncased-whole-word-masking-v2"],
        ["--tokenizer", "gpt2", "--max-tokens", "512", "--num_tokens=7", "--token-dim", "64"],
        ["--keys", "a", "b", "--monkey", "x", "--key-size=64", "-k", "5"],
        ["--data", "/very/long/path/with/Many/Parts/of/It/2026/train_split_00001.parquet"],
        ["https://host:8080/path?page=2", "a:b", "x=1", "seed=42", "model.size=large"],
        ["-c", "print('hello world')", "", "=", "--", "--="],
    ],
)
def test_left_alone(words: list[str]) -> None:
    assert redact(words) == words


def test_a_flag_after_a_secret_flag_is_no_value() -> None:
    assert redact(["--token", "--lr", "1"]) == ["--token", "--lr", "1"]
