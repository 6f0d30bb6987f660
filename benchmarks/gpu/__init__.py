"""What autopar does on a GPU: the numbers, the time and the memory of a step, and a calibration.

`python -m benchmarks.gpu` runs the parts below one after the other, each in a process of its own with a time limit, so
that one that fails or hangs takes none of the others along. Where there is no CUDA device, it says so.
"""
