"""The main job on real input: a language model of Python's own sources, trained by autopar and by torch DDP.

`python -m benchmarks.demo --help`. `text` makes the tokens, `task` the model and its batches; `benchmarks.peers` runs
the two systems in turn, and `outcome` says what came of it.
"""
