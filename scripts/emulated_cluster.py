"""A cluster of several nodes emulated on one Linux machine: see docs/emulated-cluster.md.

    python scripts/emulated_cluster.py run --nodes 2 --rate 200mbit -- torchrun --nproc_per_node=2 train.py
    python scripts/emulated_cluster.py --help

Needs root and iproute2 (ip, tc), and of Python nothing but its standard library.
"""

import sys

from emulation.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
