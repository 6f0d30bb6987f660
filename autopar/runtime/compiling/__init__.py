"""Compute between communication, compiled by inductor."""
