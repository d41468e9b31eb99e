"""Appends records to a file, and says of each that it is there for good: N, then once more that N is right (CRC-32).

The records go on where those end that are there, which must be 1, 2, 3, … and right. What it says is in its output.
"""

import os
import sys
import zlib


def record(number):
    text = b"%012d" % number
    return b"%s %08x\n" % (text, zlib.crc32(text))


def main(path):
    log = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    length = len(record(1))
    there = os.fstat(log).st_size // length
    for number in range(1, there + 1):
        if os.pread(log, length, (number - 1) * length) != record(number):
            sys.exit("record %d is not what was written" % number)
    print("found %d" % there, flush=True)
    number = there
    while True:
        number += 1
        os.write(log, record(number))
        os.fsync(log)
        print(number, flush=True)


main(sys.argv[1])
