import sys

from tensorlens_tl.commands import main

sys.exit(main())
