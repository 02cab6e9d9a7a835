"""Small causal language models of transformers, which can't be traced."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tests.harness.models import fill

SMALL = {
    "vocab_size": 30,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    **SMALL,
}
LLAMA = {"intermediate_size": 24, "num_key_value_heads": 1, **SIZES}
GPT2 = {
    "n_embd": 16,
    "n_layer": 4,
    "n_head": 2,
    "n_positions": 16,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    **SMALL,
}
OPT = {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0, **SIZES}
T5 = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    **SMALL,
}
LAYERS = "model.embed_tokens, model.layers.*, model.norm, lm_head"
# whose head is tied to its first layer
OF_GPT2 = "transformer.wte, transformer.wpe, transformer.h.*, transformer.ln_f, lm_head"
OF_OPT = (
    "model.decoder.embed_tokens, model.decoder.embed_positions, model.decoder.layers.*, "
    "model.decoder.final_layer_norm, lm_head"
)

MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": ("GPT2", GPT2, OF_GPT2),
    "llama": ("Llama", LLAMA, LAYERS),
    "llama, tied": ("Llama", LLAMA | {"tie_word_embeddings": True}, LAYERS),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 8}, LAYERS),
    "mistral": ("Mistral", LLAMA | {"sliding_window": 3}, LAYERS),
    "mixtral": (
        "Mixtral",
        LLAMA | {"num_local_experts": 4, "experts_implementation": "eager"},
        LAYERS,
    ),
    "opt": ("OPT", OPT, OF_OPT),
    "gpt-neox": (
        "GPTNeoX",
        {"intermediate_size": 24, "hidden_dropout": 0.0, "attention_dropout": 0.0, **SIZES},
        "auto",
    ),
}


def build(name: str, **options: Any) -> nn.Module:
    """A model in double precision, the same in every call; an encoder with a decoder, too, by
    the name t5.
    """
    kind, sizes, _ = MODELS.get(name, ("T5", T5, ""))
    model = getattr(
        transformers,
        {"GPT2": "GPT2LMHeadModel", "T5": "T5ForConditionalGeneration"}.get(
            kind, f"{kind}ForCausalLM"
        ),
    )
    return fill(model(getattr(transformers, f"{kind}Config")(**sizes | options)).double())


def next_tokens(out: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())
