"""Configs of many families: parameters against published counts, and what is refused."""

from typing import Any

import pytest

from mpwatch.errors import UsageError
from mpwatch.planner.hf_config import from_hf_config, notes_on

BERT = {
    "model_type": "bert", "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12,
    "vocab_size": 30522, "intermediate_size": 3072, "max_position_embeddings": 512,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257,
    "n_positions": 1024, "n_inner": None,
}  # fmt: skip
OPT = {
    "model_type": "opt", "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 24,
    "vocab_size": 50272, "ffn_dim": 8192, "max_position_embeddings": 2048,
}  # fmt: skip
FALCON = {
    "model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71,
    "num_hidden_layers": 32, "vocab_size": 65024, "multi_query": True,
}  # fmt: skip
PHI = {
    "model_type": "phi", "hidden_size": 2560, "num_attention_heads": 32, "num_hidden_layers": 32,
    "vocab_size": 51200, "intermediate_size": 10240, "max_position_embeddings": 2048,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
NEOX = {
    "model_type": "gpt_neox", "hidden_size": 6144, "num_attention_heads": 64,
    "num_hidden_layers": 44, "vocab_size": 50432, "intermediate_size": 24576,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (BERT, 109.5e6),
        (GPT2, 124.44e6),
        (OPT, 1.316e9),
        (FALCON, 6.92e9),
        (PHI, 2.78e9),
        (LLAMA, 8.03e9),
        (NEOX, 20.55e9),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_parameters_are_the_published_ones(config: dict[str, Any], published: float) -> None:
    shape = from_hf_config(config, None if config in (GPT2, BERT) else 2048)
    assert shape.parameters == pytest.approx(published, rel=0.01)
    assert notes_on(config) == []


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"num_local_experts": 8}, "a mixture of experts"),
        ({"n_routed_experts": 64}, "a mixture of experts"),
        ({"is_encoder_decoder": True}, "an encoder-decoder"),
        ({"kv_lora_rank": 512}, "compressed keys"),
        ({"num_key_value_heads": 3}, "no multiple of 3 key/value heads"),
        ({"num_key_value_heads": 64}, "no multiple of 64 key/value heads"),
        ({"num_attention_heads": 0}, "--heads 0 is out of range"),
        ({"hidden_size": None}, "none of: hidden_size"),
        ({"hidden_size": None, "text_config": {}}, "its text_config may be one"),
        ({"hidden_size": True}, "not a whole number"),
        ({"hidden_size": float("inf")}, "not a whole number"),
        ({"hidden_size": "9" * 5000}, "not a whole number"),
    ],
)
def test_what_a_decoders_shape_cannot_hold_is_refused(change: dict[str, Any], cause: str) -> None:
    with pytest.raises(UsageError, match=cause) as raised:
        from_hf_config({**LLAMA, **change})
    assert len(str(raised.value)) < 200


def test_a_length_of_zero_is_not_the_configs() -> None:
    with pytest.raises(UsageError, match="--seq 0"):
        from_hf_config(LLAMA, 0)
    with pytest.raises(UsageError, match="give --seq"):
        from_hf_config(FALCON)


def test_what_is_only_roughly_held_is_said() -> None:
    (note,) = notes_on({**LLAMA, "model_type": "gemma", "head_dim": 256})
    assert note.startswith("heads of 256 x 32 are not the hidden size 4096")
    (note,) = notes_on({**LLAMA, "model_type": "newest", "hidden_act": "gelu"})
    assert (
        note == "model_type 'newest' is not known: read as a decoder with a plain MLP with biases"
    )
    assert "quantised" in notes_on({**LLAMA, "quantization_config": {"bits": 4}})[0]
