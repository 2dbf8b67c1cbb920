"""The transformer shape in a Hugging Face `config.json`: names of its keys, families, and refusals.

The caller has read the file. What a decoder's shape cannot hold (experts, an encoder beside the
decoder) is refused rather than counted wrongly; what it holds only roughly is said in a note. Pure.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from mpwatch.errors import UsageError
from mpwatch.planner.model import TransformerShape, transformer


class Family(Struct, frozen=True):
    """What a `model_type` implies and its config does not say."""

    gated: bool
    """three matrices in the MLP"""
    positions: bool
    """learned position embeddings"""
    biases: bool
    tied: bool
    """output tied to the embedding where the config is silent"""


_LLAMA = Family(gated=True, positions=False, biases=False, tied=False)
_GEMMA = Family(gated=True, positions=False, biases=False, tied=True)
_BERT = Family(gated=False, positions=True, biases=True, tied=True)
_NEOX = Family(gated=False, positions=False, biases=True, tied=False)
_BLOOM = Family(gated=False, positions=False, biases=True, tied=True)
_FALCON = Family(gated=False, positions=False, biases=False, tied=True)
FAMILIES = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo", "olmo2", "granite", "stablelm"),
        _LLAMA,
    ),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "cohere", "smollm3"), _GEMMA),
    **dict.fromkeys(("gpt2", "gpt_neo", "opt", "bert", "roberta", "xlm-roberta"), _BERT),
    **dict.fromkeys(("gpt_neox", "gptj", "phi", "codegen"), _NEOX),
    **dict.fromkeys(("bloom", "starcoder2"), _BLOOM),
    **dict.fromkeys(("falcon", "mpt"), _FALCON),
}
GATED_ACTIVATIONS = ("silu", "swish", "swiglu", "geglu")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
WIDTHS = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
MLP_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")


def _read(config: Mapping[str, Any], names: tuple[str, ...], default: int | None = None) -> int:
    """The first of these keys that is there. Raises UsageError."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if value is not None:
            raise UsageError(f"config.json: {name} is {str(value)[:40]!r}, not a whole number")
    if default is None:
        nested = "text_config" in config
        hint = "; its text_config may be one: save that as a file of its own" if nested else ""
        raise UsageError(f"config.json has none of: {', '.join(names)}{hint}")
    return default


def _refuse(config: Mapping[str, Any]) -> None:
    """Raises UsageError for what the shape of one stack of equal blocks cannot hold."""
    if config.get("is_encoder_decoder") is True:
        what = "an encoder-decoder"
    elif any(isinstance(config.get(k), int) and config[k] > 1 for k in EXPERTS):
        what = "a mixture of experts"
    elif config.get("kv_lora_rank"):
        what = "attention with compressed keys and values"
    else:
        return
    raise UsageError(
        f"config.json describes {what}, which the formulas do not hold: give --model to have it"
        " tracked, or --params alone for the static terms"
    )


def _family(config: Mapping[str, Any]) -> Family:
    known = FAMILIES.get(str(config.get("model_type", "")))
    if known is not None:
        return known
    activation = str(config.get("hidden_act") or config.get("activation_function") or "silu")
    return _LLAMA if activation in GATED_ACTIVATIONS else _BLOOM


def from_hf_config(config: Mapping[str, Any], sequence: int | None = None) -> TransformerShape:
    """The shape in a `config.json`.

    Raises:
        UsageError: a needed key is missing or no whole number, or the model is of another kind.
    """
    _refuse(config)
    hidden, heads = _read(config, WIDTHS), _read(config, HEADS)
    length = sequence if sequence is not None else _read(config, LENGTHS, default=0)
    if not length and sequence is None:
        raise UsageError("config.json names no sequence length: give --seq")
    one_for_all = config.get("multi_query") is True and not config.get("new_decoder_architecture")
    family = _family(config)
    tied = config.get("tie_word_embeddings")
    return transformer(
        layers=_read(config, LAYERS),
        hidden=hidden,
        heads=heads,
        sequence=length,
        vocabulary=_read(config, ("vocab_size",)),
        intermediate=_read(config, MLP_WIDTHS, default=4 * hidden),
        kv_heads=1 if one_for_all else _read(config, KV_HEADS, default=heads),
        tied=tied if isinstance(tied, bool) else family.tied,
        gated=family.gated,
        positions=family.positions,
        biases=family.biases,
    )


def notes_on(config: Mapping[str, Any]) -> list[str]:
    """What the shape holds only roughly, one line each."""
    notes = []
    kind = str(config.get("model_type", "unnamed"))[:40]
    if kind not in FAMILIES:
        mlp = "a gated MLP without biases" if _family(config).gated else "a plain MLP with biases"
        notes.append(f"model_type {kind!r} is not known: read as a decoder with {mlp}")
    width, heads, hidden = config.get("head_dim"), _read(config, HEADS), _read(config, WIDTHS)
    if isinstance(width, int) and width * heads != hidden:
        notes.append(
            f"heads of {width} x {heads} are not the hidden size {hidden}: attention is counted"
            f" with {hidden}"
        )
    if config.get("quantization_config"):
        notes.append("quantised weights are not modelled: counted in 16 or 32 bits")
    return notes
