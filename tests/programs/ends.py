"""One end of a connection, on plain libibverbs (pyverbs), and the TCP connection beside it.

Every message says which one it is, and its content follows from that: whoever receives it knows whether it is whole.
"""
import hashlib
import json
import select
import signal
import socket
import struct
import time

import pyverbs.device as device
import pyverbs.enums as e
from pyverbs.addr import AH, GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

PORT = 18517
QKEY = 0x11111111
GRH = 40
HEADER = struct.Struct('<QQ')
TYPES = {'rc': e.IBV_QPT_RC, 'uc': e.IBV_QPT_UC, 'ud': e.IBV_QPT_UD}
STEPS = ['reset', 'init', 'rtr', 'rts']
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_MW_BIND


class Wire:
    """Lines of JSON over TCP."""

    def __init__(self, sock):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.buffer = sock, b''

    def tell(self, what):
        self.sock.sendall(json.dumps(what).encode() + b'\n')

    def hear(self):
        while b'\n' not in self.buffer:
            got = self.sock.recv(65536)
            if not got:
                raise ConnectionError('the other side is gone')
            self.buffer += got
        line, self.buffer = self.buffer.split(b'\n', 1)
        return json.loads(line)

    def swap(self, mine):
        self.tell(mine)
        return self.hear()

    def has_word(self):
        return b'\n' in self.buffer or bool(select.select([self.sock], [], [], 0)[0])


def listen():
    listener = socket.create_server(('', PORT))
    return listener


def connect(host):
    return Wire(socket.create_connection((host, PORT)))


class Interrupts:
    """SIGINT: go on with the next part."""

    def __init__(self):
        self.count = 0
        signal.signal(signal.SIGINT, self.note)

    def note(self, *_):
        self.count += 1

    def wait(self, count):
        while self.count < count:
            signal.sigtimedwait([], 0.05)


class Device:
    def __init__(self):
        self.ctx = device.Context(name=device.get_device_list()[0].name.decode())
        self.pd = PD(self.ctx)
        table = range(self.ctx.query_port(1).gid_tbl_len)
        self.gid_index = next(i for i in table if ':ffff:' in str(self.ctx.query_gid(1, i)))
        self.gid = str(self.ctx.query_gid(1, self.gid_index))

    def route(self, gid):
        return AHAttr(port_num=1, is_global=1, gr=GlobalRoute(dgid=GID(gid), sgid_index=self.gid_index))


def content(stream, seq, length):
    body = hashlib.shake_128(HEADER.pack(stream, seq)).digest(length - HEADER.size)
    return HEADER.pack(stream, seq) + body


