"""Sends frames as a hostile instance would, or says which of them arrive. Each frame ends with a word that names it.

addresses.py send LINK OWN MAC OTHER FURTHER: frames from this network namespace, the true one first and last.
addresses.py listen LINK: a line for each frame with a known word, until the last one.
"""

import ipaddress
import socket
import struct
import sys

BROADCAST = b"\xff" * 6
MARK = b"verbatim-frame:"
ETH_P_ALL = 3


def ethernet(source, kind, payload, target=BROADCAST):
    return target + source + struct.pack("!H", kind) + payload


def udp(port, payload):
    return struct.pack("!HHHH", 40000, port, 8 + len(payload), 0) + payload


def ipv4(source, payload, protocol=17):
    header = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(payload), 1, 0, 64, protocol, 0, source, b"\xff" * 4)
    total = sum(struct.unpack("!10H", header))
    total = (total & 0xFFFF) + (total >> 16)
    checksum = ~(total + (total >> 16)) & 0xFFFF
    return header[:10] + struct.pack("!H", checksum) + header[12:] + payload


def ipv6(source, payload, following=17, target="ff02::1"):
    target = ipaddress.ip_address(target).packed
    return struct.pack("!IHBB16s16s", 6 << 28, len(payload), following, 64, source, target) + payload


def arp(operation, mac, sender):
    return struct.pack("!HHBBH6s4s6s4s", 1, 0x0800, 6, 4, operation, mac, sender, BROADCAST, sender)


def advertisement(target, word):
    # The checksum is not right; whoever sees the frame does not look.
    return struct.pack("!BBHI16s", 136, 0, 0, 0x20000000, target) + word


def frames(own, mac, other, further):
    def word(name):
        return MARK + name.encode() + b";"

    local = bytes([0xFE, 0x80, 0, 0, 0, 0, 0, 0, mac[0] ^ 2, mac[1], mac[2], 0xFF, 0xFE, mac[3], mac[4], mac[5]])
    strange = bytes([0xFE, 0x80] + [0] * 13 + [1])
    stolen_mac = bytes([0x02, ord("v")]) + other
    hop = struct.pack("!BBBBI", 17, 0, 1, 4, 0)
    yield ethernet(mac, 0x0800, ipv4(own, udp(9999, word("first"))))
    yield ethernet(mac, 0x0800, ipv4(other, udp(9999, word("ipv4-of-another"))))
    yield ethernet(stolen_mac, 0x0800, ipv4(own, udp(9999, word("mac-of-another"))))
    yield ethernet(mac, 0x0806, arp(2, mac, own) + word("own-arp"))
    yield ethernet(mac, 0x0806, arp(2, mac, other) + word("arp-for-another"))
    yield ethernet(mac, 0x0806, arp(2, stolen_mac, own) + word("arp-with-mac-of-another"))
    yield ethernet(mac, 0x0800, ipv4(own, udp(4791, word("roce-v2"))))
    yield ethernet(mac, 0x86DD, ipv6(local, udp(9999, word("own-ipv6"))))
    yield ethernet(mac, 0x86DD, ipv6(strange, udp(9999, word("ipv6-of-another"))))
    yield ethernet(mac, 0x86DD, ipv6(local, udp(4791, word("roce-v2-by-ipv6"))))
    yield ethernet(mac, 0x86DD, ipv6(local, hop + udp(4791, word("roce-v2-behind-a-header")), following=0))
    yield ethernet(mac, 0x86DD, ipv6(local, advertisement(local, word("own-advertisement")), following=58))
    yield ethernet(mac, 0x86DD, ipv6(local, advertisement(strange, word("advertisement-for-another")), following=58))
    yield ethernet(mac, 0x8915, word("roce-v1"))
    yield ethernet(mac, 0x8100, struct.pack("!HH", 7, 0x0800) + ipv4(other, udp(4791, word("in-a-vlan"))))
    yield ethernet(mac, 0x0800, ipv4(further, udp(9999, word("further"))))
    yield ethernet(mac, 0x0800, ipv4(own, udp(9999, word("last"))))


def send(link, own, mac, other, further):
    out = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    out.bind((link, 0))
    addresses = [socket.inet_aton(address) for address in (own, other, further)]
    mac = bytes.fromhex(mac.replace(":", ""))
    for frame in frames(addresses[0], mac, addresses[1], addresses[2]):
        out.send(frame)


def listen(link):
    heard = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    heard.bind((link, ETH_P_ALL))
    print("listening", flush=True)
    while True:
        frame = heard.recv(65536)
        at = frame.find(MARK)
        if at < 0:
            continue
        name = frame[at + len(MARK):].split(b";")[0].decode()
        print(name, flush=True)
        if name == "last":
            return


if __name__ == "__main__":
    {"send": send, "listen": listen}[sys.argv[1]](*sys.argv[2:])
