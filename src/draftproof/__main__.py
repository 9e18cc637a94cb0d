"""`python -m draftproof`."""

from draftproof.cli import main

if __name__ == "__main__":  # engines that spawn processes import this module again
    main()
