"""`python -m exactrl` is `exactrl`."""

import sys

from exactrl.cli import main

sys.exit(main())
