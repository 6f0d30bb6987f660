"""The data that cost models learn from and are judged on: trials of many plans, for many models, on many clusters.

python -m benchmarks.trials collect --minutes 60     take trials and append them to a journal
python -m benchmarks.trials pack                     the journal, compressed, to `data/`
python -m benchmarks.trials card                     what is in it, and how noisy it is

`records` reads them, `card` says what there is; `making` fills the journal.
"""
