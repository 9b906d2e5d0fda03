"""What `scripts/emulated_cluster.py` is made of; each module may use those above it.

errors      the refusal that a user reads
linux       namespaces, mounts and forks, which Python 3.11's standard library lacks
network     rates, and the links of the cluster made with `ip` and `tc`
cluster     the keeper: a process that is the cluster, and whose end is the cluster's end
nodes       a process inside a node
job         one command on every node: output, deadlines, status
probe       bandwidth and latency as TCP sees them
commands    the command line
"""
