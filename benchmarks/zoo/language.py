"""Language models: BERT, GPT-2, a Llama-style decoder, a mixture of experts, and an LSTM, on words of real text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.zoo.architecture import from_config
from benchmarks.zoo.plain import LSTM, cross_entropy
from benchmarks.zoo.words import BEGIN, END, MASK, PADDING, SPECIAL, windows
from benchmarks.zoo.workload import SEED, Workload, adamw, seeded, sgd

SEQUENCES, LENGTH = 4, 64
"""Of a rank's batch, where a model says nothing else."""
BERT_VOCABULARY = 30_522
GPT2_VOCABULARY = 50_257
LLAMA_VOCABULARY = 32_000
LSTM_VOCABULARY = 33_278
"""That of WikiText-2."""
MASKED_SHARE = 0.15

SPECIAL_IDS = {"pad_token_id": PADDING, "bos_token_id": BEGIN, "eos_token_id": END}
BERT_FIELDS = {
    "vocab_size": BERT_VOCABULARY,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 768,
    "max_position_embeddings": LENGTH,
    "pad_token_id": PADDING,
}
GPT2_FIELDS = SPECIAL_IDS | {
    "vocab_size": GPT2_VOCABULARY,
    "n_positions": LENGTH,
    "n_embd": 192,
    "n_layer": 4,
    "n_head": 3,
    "loss_type": "ForCausalLM",
    "use_cache": False,
}
DECODER_FIELDS = SPECIAL_IDS | {
    "vocab_size": LLAMA_VOCABULARY,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
    "use_cache": False,
}
"""Of the Llama-style decoder and the mixture of experts: grouped-query attention, an untied head."""
LLAMA_FIELDS = DECODER_FIELDS | {"hidden_size": 256, "intermediate_size": 688}
MOE_FIELDS = DECODER_FIELDS | {
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
}

_TEXT = "Text: words of Python's standard library."


def _hugging_face(prefix: str, head: str, fields: Mapping[str, Any]) -> Callable[[], nn.Module]:
    return seeded(lambda: from_config(f"{prefix}Config", f"{prefix}{head}", fields))


def masked_words(step: int, rank: int) -> dict[str, torch.Tensor]:
    """BERT's masking (Devlin et al. 2019, 3.1): of the words to be predicted, 80 % are masked, 10 % replaced.

    Every sequence has the same number of them, so that the mean over ranks is the mean over the global batch.
    """
    words = windows(step, rank, SEQUENCES, LENGTH, BERT_VOCABULARY)
    random = np.random.default_rng([SEED, step, rank, 1])
    chosen = random.permuted(np.tile(np.arange(LENGTH) < round(MASKED_SHARE * LENGTH), (SEQUENCES, 1)), axis=1)
    lot = random.random(words.shape)
    labels = np.where(chosen, words, -100)
    replaced = random.integers(SPECIAL, BERT_VOCABULARY, words.shape)
    inputs = np.where(chosen & (lot < 0.8), MASK, np.where(chosen & (lot >= 0.9), replaced, words))
    return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}


def _causal(vocabulary: int, sequences: int = SEQUENCES) -> Callable[[int, int], dict[str, torch.Tensor]]:
    """Batches of text to be continued: the labels are the inputs, which the model shifts."""

    def batch(step: int, rank: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(windows(step, rank, sequences, LENGTH, vocabulary))
        return {"input_ids": ids, "labels": ids.clone()}

    return batch


def _lstm(sparse: bool) -> nn.Module:
    return LSTM(width=200, vocabulary=LSTM_VOCABULARY, sparse=sparse)


def next_words(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Text, and the word that follows each of its words."""
    ids = torch.from_numpy(windows(step, rank, 12, 17, LSTM_VOCABULARY))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


BERT = Workload(
    name="bert",
    about=f"BERT (Devlin et al. 2019) with its vocabulary of 30,522 words, tied to the head, at a quarter of the "
    f"width and a third of the depth; masked words are predicted. {_TEXT}",
    model=_hugging_face("Bert", "ForMaskedLM", BERT_FIELDS),
    batch=masked_words,
    optimizer=adamw(1e-4),
)
GPT2 = Workload(
    name="gpt2",
    about=f"GPT-2 (Radford et al. 2019) with its vocabulary of 50,257, tied to the head, at a quarter of the width and "
    f"a third of the depth. {_TEXT}",
    model=_hugging_face("GPT2", "LMHeadModel", GPT2_FIELDS),
    batch=_causal(GPT2_VOCABULARY, sequences=2),
    optimizer=adamw(3e-4),
)
LLAMA = Workload(
    name="llama",
    about=f"A decoder as Llama (Touvron et al. 2023): RMSNorm, rotary positions, SwiGLU, two key-value heads for eight "
    f"query heads, and a head of its own over 32,000 words; 4 layers of width 256. {_TEXT}",
    model=_hugging_face("Llama", "ForCausalLM", LLAMA_FIELDS),
    batch=_causal(LLAMA_VOCABULARY),
    optimizer=adamw(3e-4, weight_decay=0.1),
)
MOE = Workload(
    name="moe",
    about=f"A mixture of experts as Mixtral (Jiang et al. 2024): two of eight experts a token, with the loss that "
    f"balances them; 4 layers of width 192, 32,000 words. {_TEXT}",
    model=_hugging_face("Mixtral", "ForCausalLM", MOE_FIELDS),
    batch=_causal(LLAMA_VOCABULARY),
    optimizer=adamw(3e-4, weight_decay=0.1),
)
RECURRENT = Workload(
    name="lstm",
    about=f"A language model of two LSTM layers (Zaremba et al. 2014, the small one's width of 200) with WikiText-2's "
    f"vocabulary of 33,278 in an embedding and a head of its own; 16 words at a time, without carried state. {_TEXT}",
    model=seeded(lambda: _lstm(sparse=False)),
    batch=next_words,
    loss_fn=cross_entropy,
    optimizer=sgd(1.0),
    sparse_model=seeded(lambda: _lstm(sparse=True)),
)
