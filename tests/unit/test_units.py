"""Quantities with units: what is read, what is written, what is refused."""

from __future__ import annotations

import random

import pytest

from autopar.spec.units import (
    DURATION,
    FLOP_RATE,
    MEMORY_RATE,
    NETWORK_RATE,
    SIZE,
    Dimension,
    Figure,
    guess,
    parse,
    rounded,
    text,
    weakest,
)


@pytest.mark.parametrize(
    ("written", "dimension", "value"),
    [
        ("25 Gbit/s", NETWORK_RATE, 25e9 / 8),
        ("25 Gb/s", NETWORK_RATE, 25e9 / 8),
        ("25 Gbps", NETWORK_RATE, 25e9 / 8),
        ("25 GB/s", NETWORK_RATE, 25e9),
        ("2 TB/s", MEMORY_RATE, 2e12),
        ("2 GiB/s", MEMORY_RATE, 2 * 2**30),
        ("80 GiB", SIZE, 80 * 2**30),
        ("80 GB", SIZE, 80e9),
        ("5 us", DURATION, 5e-6),
        ("5 \N{MICRO SIGN}s", DURATION, 5e-6),
        ("0 s", DURATION, 0.0),
        ("312 TFLOP/s", FLOP_RATE, 312e12),
        ("19.5 TFLOPS", FLOP_RATE, 19.5e12),
        ("1.5e3 Mbit/s", NETWORK_RATE, 1.5e9 / 8),
        ("  0.955Gbit/s ", NETWORK_RATE, 0.955e9 / 8),
    ],
)
def test_reads(written: str, dimension: Dimension, value: float) -> None:
    assert parse(written, dimension) == Figure(value, "looked up")


@pytest.mark.parametrize("provenance", ["measured", "looked up", "guessed"])
def test_reads_where_a_figure_comes_from(provenance: str) -> None:
    figure = parse(f"23.4 Gbit/s ({provenance})", NETWORK_RATE)
    assert figure.provenance == provenance
    assert parse(text(figure, NETWORK_RATE), NETWORK_RATE) == figure


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (25, ["25 has no unit", "'25 Gbit/s'", "Mbit/s, Gbit/s", "MB/s, GB/s"]),
        ("25", ["'25' has no unit"]),
        ("25 Gbots/s", ["'Gbots/s' is no unit of data rate", "did you mean 'Gbit/s'?", "units: bit/s"]),
        ("25 gbit/s", ["did you mean 'Gbit/s'?"]),
        ("25 gb/s", ["'Gb/s'", "'GB/s'"]),
        ("25 GB", ["'GB' is a unit of size, not of data rate"]),
        ("5 us", ["'us' is a unit of duration"]),
        ("0 Gbit/s", ["more than zero"]),
        ("-1 Gbit/s", ["'-1 Gbit/s' is not possible", "more than zero"]),
        ("fast", ["'fast' is no number with a unit"]),
        ("nan Gbit/s", ["no number"]),
        ("1,000 Mbit/s", ["no number"]),
        ("1e999 Gbit/s", ["no number"]),
        ("25 Gbit/s (measurd)", ["(measured), (looked up), (guessed)", "did you mean 'measured'?"]),
        (True, ["True is no data rate"]),
        (None, ["None is no data rate"]),
        (["25 Gbit/s"], ["is no data rate"]),
        (Figure(-1.0), ["-1 is not possible"]),
        (Figure(float("inf")), ["finite"]),
        (Figure(float("nan")), ["finite"]),
        ("9" * 500, ["..."]),
    ],
)
def test_refuses_and_says_what_it_wants(written: object, says: list[str]) -> None:
    with pytest.raises(ValueError) as e:
        parse(written, NETWORK_RATE)
    for part in says:
        assert part in str(e.value)
    assert len(str(e.value)) < 300


@pytest.mark.parametrize("dimension", [SIZE, DURATION, NETWORK_RATE, MEMORY_RATE, FLOP_RATE], ids=lambda d: d.name)
def test_what_is_written_reads_back_exactly(dimension: Dimension) -> None:
    rng = random.Random(0)
    for _ in range(2000):
        value = rng.random() * 10.0 ** rng.randint(-12, 18)
        assert parse(text(value, dimension), dimension).value == value


@pytest.mark.parametrize(
    ("value", "dimension", "written"),
    [
        (125e6, NETWORK_RATE, "1 Gbit/s"),
        (25e6, NETWORK_RATE, "200 Mbit/s"),
        (80 * 2**30, SIZE, "80 GiB"),
        (141e9, SIZE, "141 GB"),
        (3.35e12, MEMORY_RATE, "3.35 TB/s"),
        (300e9, MEMORY_RATE, "300 GB/s"),
        (50e-6, DURATION, "50 us"),
        (0.0, DURATION, "0 s"),
        (guess(1e12), FLOP_RATE, "1 TFLOP/s (guessed)"),
    ],
)
def test_writes_the_handiest_unit(value: float, dimension: Dimension, written: str) -> None:
    assert text(value, dimension) == written


def test_rounds_for_people() -> None:
    assert rounded(0.9551e9 / 8, NETWORK_RATE) == "955 Mbit/s"
    assert rounded(1.0004e9 / 8, NETWORK_RATE) == "1 Gbit/s"
    assert rounded(42_520_000_000, SIZE) == "39.6 GiB"


def test_the_weakest_provenance_wins() -> None:
    measured, looked_up, guessed = Figure(1.0, "measured"), Figure(1.0), guess(1.0)
    assert weakest(measured) == "measured"
    assert weakest(measured, looked_up) == "looked up"
    assert weakest(guessed, measured, looked_up) == "guessed"


def test_a_figure_is_a_number() -> None:
    assert float(Figure(2.5, "measured")) == 2.5
