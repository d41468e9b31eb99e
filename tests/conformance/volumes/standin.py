"""A volume of ours in the place of another NBD server, for the tests of others: what `bin/nbdkit` and `bin/qemu-nbd` have in common.

Tests of NBD clients start a server of their own and talk to it. `run.py` has them find these programs first: they take the arguments that
the tests give, make a volume with the content that the other server would have shown, and have its clients served by the daemon. What only the other
server can do (its plugins that are scripts, filters, faults) is handed on to it, and noted: then the test says nothing about us.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

PROGRAM = os.environ.get('VERBATIM_STANDIN_PROGRAM', '')
RUNTIME = Path(os.environ.get('VERBATIM_STANDIN_RUNTIME', ''))
# What was served, and what was handed on, a line each.
NOTES = Path(os.environ.get('VERBATIM_STANDIN_NOTES', '/dev/null'))


def note(text):
    with NOTES.open('a') as file:
        file.write(text + '\n')


def order(*arguments):
    done = subprocess.run([PROGRAM, 'volume', *map(str, arguments), '--runtime-dir', RUNTIME],
                          check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        # The traceback of the exception has the command, and not the reason.
        print(f'{arguments[0]}: {done.stderr}', file=sys.stderr)
    done.check_returncode()
    return done.stdout.strip()


class Volume:
    """One that is served until it is closed."""

    number = 0

    def __init__(self, size, adopted=None):
        Volume.number += 1
        self.name = f'v{os.getpid()}-{Volume.number}'
        data = ['--data', adopted, '--adopt'] if adopted else []
        order('create', self.name, '--size', size, *data)
        order('attach', self.name)
        self.socket = RUNTIME / 'volumes' / f'{self.name}.sock'
        self.uri = f'nbd+unix:///?socket={self.socket}'
        note(f'served: {size} bytes')
        note(f'pid: {os.getpid()}')

    def close(self):
        for what in ('detach', 'delete'):
            with contextlib.suppress(subprocess.CalledProcessError):
                order(what, self.name)


def bridge(volume, read_from=0, write_to=1, client=None):
    """Carries bytes between two descriptors, which are those of `client` if there is one, and the volume until either ends."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(str(volume.socket))

        def upwards():
            while data := os.read(read_from, 65536):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

        threading.Thread(target=upwards, daemon=True).start()
        while data := server.recv(65536):
            while data:
                data = data[os.write(write_to, data):]
    if client:
        client.close()


def bridge_all(volume):
    """Carries bytes between the volume and whoever connects to the socket that was handed to this program (sd_listen_fds(3))."""
    with socket.socket(fileno=3) as listening:
        while True:
            client, _ = listening.accept()
            threading.Thread(target=bridge, args=(volume, client.fileno(), client.fileno(), client), daemon=True).start()


def ends_on_signals():
    """Has a signal end the program through its `finally`."""
    def end(*_):
        raise SystemExit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)


def original(name):
    """The program that the stand-in stands for: the next one of that name in PATH."""
    own = Path(sys.argv[0]).resolve().parent
    folders = [folder for folder in os.environ['PATH'].split(os.pathsep) if Path(folder).resolve() != own]
    return shutil.which(name, path=os.pathsep.join(folders))
