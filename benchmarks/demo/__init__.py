"""The main job on real input: a language model of Python's own sources, trained by autopar and by torch DDP.

`python -m benchmarks.demo --help`. `text` makes the tokens, `task` the model and its batches, `worker` is what a rank
runs, `compare` alternates the two systems and counts, `outcome` says what came of it.
"""
