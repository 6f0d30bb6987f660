"""What a loss means to the global batch, as far as its graph and runs of it tell."""