class End:
    """A queue pair with its memory. Positions of SENDs and RECVs are their wr_ids."""

    def __init__(self, dev, kind, stream, depth=64, size=256, srq=False):
        self.dev, self.kind, self.stream, self.depth, self.size = dev, kind, stream, depth, size
        self.front = GRH if kind == 'ud' else 0
        self.slot = self.front + size
        self.mr = MR(dev.pd, 2 * depth * self.slot, ACCESS)
        self.scq, self.rcq = CQ(dev.ctx, 2 * depth), CQ(dev.ctx, 2 * depth)
        self.srq = SRQ(dev.pd, SrqInitAttr(SrqAttr(max_wr=depth))) if srq else None
        cap = QPCap(max_send_wr=depth, max_recv_wr=depth)
        init = QPInitAttr(qp_type=TYPES[kind], scq=self.scq, rcq=self.rcq, srq=self.srq, cap=cap, sq_sig_all=1)
        self.qp = QP(dev.pd, init)
        self.psn = (stream * 7919 + 17) & 0xffffff
        self.sent = self.completed = 0
        self.posted = self.due = 0
        self.peer = self.ah = None

    def address(self):
        return {'gid': self.dev.gid, 'qpn': self.qp.qp_num, 'psn': self.psn, 'stream': self.stream}

    def know(self, peer):
        self.peer = peer

    def step(self, state):
        """Takes the queue pair to the next state."""
        attr = QPAttr(qp_state=getattr(e, f'IBV_QPS_{state.upper()}'), port_num=1)
        mask = e.IBV_QP_STATE
        if state == 'init':
            mask |= e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT
            attr.qkey, attr.qp_access_flags = QKEY, ACCESS & ~e.IBV_ACCESS_MW_BIND
            mask |= e.IBV_QP_QKEY if self.kind == 'ud' else e.IBV_QP_ACCESS_FLAGS
        elif state == 'rtr' and self.kind != 'ud':
            attr.ah_attr, attr.dest_qp_num = self.dev.route(self.peer['gid']), self.peer['qpn']
            attr.rq_psn, attr.path_mtu = self.peer['psn'], e.IBV_MTU_1024
            mask |= e.IBV_QP_AV | e.IBV_QP_DEST_QPN | e.IBV_QP_RQ_PSN | e.IBV_QP_PATH_MTU
            if self.kind == 'rc':
                attr.max_dest_rd_atomic, attr.min_rnr_timer = 4, 12
                mask |= e.IBV_QP_MAX_DEST_RD_ATOMIC | e.IBV_QP_MIN_RNR_TIMER
        elif state == 'rts':
            attr.sq_psn = self.psn
            mask |= e.IBV_QP_SQ_PSN
            if self.kind == 'rc':
                attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.max_rd_atomic = 19, 7, 7, 4
                mask |= e.IBV_QP_TIMEOUT | e.IBV_QP_RETRY_CNT | e.IBV_QP_RNR_RETRY | e.IBV_QP_MAX_QP_RD_ATOMIC
        self.qp.modify(attr, mask)
        if state == 'init':
            while self.posted < self.depth:
                self.post_recv()

    def steps(self, first, last):
        for state in STEPS[first:last + 1]:
            if state != 'reset':
                self.step(state)

    def connect(self, peer):
        self.know(peer)
        self.steps(1, 3)
        self.aim(peer)

    def aim(self, peer):
        """Where datagrams go."""
        if self.kind == 'ud':
            self.ah = AH(self.dev.pd, attr=self.dev.route(peer['gid']))

    def at(self, position, receives=False):
        return (position % self.depth + (self.depth if receives else 0)) * self.slot

    def post_recv(self):
        sge = SGE(self.mr.buf + self.at(self.posted, True), self.slot, self.mr.lkey)
        wr = RecvWR(wr_id=self.posted, sg=[sge], num_sge=1)
        (self.qp if self.srq is None else self.srq).post_recv(wr)
        self.posted += 1

    def may_send(self):
        return self.sent < self.completed + self.depth // 2

    def send(self):
        offset = self.at(self.sent)
        self.mr.write(content(self.stream, self.sent, self.size), self.size, offset)
        wr = SendWR(wr_id=self.sent, sg=[SGE(self.mr.buf + offset, self.size, self.mr.lkey)], num_sge=1)
        if self.kind == 'ud':
            wr.set_wr_ud(self.ah, self.peer['qpn'], QKEY)
        self.qp.post_send(wr)
        self.sent += 1

    def poll_sent(self):
        _, done = self.scq.poll(16)
        for wc in done:
            if wc.status or wc.wr_id != self.completed:
                raise AssertionError(f'SEND {self.completed} completed as {wc.wr_id} with status {wc.status}')
            self.completed += 1
        return len(done)

    def poll_received(self):
        """Pairs of a completion and the slot's bytes."""
        _, done = self.rcq.poll(16)
        taken = []
        for wc in done:
            if wc.status:
                raise AssertionError(f'RECV {wc.wr_id} failed with status {wc.status}')
            taken.append((wc, bytes(self.mr.read(self.slot, self.at(wc.wr_id, True)))))
            self.post_recv()
        return taken


def number_of(stream, data):
    """Which message of a stream these bytes are; none if they are not what that message is."""
    found, seq = HEADER.unpack_from(data)
    return seq if found == stream and data == content(stream, seq, len(data)) else None


def exchange(end, wire, count=20, limit_s=30):
    """`count` messages there and back on a reliable or quiet connection: all must arrive, once and in order."""
    until, due, first = time.monotonic() + limit_s, end.due, end.sent
    goal = due + count
    while due < goal or end.completed < first + count:
        if end.sent < first + count and end.may_send():
            end.send()
        idle = not end.poll_sent()
        for _, data in end.poll_received():
            idle = False
            seq = number_of(end.peer['stream'], data[end.front:])
            if seq != due:
                raise AssertionError(f'{end.kind}: message {seq} came where {due} was due')
            due += 1
        if time.monotonic() > until:
            raise AssertionError(f'{end.kind} {end.peer}: {due} of {goal} received, {end.completed} of {end.sent} sent')
        if idle:
            time.sleep(0.001)
    end.due = due
    wire.swap('exchanged')
