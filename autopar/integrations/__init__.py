"""autopar within training frameworks: a file for each. Each needs the framework that it is called after, and says what
it does in its head; `docs/frameworks.md` says what is equal to what."""
