import sys

from tensorlens_tl.cli import main

sys.exit(main())
