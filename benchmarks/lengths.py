"""What batches of many lengths cost: 200 sequence lengths, a GPT-2 and a BERT classifier of four layers, one rank.

    python -m benchmarks.lengths [--check] [--only NAME]

Counted are the captures that one program makes for all lengths, and by how much the process grows after the first of
them; its steps at a few lengths take turns with those of programs that were made for these lengths alone.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from torch import nn

import autopar
from autopar.runtime.program import Program
from benchmarks.harness import Report, Spread, Target, interleave, options, publish

LENGTHS = range(24, 224)
SAMPLE = (32, 77, 128, 201)
"""Lengths at which times are compared."""
SAMPLES, WORDS, LAYERS, WIDTH = 4, 8192, 4, 128
SETTLED = 20
"""Steps after which the process is to grow no more; the longest batches are among them."""
MOST_CAPTURES, MOST_TIME, MOST_GROWTH_MIB = 3, 1.05, 64.0


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_embd=WIDTH, n_head=4, vocab_size=WORDS, n_positions=256, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _bert() -> Any:
    config = transformers.BertConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=4, intermediate_size=4 * WIDTH,
        vocab_size=WORDS, problem_type="single_label_classification",
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": _gpt2, "bert": _bert}


def batch(name: str, length: int) -> dict[str, torch.Tensor]:
    """A batch of sequences of this length, some of which are padded where the model is told so."""
    draw = torch.Generator().manual_seed(length)
    ids = torch.randint(1, WORDS, (SAMPLES, length), generator=draw)
    if name == "gpt2":
        return {"input_ids": ids, "labels": ids.clone()}
    mask = (torch.arange(length) < length - torch.arange(SAMPLES).unsqueeze(1)).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, 2, (SAMPLES,), generator=draw)}


def program(name: str, length: int) -> Program:
    """A program that was made for batches of a length."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    made: Program = autopar.optimize(
        model, optimizer=optimizer, example_inputs=batch(name, length), strategy="ddp", unused_parameters="freeze"
    )
    return made


def captures(of: Program) -> int:
    """How many a program holds; it lets none go in this benchmark."""
    return len(list(of._compiled))


def resident_mib() -> float:
    """What the process holds in memory."""
    gc.collect()
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def examine(report: Report, name: str, rounds: int) -> None:
    """Measures one model, and adds its rows and targets to the report."""
    click.echo(f"{name}: {len(LENGTHS)} lengths", err=True)
    one, lengths = program(name, LENGTHS[0]), list(LENGTHS)
    random.Random(0).shuffle(lengths)
    lengths.sort(key=lambda n: n < LENGTHS[-SETTLED // 2])  # long ones first
    start, before = time.process_time(), 0.0
    for i, length in enumerate(lengths):
        one.step(batch(name, length))
        if i == SETTLED:
            before = resident_mib()
    total_s, growth_mib = time.process_time() - start, resident_mib() - before
    report.targets += [
        Target(f"{name}: captures", captures(one), MOST_CAPTURES),
        Target(f"{name}: growth from step {SETTLED} on", growth_mib, MOST_GROWTH_MIB, unit="MiB"),
    ]
    sums: list[tuple[float, float]] = [(0.0, 0.0)] * rounds
    for length in SAMPLE:
        click.echo(f"{name}: length {length}", err=True)
        own, data = program(name, length), batch(name, length)
        both = {"one": partial(one.step, data), "own": partial(own.step, data)}
        timings = interleave(both, rounds, clock=time.process_time)
        times = zip(timings.seconds["one"], timings.seconds["own"], strict=True)
        sums = [(a + x, b + y) for (a, b), (x, y) in zip(sums, times, strict=True)]
        row = [f"{1e3 * timings.time(n).median:.1f}" for n in both]
        report.rows.append([name, str(length), *row, f"{timings.ratio('one', 'own'):.3f}"])
    ratio = Spread.of(a / b for a, b in sums)
    report.rows.append([name, "sum", "", "", f"{ratio:.3f}"])
    report.targets.append(Target(f"{name}: step, in programs of fixed length", ratio.median, MOST_TIME))
    report.data[name] = {"captures": captures(one), "growth_mib": growth_mib, "seconds_of_all_lengths": total_s}
    report.notes.append(
        f"{name}: {len(LENGTHS)} steps at {len(LENGTHS)} lengths took {total_s:.0f} s of CPU time, captures included: "
        f"{captures(one)} captures; the process grew by {growth_mib:.1f} MiB after step {SETTLED}."
    )


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice(list(MODELS)), help="Of these models alone.")
@click.option("--rounds", default=9, show_default=True)
@options
def main(only: tuple[str, ...], rounds: int, **output: Any) -> None:
    torch.set_num_threads(1)
    columns = ["model", "length", "one program, ms", "one for the length, ms", "ratio"]
    report = Report("lengths", "One program for batches of many lengths", columns)
    for name in only or MODELS:
        examine(report, name, rounds)
    report.notes.append(
        "Times are CPU time of one thread, medians over rounds in which both programs run in turn; ratios are medians "
        f"(quartiles) of the ratios within a round. {SAMPLES} sequences a batch, {LAYERS} layers of width {WIDTH}, "
        f"{WORDS} words, float32, dropout 0.1, AdamW."
    )
    sys.exit(publish(report, command="python -m benchmarks.lengths", **output))


if __name__ == "__main__":
    main()
