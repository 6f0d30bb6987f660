"""Real text that every machine has: the Python standard library, as tokens of a byte-pair encoding trained on it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 16_384
TEXT_BYTES = 8_000_000
"""Enough for this vocabulary, and tokenized in some ten seconds."""


@dataclass(frozen=True)
class Tokens:
    """The text as token ids, in a file that ranks map into memory."""

    path: Path
    count: int
    files: int
    text_bytes: int
    cached: bool
    """Whether an earlier run made it."""


def tokenize(files: Sequence[Path], folder: Path) -> Tokens:
    """Trains the encoding and applies it; the result is kept in `folder` for the next run on the same files.

    Raises ValueError where the text is too small for the vocabulary.
    """
    texts = [path.read_text(errors="ignore") for path in files]
    text_bytes = sum(len(t.encode()) for t in texts)
    key = hashlib.sha256(f"{VOCABULARY}\0".encode() + "\0".join(texts).encode()).hexdigest()[:16]
    path = folder / f"tokens-{key}.npy"
    cached = path.exists()
    if not cached:
        encoding = _train(texts)
        ids = [i for one in encoding.encode_batch(texts) for i in one.ids]
        folder.mkdir(parents=True, exist_ok=True)
        encoding.save(str(folder / f"tokenizer-{key}.json"))
        unfinished = path.with_suffix(".partial.npy")
        np.save(unfinished, np.asarray(ids, dtype=np.uint16))
        unfinished.replace(path)
    return Tokens(path, len(load(path)), len(files), text_bytes, cached)


def load(path: Path) -> npt.NDArray[np.uint16]:
    """Token ids, mapped from the file."""
    tokens: npt.NDArray[np.uint16] = np.load(path, mmap_mode="r", allow_pickle=False)
    return tokens


def _train(texts: Sequence[str]) -> Tokenizer:
    encoding = Tokenizer(models.BPE())
    encoding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoding.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    encoding.train_from_iterator(texts, trainer)
    if encoding.get_vocab_size() != VOCABULARY:
        raise ValueError(
            f"the text gives a vocabulary of {encoding.get_vocab_size()}, expected {VOCABULARY}: "
            "is Python's standard library installed without its sources?"
        )
    return encoding
