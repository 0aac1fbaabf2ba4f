"""`python -m gpulayer.cli`: the `gpulayer` command of this very interpreter."""

import sys

from gpulayer.cli import main

sys.exit(main())
