"""`python -m app.cli`: the commands without the set-up that `launch.py` does first."""

import sys

from app.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
