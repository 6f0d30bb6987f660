"""The C library's heap, so that a step need not have its memory given anew by the operating system each time."""

from __future__ import annotations

from functools import cache

import torch

_LARGEST_LEARNED = (32 << 20) - (8 << 10)
"""Bytes; the largest block that glibc learns from."""


@cache
def keep_freed_memory() -> None:
    """Has glibc keep up to 64 MiB of freed memory at the end of the heap, rather than a few MiB, so that the next step
    need not fault the rest in again, page by page: 2 to 9 % of a small model's step.

    glibc keeps twice its largest mapped block that was freed so far. One block is allocated here, which nobody touches,
    so that it takes no memory, and freed: what any program does that frees a tensor of 32 MiB once. No setting of the
    process is changed; nothing happens with other allocators, or where one set glibc's thresholds by hand.

    Source: the dynamic thresholds of malloc, mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
    """
    torch.empty(_LARGEST_LEARNED, dtype=torch.uint8)
