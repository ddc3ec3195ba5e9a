"""`python -m benchmarks NAME [options]`."""

import sys

from benchmarks.harness.runner import main

sys.exit(main())
