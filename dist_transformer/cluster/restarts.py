"""The name by which batch scripts of version 0.1 call requeue.py; a queued job keeps its script."""

import sys

from dist_transformer.cluster.requeue import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
