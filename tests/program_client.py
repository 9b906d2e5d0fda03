"""Starts a program at the server of `programs.py`: `program_client.py SOCKET PYTHON ARGUMENT...`."""

import json
import os
import signal
import socket
import sys

address, python, *arguments = sys.argv[1:]
if arguments[:1] == ["-u"]:
    os.environ["PYTHONUNBUFFERED"] = "1"
    del arguments[0]
what = arguments[1:2] if arguments[:1] == ["-P"] else arguments[:1]
forks = what and (not what[0].startswith("-") or what[0] in ("-m", "-c"))
if os.environ.get("OSDP_TEST_REAL_RANK", "none") == os.environ.get("RANK") or not forks:
    os.execv(python, [python, *arguments])
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect(address)
request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "pid": os.getpid()}
socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
program = int(server.recv(64))
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: os.kill(program, number))
for descriptor in (0, 1, 2):
    os.close(descriptor)  # whoever reads them is to see the program close them
status = int(server.recv(64) or signal.SIGKILL)
if os.WIFSIGNALED(status):
    signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.WEXITSTATUS(status))
