"""`python -m shardwise`: the command line."""

import sys

from shardwise.present.cli import main

sys.exit(main())
