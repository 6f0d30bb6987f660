"""Models of the libraries that people train: one file for each library. A library is imported when a model is made."""
