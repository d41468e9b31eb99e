#!/usr/bin/python3
"""Queue pairs that are set up while their programs move: one for every pair of steps that the two sides can be at.

usage: halves.py [HOST]

The two sides tell each other their numbers over TCP and take each queue pair to its step. After each SIGINT that the client
gets there comes the next part: the rest of the way, with messages on all; once more messages; the end.
"""
import sys

import ends

KINDS = ['rc', 'uc']
COUNT = len(ends.STEPS)


def plan():
    return [(kind, ours, theirs) for kind in KINDS for ours in range(COUNT) for theirs in range(COUNT)]


def main():
    host = sys.argv[1:]
    interrupts = ends.Interrupts()
    dev = ends.Device()
    wire = ends.connect(host[0]) if host else ends.Wire(ends.listen().accept()[0])
    pairs = plan()
    mine = [ends.End(dev, kind, stream=2 * i + (not host), depth=32, size=128) for i, (kind, _, _) in enumerate(pairs)]
    peers = wire.swap([end.address() for end in mine])
    reached = [ours if host else theirs for _, ours, theirs in pairs]
    for end, peer, step in zip(mine, peers, reached):
        end.know(peer)
        end.steps(1, step)
    wire.swap('halfway')
    print('halfway', flush=True)
    for part in range(1, 4):
        if host:
            interrupts.wait(part)
        wire.swap(f'part {part}')
        if part == 3:
            break
        if part == 1:
            for end, step in zip(mine, reached):
                end.steps(step + 1, COUNT - 1)
            wire.swap('connected')
        for end in mine:
            ends.exchange(end, wire)
        print('connected' if part == 1 else 'again', flush=True)
    return 0


if __name__ == '__main__':
    sys.exit(main())
