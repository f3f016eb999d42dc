"""``python -m angelspec``, and ``torchrun -m angelspec`` for several ranks."""

from angelspec.cli.main import main

if __name__ == "__main__":
    main()
