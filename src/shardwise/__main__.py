"""`python -m shardwise`: the command line."""

import sys

from shardwise.present.command_line import main

sys.exit(main())
