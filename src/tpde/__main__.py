"""`python -m tpde`."""

from tpde.cli import main

if __name__ == "__main__":
    main()
