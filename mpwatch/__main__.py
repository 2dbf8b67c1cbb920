"""`python -m mpwatch` is the command `mpwatch`."""

import sys

from mpwatch.cli.main import main

sys.exit(main())
