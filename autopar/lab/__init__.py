"""A laboratory: clusters on one machine, and jobs that run on them.

What is imported here needs the standard library alone: watchdogs start without other packages.
"""

from __future__ import annotations

from autopar.lab.cluster import Lab, loopback, private_namespace
from autopar.lab.host import Host, this_machine
from autopar.lab.job import Job, JobFailed, JobTimeout, launch, serve
from autopar.lab.namespaces import LabUnavailable, cleanup_stale, unavailable_reason

__all__ = [
    "Host",
    "Job",
    "JobFailed",
    "JobTimeout",
    "Lab",
    "LabUnavailable",
    "cleanup_stale",
    "launch",
    "loopback",
    "private_namespace",
    "serve",
    "this_machine",
    "unavailable_reason",
]
