"""`python -m shardwise`: the command line."""

import sys

from shardwise.cli import main

sys.exit(main())
