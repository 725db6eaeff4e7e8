import sys

from shardwise.present.cli import main

sys.exit(main())
