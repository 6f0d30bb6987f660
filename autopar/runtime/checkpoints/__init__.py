"""A program's state as one process would have it: gathered, written to disk by all ranks, checked and loaded."""
