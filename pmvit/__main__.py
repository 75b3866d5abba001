"""`python -m pmvit`: the command line."""

from pmvit.cli import main

if __name__ == "__main__":
    main()
