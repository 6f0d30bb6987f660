"""Whether a program computes what the model computes eagerly, and where it begins to differ if not."""
