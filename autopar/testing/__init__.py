"""Does a strategy keep its promises? For those who write one, ours or your own.

    python -m autopar.testing my_package.my_strategy:MyStrategy

trains small models, on one to five ranks of this machine, with every setting that the strategy offers, and compares
with one process; counts the bytes on the wire, where it is root; and compares what is issued with what is priced.
"""

from autopar.testing.check import check_strategy
from autopar.testing.findings import Conformance, Finding

__all__ = ["Conformance", "Finding", "check_strategy"]
