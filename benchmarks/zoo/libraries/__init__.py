"""Models as libraries have them, by library."""
