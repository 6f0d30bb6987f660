"""Benchmarks of autopar, and what they stand on. Run from the repository's root: `python -m benchmarks.demo`."""
