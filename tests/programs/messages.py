#!/usr/bin/python3
"""Messages on a transport that may lose them: never twice, never changed, on UC never out of order.

usage: messages.py uc|ud [--srq] [HOST]

Both sides send as fast as they receive, until the client gets SIGINT. One line of JSON on stdout per side.
"""
import json
import socket
import sys
import time

import ends


class Received:
    """What has come of one stream."""

    def __init__(self, end):
        self.end = end
        self.seen, self.last = set(), -1
        self.result = dict(received=0, duplicated=0, out_of_order=0, corrupted=0, wrong_source=0, longest_gap_ms=0.0)
        self.when = None

    def add(self, name):
        self.result[name] += 1

    def take(self, wc, slot):
        now = time.monotonic()
        if self.when:
            self.result['longest_gap_ms'] = max(self.result['longest_gap_ms'], (now - self.when) * 1000)
        self.when = now
        end, peer = self.end, self.end.peer
        self.add('received')
        seq = ends.number_of(peer['stream'], slot[end.front:])
        if seq is None or wc.byte_len != len(slot):
            return self.add('corrupted')
        if end.kind == 'ud' and not self.is_from(peer, wc, slot):
            self.add('wrong_source')
        if seq in self.seen:
            return self.add('duplicated')
        self.seen.add(seq)
        if seq < self.last:
            self.add('out_of_order')
        self.last = max(self.last, seq)

    def is_from(self, peer, wc, slot):
        """The number, and the addresses of the IPv4 header in the last 20 of the 40 bytes in front."""
        addresses = packed(peer['gid']) + packed(self.end.dev.gid)
        return wc.src_qp == peer['qpn'] and slot[32:40] == addresses


def packed(gid):
    return socket.inet_pton(socket.AF_INET6, gid)[-4:]


def run(end, wire, interrupts, is_client):
    received = Received(end)
    stopping = False
    while not stopping:
        if end.may_send():
            end.send()
        busy = end.poll_sent()
        for wc, slot in end.poll_received():
            received.take(wc, slot)
            busy = True
        if not busy or end.sent % 64 == 0:
            stopping = interrupts.count > 0 if is_client else wire.has_word()
        if not busy or end.sent > received.last + 64:
            # The other side is slower, or away: what it cannot take is lost.
            time.sleep(0.0005)
    theirs = wire.swap(end.sent)
    quiet = time.monotonic() + 0.5
    while time.monotonic() < quiet:
        end.poll_sent()
        for wc, slot in end.poll_received():
            received.take(wc, slot)
    result = received.result
    result.update(role='client' if is_client else 'server', sent=end.sent, completed=end.completed)
    result['lost'] = theirs - len(received.seen)
    defects = sum(result[name] for name in ('duplicated', 'corrupted', 'wrong_source'))
    if end.kind == 'uc':
        defects += result['out_of_order']
    fine = not defects and end.sent == end.completed and result['received']
    result['verdict'] = 'ok' if fine else 'defect'
    return result


def main():
    options = [word for word in sys.argv[1:] if word.startswith('--')]
    kind, *host = [word for word in sys.argv[1:] if not word.startswith('--')]
    interrupts = ends.Interrupts()
    dev = ends.Device()
    if host:
        wire = ends.connect(host[0])
    else:
        wire = ends.Wire(ends.listen().accept()[0])
    end = ends.End(dev, kind, stream=1 if host else 2, depth=128, srq='--srq' in options)
    end.connect(wire.swap(end.address()))
    wire.swap('ready')
    result = run(end, wire, interrupts, bool(host))
    print(json.dumps(result), flush=True)
    end.qp.close()
    return 0 if result['verdict'] == wire.swap(result['verdict']) == 'ok' else 1


if __name__ == '__main__':
    sys.exit(main())
