"""Models and batches that are not captured: they run eagerly, and what was written into their outline runs beside."""
