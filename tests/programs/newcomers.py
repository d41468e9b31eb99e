#!/usr/bin/python3
"""A server that makes a new queue pair for each client, on the device that it has opened at its start.

usage: newcomers.py [rc|uc|ud HOST]

The two sides tell each other their numbers, and after a SIGINT to the client they connect and exchange messages. On a reliable
connection the client also READs from memory that the server has had from its start.
"""
import sys

import ends
from ends import e
from pyverbs.mr import MR
from pyverbs.wr import SGE, SendWR

BOOK = 1000


def read_book(end, book):
    request = SendWR(wr_id=end.sent, sg=[SGE(end.mr.buf, end.size, end.mr.lkey)], num_sge=1, opcode=e.IBV_WR_RDMA_READ)
    request.set_wr_rdma(*book)
    end.qp.post_send(request)
    end.sent += 1
    while not end.poll_sent():
        pass
    if ends.number_of(BOOK, bytes(end.mr.read(end.size, 0))) != 1:
        raise AssertionError('the server has something else where its book should be')


def meet(dev, kind, wire, stream, book=None):
    end = ends.End(dev, kind, stream, depth=32, size=256)
    peer = wire.swap(end.address() | {'book': book})
    print('met', flush=True)
    return end, peer


def serve(dev):
    mr = MR(dev.pd, 4096, ends.ACCESS)
    mr.write(ends.content(BOOK, 1, 256), 256, 0)
    listener, kept = ends.listen(), []
    while True:
        wire = ends.Wire(listener.accept()[0])
        kind = wire.hear()
        if kind == 'end':
            return
        end, peer = meet(dev, kind, wire, 2 * len(kept), [mr.rkey, mr.buf])
        wire.hear()
        end.connect(peer)
        wire.swap('connected')
        ends.exchange(end, wire)
        kept.append(end)


def visit(dev, kind, host):
    interrupts, wire = ends.Interrupts(), ends.connect(host)
    wire.tell(kind)
    if kind == 'end':
        return
    end, peer = meet(dev, kind, wire, 1)
    interrupts.wait(1)
    wire.tell('go')
    end.connect(peer)
    wire.swap('connected')
    if kind == 'rc':
        read_book(end, peer["book"])
        end.completed = end.sent = 0
    ends.exchange(end, wire)
    print('exchanged', flush=True)


def main():
    dev = ends.Device()
    if len(sys.argv) > 1:
        visit(dev, *sys.argv[1:])
    else:
        serve(dev)
    return 0


if __name__ == '__main__':
    sys.exit(main())
