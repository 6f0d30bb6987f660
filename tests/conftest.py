"""What holds for all tests."""

from __future__ import annotations

import signal

# A shell starts what it runs in the background with SIGINT ignored, and nohup with SIGHUP, and processes inherit both:
# the programs that tests send these signals to would never see them. A handler is not inherited.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)
