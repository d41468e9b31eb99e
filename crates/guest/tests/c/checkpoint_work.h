/* What the program of checkpoint.c works at, with its partner: messages, in both directions, and its memory. */

#pragma once

#include "check.h"

#include <fcntl.h>
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>
#include <verbatim.h>

enum {
	MESSAGES = 400,
	GENERATIONS = 5,
	SLOT_BYTES = 1 << 16,
	RECVS = 32,
	SENDS = 8,
	/* at most RECVS + SENDS messages are on their way from program to program */
	WRITE_SLOTS = 64,
	WRITE_BYTES = 4096,
	RECV_TAG = 1 << 20,
};

/* What a program needs of the other. */
struct hello {
	union ibv_gid gid;
	uint32_t qpn;
	uint64_t address;
	uint32_t rkey;
};

/* Memory of either program; the peer WRITEs to `written`. */
struct memory {
	unsigned char recv[RECVS][SLOT_BYTES];
	unsigned char send[SENDS][SLOT_BYTES];
	unsigned char source[WRITE_SLOTS][WRITE_BYTES];
	unsigned char written[WRITE_SLOTS][WRITE_BYTES];
	unsigned char aside[8][4096];

	/* where the program is */
	uint64_t posted, completed, received;
	struct hello peer;
	/* what its objects are known by */
	uint32_t pd, cq, side_cq, srq, spare_srq, lkey, rkey, window, ah, qpn, sides[2], datagrams;
	int dumped_completions;
};

/* The program's objects in this process. */
static struct {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq, *side_cq;
	struct ibv_srq *srq, *spare_srq;
	struct ibv_mr *mr;
	struct ibv_mw *window;
	struct ibv_ah *ah;
	struct ibv_qp *qp, *sides[2], *datagrams;
} o;

static struct memory *m;
static const char *folder;
static int with_secret;
/* 0: the program's messages, 1: the partner's. */
static int partner;

static char *in_folder(const char *name)
{
	static char path[2][512];
	static int turn;
	turn = !turn;
	CHECK(snprintf(path[turn], sizeof(path[turn]), "%s/%s", folder, name) < (int)sizeof(path[turn]));
	return path[turn];
}

static unsigned char pattern(uint64_t sequence, size_t at, int salt)
{
	return (unsigned char)(sequence * 31 + at * 7 + salt);
}

static size_t length_of(uint64_t sequence)
{
	return 1 + sequence * 7919 % 40000;
}

static void fill(unsigned char *bytes, size_t length, uint64_t sequence, int salt)
{
	for (size_t at = 0; at < length; at++)
		bytes[at] = pattern(sequence, at, salt);
}

static void verify(const unsigned char *bytes, size_t length, uint64_t sequence, int salt)
{
	for (size_t at = 0; at < length; at++)
		if (bytes[at] != pattern(sequence, at, salt)) {
			fprintf(stderr, "message %llu of %s, byte %zu\n", (unsigned long long)sequence,
				partner ? "the program" : "the partner", at);
			exit(1);
		}
}

static void post_recv(uint64_t slot)
{
	struct ibv_sge sge = { (uintptr_t)m->recv[slot], SLOT_BYTES, o.mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = RECV_TAG | slot, .sg_list = &sge, .num_sge = 1 }, *bad;
	if (o.srq)
		CHECK(!ibv_post_srq_recv(o.srq, &wr, &bad));
	else
		CHECK(!ibv_post_recv(o.qp, &wr, &bad));
}

/* As many messages as may be under way. */
static void send_more(void)
{
	while (m->posted < MESSAGES && m->posted - m->completed < SENDS) {
		uint64_t sequence = m->posted++;
		unsigned char *message = m->send[sequence % SENDS], *source = m->source[sequence % WRITE_SLOTS];
		fill(message, length_of(sequence), sequence, partner);
		fill(source, WRITE_BYTES, sequence, 10 + partner);
		struct ibv_sge sges[2] = {
			{ (uintptr_t)source, WRITE_BYTES, o.mr->lkey },
			{ (uintptr_t)message, length_of(sequence), o.mr->lkey },
		};
		struct ibv_send_wr send = {
			.wr_id = sequence,
			.sg_list = &sges[1],
			.num_sge = 1,
			.opcode = IBV_WR_SEND_WITH_IMM,
			.send_flags = IBV_SEND_SIGNALED,
			.imm_data = (uint32_t)sequence,
		};
		struct ibv_send_wr write = {
			.next = &send,
			.sg_list = &sges[0],
			.num_sge = 1,
			.opcode = IBV_WR_RDMA_WRITE,
			.wr.rdma = { m->peer.address + sequence % WRITE_SLOTS * WRITE_BYTES, m->peer.rkey },
		};
		struct ibv_send_wr *bad;
		CHECK(!ibv_post_send(o.qp, &write, &bad));
	}
}

static void take(const struct ibv_wc *wc)
{
	if (wc->status != IBV_WC_SUCCESS)
		fprintf(stderr, "%s: %s\n", partner ? "partner" : "program", ibv_wc_status_str(wc->status));
	CHECK(wc->status == IBV_WC_SUCCESS && wc->qp_num == o.qp->qp_num);
	if (!(wc->wr_id & RECV_TAG)) {
		CHECK(wc->wr_id == m->completed);
		m->completed++;
		return;
	}
	uint64_t slot = wc->wr_id & ~(uint64_t)RECV_TAG, sequence = m->received++;
	CHECK(wc->imm_data == sequence && wc->byte_len == length_of(sequence));
	verify(m->recv[slot], wc->byte_len, sequence, !partner);
	verify(m->written[sequence % WRITE_SLOTS], WRITE_BYTES, sequence, 10 + !partner);
	post_recv(slot);
}

static int is_done(void)
{
	return m->received == MESSAGES && m->completed == MESSAGES;
}

/* Goes on until all is done, or so many messages have been received; what else is in the queue stays there. */
static void work(uint64_t until)
{
	while (1) {
		struct ibv_wc wc;
		send_more();
		while (!is_done() && m->received < until && ibv_poll_cq(o.cq, 1, &wc) > 0) {
			take(&wc);
			send_more();
		}
		if (is_done() || m->received >= until)
			return;
		struct ibv_cq *cq;
		void *user;
		CHECK(!ibv_get_cq_event(o.channel, &cq, &user) && cq == o.cq && user == m);
		ibv_ack_cq_events(cq, 1);
		CHECK(!ibv_req_notify_cq(o.cq, 0));
	}
}

static void map_memory(int fresh)
{
	int flags = partner ? O_RDWR | O_CREAT : O_RDWR | (fresh ? O_CREAT | O_EXCL : 0);
	int fd = open(in_folder(partner ? "partner_memory" : "memory"), flags, 0600);
	CHECK(fd >= 0 && !ftruncate(fd, sizeof(*m)));
	void *where = (void *)0x200000000000;
	m = mmap(where, sizeof(*m), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, fd, 0);
	CHECK(m == where && !close(fd));
}
