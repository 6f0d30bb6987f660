"""A differential fuzzer: random small models and plans, trained by autopar and by eager PyTorch, and compared.

A case is plain data, most of it lines of Python (`case`). `draft`, `operators` and `generate` write one from a seed,
`plans` adds a random plan, `source` makes a module of it, `training` and `compare` run and judge it, `workers` keeps
processes for that, `shrink` makes a finding small, and `script` prints it as a file that runs by itself.
"""
