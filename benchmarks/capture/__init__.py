"""Whether autopar trains the models that people take from libraries: captured or eager, equal to plain PyTorch."""
