"""`python -m kvarn`."""

from kvarn.cli import main

if __name__ == "__main__":
    main()
