#!/usr/bin/python3
"""Many connections by rdma_cm, made by address and port, that go on until the client is told to end.

usage: connections.py COUNT [HOST]

In each round the client sends a message on every connection, and the server answers each; whoever receives one knows whether it is
whole and the one that is due. SIGINT makes the client's next round the last. One line of JSON on stdout per side.
"""
import json
import os
import signal
import sys

import pyverbs.cm_enums as ce
from pyverbs.cmid import CMID, AddrInfo
from pyverbs.qp import QPCap, QPInitAttr

import ends

PORT = '18519'
SIZE = 1024
LAST = 1 << 32


class Connection:
    """One of them; `number` is the same at both ends."""

    def __init__(self, cmid, number, is_client):
        self.cmid = cmid
        self.mine, self.theirs = (2 * number + is_client, 2 * number + (not is_client))
        self.outgoing, self.incoming = cmid.reg_msgs(SIZE), cmid.reg_msgs(SIZE)
        self.expect()

    def expect(self):
        self.cmid.post_recv(self.incoming)

    def send(self, seq, flags):
        self.outgoing.write(ends.content(self.mine | flags, seq, SIZE), SIZE)
        self.cmid.post_send(self.outgoing)

    def sent(self):
        check(self.cmid.get_send_comp(), 'SEND')

    def receive(self, seq):
        """Takes message `seq`, and says whether it is the last one."""
        check(self.cmid.get_recv_comp(), 'RECV')
        data = bytes(self.incoming.read(SIZE, 0))
        for flags in (0, LAST):
            if ends.number_of(self.theirs | flags, data) == seq:
                return bool(flags)
        raise AssertionError(f'message {seq} of stream {self.theirs} is not what came')


def check(completion, what):
    if completion is None or completion.status:
        raise AssertionError(f'a {what} failed: {completion}')


def queue_pair():
    return QPInitAttr(cap=QPCap(max_send_wr=4, max_recv_wr=4), sq_sig_all=1)


def ask(host, count):
    to = AddrInfo(dst=host, dst_service=PORT, port_space=ce.RDMA_PS_TCP)
    connections = []
    for number in range(count):
        connections.append(Connection(CMID(creator=to, qp_init_attr=queue_pair()), number, True))
        connections[-1].cmid.connect()
    return connections


def answer(count, kept):
    here = AddrInfo(src_service=PORT, port_space=ce.RDMA_PS_TCP, flags=ce.RAI_PASSIVE)
    listener = CMID(creator=here, qp_init_attr=queue_pair())
    listener.listen(backlog=count)
    connections = []
    for number in range(count):
        connections.append(Connection(listener.get_request(), number, False))
        # pyverbs closes the device and the protection domain of a request with the next one.
        kept.append((listener, listener.context, listener.pd))
        connections[-1].cmid.accept()
    return connections


def client_round(connections, seq, flags):
    for connection in connections:
        connection.send(seq, flags)
    for connection in connections:
        connection.sent()
        connection.receive(seq)
        connection.expect()
    return bool(flags)


def server_round(connections, seq, _):
    last = False
    for connection in connections:
        last = connection.receive(seq)
        connection.expect()
        connection.send(seq, 0)
        connection.sent()
    return last


def is_told_to_end():
    return signal.SIGINT in signal.sigpending()


def main():
    count, *host = sys.argv[1:]
    # A signal ends waits for completions, which librdmacm passes on as failed.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    kept = []
    connections = ask(host[0], int(count)) if host else answer(int(count), kept)
    turn = client_round if host else server_round
    rounds = 0
    while not turn(connections, rounds, LAST if is_told_to_end() else 0):
        rounds += 1
    for connection in connections:
        connection.cmid.disconnect()
    print(json.dumps(dict(connections=len(connections), rounds=rounds, verdict='ok')), flush=True)
    # What pyverbs would still close is closed twice then.
    os._exit(0)


if __name__ == '__main__':
    main()
