"""`python -m offloadz` is the command line."""

from offloadz.cli import main

if __name__ == "__main__":
    main()
