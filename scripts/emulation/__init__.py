"""What `scripts/emulated_cluster.py` is made of; each module may use those above it.

errors      the error that a user reads
linux       namespaces, mounts and forks, which Python 3.11's standard library lacks
network     rates, and the links of the cluster made with `ip` and `tc`
cluster     the keeper, a process whose end is the cluster's end, and processes inside a node
job         one command on every node: output, deadlines, status
tcp_stream  bandwidth and latency as TCP sees them; a program by itself, run inside the nodes
commands    the command line
"""
