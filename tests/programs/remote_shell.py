#!/usr/bin/env python3
"""A remote shell for `mpirun` between instances, which have no `sshd`: one command, no login, no secrets.

    remote_shell.py listen            waits for a command, and becomes it
    remote_shell.py ADDRESS COMMAND…  sends a command to who listens at that address (`mpirun`'s `plm_rsh_agent`)
"""

import os
import socket
import sys

PORT = 7787


def listen():
    with socket.create_server(("", PORT)) as server:
        connection, _ = server.accept()
        with connection, connection.makefile("rw") as stream:
            command = stream.readline()
            stream.write("started\n")
    os.execv("/bin/sh", ["sh", "-c", command])


def send(address, command):
    with socket.create_connection((address, PORT)) as connection, connection.makefile("rw") as stream:
        stream.write(command + "\n")
        stream.flush()
        sys.exit(0 if stream.readline() == "started\n" else 1)


if sys.argv[1:] == ["listen"]:
    listen()
else:
    send(sys.argv[1], " ".join(sys.argv[2:]))
