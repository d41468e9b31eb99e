#!/usr/bin/python3
"""Memory windows of both types: bound, written and read through, invalidated by either side, bound again.

usage: windows.py [--fresh] [HOST]

The server has the windows and the client reaches into them, until the client gets SIGINT. Each window stays bound for many
rounds, so that its key outlives moves of either side. One line of JSON on stdout per side.

A window of type 2 is bound again by the key that it has, which a program is to write into its `struct ibv_mw`. pyverbs does not, and RNICs
of the kernel's look: with --fresh another window is allocated for each bind of type 2.
"""
import json
import sys
import time

import ends
from ends import e
from pyverbs.mr import MR, MW, MWBind, MWBindInfo
from pyverbs.wr import SGE, SendWR

LENGTH = 4096
# Rounds between two binds.
ROUNDS = 40
REMOTE = e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ


def done(cq, what):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        count, wcs = cq.poll(1)
        if count:
            if wcs[0].status:
                raise AssertionError(f'{what} failed with status {wcs[0].status}')
            return wcs[0]
        # The RNICs need the processors.
        time.sleep(0)
    raise AssertionError(f'{what} does not end')


class Windows:
    """The server's side: one window of each type, over the two halves of a region."""

    def __init__(self, end, fresh):
        self.end, self.fresh = end, fresh
        self.mr = MR(end.dev.pd, 2 * LENGTH, ends.ACCESS)
        self.one, self.two = MW(end.dev.pd, e.IBV_MW_TYPE_1), MW(end.dev.pd, e.IBV_MW_TYPE_2)
        self.two_key = self.two.rkey

    def bind(self):
        bound = MWBindInfo(self.mr, self.mr.buf, LENGTH, REMOTE)
        self.end.qp.bind_mw(self.one, MWBind(bound, e.IBV_SEND_SIGNALED))
        done(self.end.scq, 'a bind of type 1')
        if self.fresh:
            self.two.close()
            self.two = MW(self.end.dev.pd, e.IBV_MW_TYPE_2)
        request = SendWR(opcode=e.IBV_WR_BIND_MW)
        request.set_bind_wr(self.two, MWBindInfo(self.mr, self.mr.buf + LENGTH, LENGTH, REMOTE))
        self.end.qp.post_send(request)
        done(self.end.scq, 'a bind of type 2')
        self.two_key = request.rkey
        return [[self.one.rkey, self.mr.buf], [self.two_key, self.mr.buf + LENGTH]]

    def invalidate(self):
        request = SendWR(opcode=e.IBV_WR_LOCAL_INV)
        request.imm_data = self.two_key
        self.end.qp.post_send(request)
        done(self.end.scq, 'a local invalidation')

    def await_invalidation(self):
        wc = done(self.end.rcq, 'the RECV of a SEND with invalidation')
        flagged = wc.wc_flags & e.IBV_WC_WITH_INV
        if not flagged or wc.imm_data != self.two_key:
            raise AssertionError(f'key {wc.imm_data:#x} is said to be invalid, and {self.two_key:#x} is')
        self.end.post_recv()


def serve(wire, end, fresh):
    windows = Windows(end, fresh)
    binds = 0
    while True:
        wire.tell(windows.bind())
        word = wire.hear()
        if word == 'end':
            break
        # By turns the client ends the second window by a SEND, and the server does.
        if binds % 2:
            windows.await_invalidation()
        else:
            windows.invalidate()
            wire.tell('invalidated')
        binds += 1
    windows.invalidate()
    wire.tell('invalidated')
    wire.hear()
    for item in (windows.one, windows.two, windows.mr):
        item.close()
    return {'role': 'server', 'binds': binds}


def transfer(end, opcode, at, length, rkey, address):
    request = SendWR(wr_id=1, sg=[SGE(end.mr.buf + at, length, end.mr.lkey)], num_sge=1, opcode=opcode)
    request.set_wr_rdma(rkey, address)
    end.qp.post_send(request)


def ask(wire, end, interrupts):
    rounds = binds = 0
    gap, when = 0.0, time.monotonic()
    size = 1024
    while True:
        keys = wire.hear()
        for _ in range(ROUNDS):
            for window, (rkey, address) in enumerate(keys):
                data = ends.content(window, rounds, size)
                offset = rounds * 64 % (LENGTH - size)
                end.mr.write(data, size, 0)
                transfer(end, e.IBV_WR_RDMA_WRITE, 0, size, rkey, address + offset)
                done(end.scq, 'a WRITE')
                transfer(end, e.IBV_WR_RDMA_READ, size, size, rkey, address + offset)
                done(end.scq, 'a READ')
                if bytes(end.mr.read(size, size)) != data:
                    raise AssertionError(f'window {window + 1} holds something else in round {rounds}')
            rounds += 1
            now = time.monotonic()
            gap, when = max(gap, now - when), now
            time.sleep(0.002)
        if interrupts.count:
            break
        wire.tell('again')
        if binds % 2:
            request = SendWR(wr_id=2, opcode=e.IBV_WR_SEND_WITH_INV)
            request.imm_data = keys[1][0]
            end.qp.post_send(request)
            done(end.scq, 'a SEND with invalidation')
        else:
            wire.hear()
        binds += 1
    wire.tell('end')
    wire.hear()
    # The first window is still open, the second lets nobody in.
    transfer(end, e.IBV_WR_RDMA_READ, 0, 64, *keys[0])
    done(end.scq, 'a READ')
    transfer(end, e.IBV_WR_RDMA_READ, 0, 64, *keys[1])
    try:
        done(end.scq, 'a READ')
        raise SystemExit('a window lets in who has no valid key')
    except AssertionError as failed:
        if 'status 10' not in str(failed):
            raise
    wire.tell('refused')
    return {'role': 'client', 'binds': binds, 'rounds': rounds, 'longest_gap_ms': gap * 1000}


def main():
    host = [word for word in sys.argv[1:] if word != '--fresh']
    fresh = '--fresh' in sys.argv
    interrupts = ends.Interrupts()
    dev = ends.Device()
    wire = ends.connect(host[0]) if host else ends.Wire(ends.listen().accept()[0])
    end = ends.End(dev, 'rc', stream=1 if host else 2, depth=16, size=1024)
    end.connect(wire.swap(end.address()))
    wire.swap('ready')
    print(json.dumps(ask(wire, end, interrupts) if host else serve(wire, end, fresh)), flush=True)
    return 0


if __name__ == '__main__':
    sys.exit(main())
