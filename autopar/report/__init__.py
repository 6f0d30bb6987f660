"""What people read of a plan in a browser: one HTML file, and the predicted timeline as a Chrome trace."""

from __future__ import annotations

from autopar.report.build import build_report
from autopar.report.trace import write_trace

__all__ = ["build_report", "write_trace"]
