"""Connections by addresses that come later: `serve ADDRESS PORT` answers, `ask ADDRESS PORT` asks and listens on a second address.

Multicast: `tell - PORT` sends to groups, `hear SOURCE PORT` is a member of them.
"""
import socket
import sys
import threading
import time

mode, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])


def tried(work):
    """Until the address is there, or somebody listens."""
    while True:
        try:
            return work()
        except OSError:
            time.sleep(0.1)


def listen(family, at):
    def work():
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(at)
        except OSError:
            listener.close()
            raise
        listener.listen()
        return listener

    return tried(work)


def serve_second():
    listener = listen(socket.AF_INET, ("10.77.201.5", 8000))
    print("listening", flush=True)
    while True:
        connection, _ = listener.accept()
        connection.sendall(b"second\n")
        connection.close()


ANY, CHOSEN, OTHER, SIX = "239.77.2.1", "239.77.2.2", "239.77.2.3", "ff15::77"


def tell():
    """Sends to the groups, ten times a second."""
    four = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    six = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    link = socket.if_nametoindex("eth0")
    # An instance has no default route.
    four.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, b"\0" * 8 + link.to_bytes(4, sys.byteorder))
    six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, link)
    number = 0
    while True:
        for group in (ANY, CHOSEN, OTHER):
            tried(lambda: four.sendto(b"%d" % number, (group, port)))
        tried(lambda: six.sendto(b"%d" % number, (SIX, port)))
        number += 1
        time.sleep(0.1)


def heard(what, listener):
    while True:
        print("heard", what, listener.recv(100).decode(), flush=True)


def hear():
    """Joins groups and tells what it hears; of one it takes only what `address` sends."""
    link = socket.if_nametoindex("eth0")
    own = socket.inet_aton("0.0.0.0") + link.to_bytes(4, sys.byteorder)
    sockets = {}
    # Bound to the group: a socket gets what comes to groups of others, too.
    for what, group in (("any", ANY), ("chosen", CHOSEN), ("other", OTHER)):
        sockets[what] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sockets[what].bind((group, port))
    tried(lambda: sockets["any"].setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(ANY) + own))

    def stored(at):
        return (socket.AF_INET.to_bytes(2, sys.byteorder) + b"\0\0" + socket.inet_aton(at)).ljust(128, b"\0")

    # MCAST_JOIN_SOURCE_GROUP and its `struct group_source_req`: 239.77.2.3 from nobody who is here.
    for what, group, source in (("chosen", CHOSEN, address), ("other", OTHER, "10.77.255.254")):
        request = link.to_bytes(4, sys.byteorder) + b"\0" * 4 + stored(group) + stored(source)
        sockets[what].setsockopt(socket.IPPROTO_IP, 46, request)
    sockets["six"] = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    sockets["six"].bind((SIX, port))
    membership = socket.inet_pton(socket.AF_INET6, SIX) + link.to_bytes(4, sys.byteorder)
    sockets["six"].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, membership)
    for what, listener in sockets.items():
        threading.Thread(target=heard, args=(what, listener)).start()


if mode == "tell":
    tell()
elif mode == "hear":
    hear()
elif mode == "serve":
    connection, _ = listen(socket.AF_INET6, (address, port)).accept()
    while asked := connection.recv(100):
        connection.sendall(asked)
else:
    threading.Thread(target=serve_second, daemon=True).start()
    own = ("fd00:5::1", 0)
    connection = tried(lambda: socket.create_connection((address, port), source_address=own))
    number = 0
    while True:
        question = b"%d" % number
        connection.sendall(question)
        answer = connection.recv(100)
        if answer != question:
            print("wrong", number, answer, flush=True)
            sys.exit(3)
        print("answer", number, flush=True)
        number += 1
        time.sleep(0.2)
