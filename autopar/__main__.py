"""`python -m autopar`: the command line."""

from __future__ import annotations

from autopar.cli import main

if __name__ == "__main__":
    main()
