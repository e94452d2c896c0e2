"""`python -m gradwire`."""

from gradwire.cli import main

if __name__ == "__main__":
    main()
