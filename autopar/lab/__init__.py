"""A laboratory: clusters on one machine, and jobs that run on them."""

from __future__ import annotations

from autopar.lab.host import Host, this_machine
from autopar.lab.job import Job, JobFailed, JobTimeout, launch, serve
from autopar.lab.namespaces import Lab, LabUnavailable, cleanup_stale, private_namespace, unavailable_reason

__all__ = [
    "Host",
    "Job",
    "JobFailed",
    "JobTimeout",
    "Lab",
    "LabUnavailable",
    "cleanup_stale",
    "launch",
    "private_namespace",
    "serve",
    "this_machine",
    "unavailable_reason",
]
