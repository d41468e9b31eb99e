#!/usr/bin/python3
"""Two sides that make and destroy objects all the time, and exchange messages on a connection that is new each time.

usage: churn.py [HOST]

Until the client gets SIGINT.
"""
import sys
import threading

import ends
from pyverbs.cq import CQ
from pyverbs.mr import MR


def disturb(dev, over):
    """Objects that nobody uses, by another thread."""
    while not over.is_set():
        with MR(dev.pd, 65536, ends.ACCESS), CQ(dev.ctx, 16):
            over.wait(0.001)


def main():
    host = sys.argv[1:]
    interrupts = ends.Interrupts()
    dev = ends.Device()
    wire = ends.connect(host[0]) if host else ends.Wire(ends.listen().accept()[0])
    over = threading.Event()
    thread = threading.Thread(target=disturb, args=(dev, over))
    thread.start()
    rounds = 0
    try:
        while True:
            ours = interrupts.count
            if wire.swap(ours) or ours:
                break
            end = ends.End(dev, 'rc', stream=2 * rounds + (not host), depth=16, size=128)
            end.connect(wire.swap(end.address()))
            wire.swap('connected')
            ends.exchange(end, wire, count=5)
            for item in (end.qp, end.mr, end.scq, end.rcq):
                item.close()
            rounds += 1
    finally:
        over.set()
        thread.join()
    print(f'{rounds} rounds', flush=True)
    return 0


if __name__ == '__main__':
    sys.exit(main())
