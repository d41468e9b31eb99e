/*
 * A program that dumps its context in the middle of its work and ends; another process goes on with it, several times.
 *
 *   checkpoint partner FOLDER SECRET                    an ordinary program at the other end
 *   checkpoint GENERATION FOLDER SECRET                 0 makes all; 1, 2 ... restore it; the last ends well
 *
 * Both ends send each other messages, each with an RDMA WRITE in front of it. Everything is checked: content, order, number.
 * FOLDER has the FIFOs `to_partner`, `to_program`, `end`; the program's memory and its dump are put there, too.
 */

#include "checkpoint_work.h"

#include <sys/stat.h>

static void open_first(void)
{
	int count;
	struct ibv_device **devices = ibv_get_device_list(&count);
	CHECK(devices && count == 1);
	CHECK((o.context = ibv_open_device(devices[0])));
	ibv_free_device_list(devices);
}

static struct ibv_qp *make(enum ibv_qp_type type, struct ibv_cq *cq, struct ibv_srq *srq, void *user)
{
	struct ibv_qp_init_attr init = {
		.qp_context = user,
		.send_cq = cq,
		.recv_cq = cq,
		.srq = srq,
		.cap = { 2 * SENDS, RECVS, 2, 1, 64 },
		.qp_type = type,
	};
	struct ibv_qp *qp = ibv_create_qp(o.pd, &init);
	CHECK(qp);
	return qp;
}

static void connect_to(struct ibv_qp *qp, const struct hello *peer)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1,
				    .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = peer->qpn,
		.rq_psn = 0x654321,
		.max_dest_rd_atomic = 4,
		.min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64, .dgid = peer->gid } },
	};
	CHECK(!ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
			     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	/* seven retries of one second: longer than this program is away */
	struct ibv_qp_attr rts = {
		.qp_state = IBV_QPS_RTS, .sq_psn = 0x654321, .timeout = 18, .retry_cnt = 7, .rnr_retry = 7,
		.max_rd_atomic = 4,
	};
	CHECK(!ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
			     IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

static void share_secret(void)
{
	uint8_t key[32];
	memset(key, 0x5a, sizeof(key));
	if (with_secret)
		CHECK(!verbatim_set_qp_secret(o.qp, key, partner));
}

static void make_basics(void)
{
	open_first();
	CHECK((o.pd = ibv_alloc_pd(o.context)));
	CHECK((o.channel = ibv_create_comp_channel(o.context)));
	CHECK((o.cq = ibv_create_cq(o.context, 4 * (RECVS + SENDS), m, o.channel, 0)));
	CHECK((o.mr = ibv_reg_mr(o.pd, m, sizeof(*m),
				 IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_MW_BIND)));
}

static struct hello about_me(struct ibv_qp *qp)
{
	struct hello hello = { .qpn = qp->qp_num, .address = (uintptr_t)m->written, .rkey = o.mr->rkey };
	CHECK(!ibv_query_gid(o.context, 1, 0, &hello.gid));
	return hello;
}

static void put(int fd, const struct hello *hello)
{
	CHECK(write(fd, hello, sizeof(*hello)) == sizeof(*hello));
}

static void get(int fd, struct hello *hello)
{
	CHECK(read(fd, hello, sizeof(*hello)) == sizeof(*hello));
}

/* Two queue pairs that wait for each other: SENDs without a RECV at the one, RECVs at the other. */
static void make_aside(void)
{
	CHECK((o.side_cq = ibv_create_cq(o.context, 64, NULL, NULL, 0)));
	struct hello hello[2];
	for (int i = 0; i < 2; i++) {
		o.sides[i] = make(IBV_QPT_RC, o.side_cq, NULL, (void *)(uintptr_t)(1000 + i));
		hello[i] = about_me(o.sides[i]);
	}
	for (int i = 0; i < 2; i++)
		connect_to(o.sides[i], &hello[1 - i]);
	struct ibv_recv_wr *bad_recv;
	struct ibv_send_wr *bad_send;
	for (uint64_t i = 0; i < 2; i++) {
		struct ibv_sge sge = { (uintptr_t)m->aside[i], 4096, o.mr->lkey };
		struct ibv_recv_wr wr = { .wr_id = 500 + i, .sg_list = &sge, .num_sge = 1 };
		CHECK(!ibv_post_recv(o.sides[0], &wr, &bad_recv));
	}
	for (uint64_t i = 0; i < 3; i++) {
		char word[8] = { 'i', 'n', 'l', 'i', 'n', 'e', '0' + (char)i };
		fill(m->aside[2 + i], 4096, i, 77);
		struct ibv_sge sge = { (uintptr_t)m->aside[2 + i], 4096, o.mr->lkey };
		if (i == 1)
			sge = (struct ibv_sge){ (uintptr_t)word, sizeof(word), 0 };
		struct ibv_send_wr wr = { .wr_id = 600 + i, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
					  .send_flags = IBV_SEND_SIGNALED | (i == 1 ? IBV_SEND_INLINE : 0) };
		CHECK(!ibv_post_send(o.sides[0], &wr, &bad_send));
	}
	/* datagrams: one RECV waits */
	o.datagrams = make(IBV_QPT_UD, o.side_cq, NULL, NULL);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 0x1234 };
	CHECK(!ibv_modify_qp(o.datagrams, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
	attr.qp_state = IBV_QPS_RTR;
	CHECK(!ibv_modify_qp(o.datagrams, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	CHECK(!ibv_modify_qp(o.datagrams, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
	struct ibv_sge sge = { (uintptr_t)m->aside[7], 4096, o.mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 700, .sg_list = &sge, .num_sge = 1 };
	CHECK(!ibv_post_recv(o.datagrams, &wr, &bad_recv));
	struct ibv_ah_attr way = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64, .dgid = m->peer.gid } };
	CHECK((o.ah = ibv_create_ah(o.pd, &way)));
}

static struct ibv_wc side_completion(void)
{
	struct ibv_wc wc;
	while (!ibv_poll_cq(o.side_cq, 1, &wc))
		;
	CHECK(wc.status == IBV_WC_SUCCESS);
	return wc;
}

/* What had waited since before the first dump goes on. */
static void finish_aside(void)
{
	struct ibv_recv_wr *bad_recv;
	struct ibv_send_wr *bad_send;
	CHECK(o.sides[0]->qp_context == (void *)1000 && o.sides[1]->qp_context == (void *)1001);
	for (uint64_t i = 0; i < 3; i++) {
		struct ibv_sge sge = { (uintptr_t)m->aside[5 + i % 2], 4096, o.mr->lkey };
		struct ibv_recv_wr wr = { .wr_id = 800 + i, .sg_list = &sge, .num_sge = 1 };
		CHECK(!ibv_post_recv(o.sides[1], &wr, &bad_recv));
		uint64_t sent = 0, received = 0;
		for (int n = 0; n < 2; n++) {
			struct ibv_wc wc = side_completion();
			*(wc.opcode == IBV_WC_SEND ? &sent : &received) = wc.wr_id;
		}
		CHECK(sent == 600 + i && received == 800 + i);
		if (i == 1)
			CHECK(!memcmp(m->aside[6], "inline1", 8));
		else
			verify(m->aside[5], 4096, i, 77);
	}
	for (uint64_t i = 0; i < 2; i++) {
		struct ibv_sge sge = { (uintptr_t)m->aside[2], 16, o.mr->lkey };
		struct ibv_send_wr wr = { .wr_id = 900, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND };
		CHECK(!ibv_post_send(o.sides[1], &wr, &bad_send));
		struct ibv_wc wc = side_completion();
		CHECK(wc.wr_id == 500 + i && wc.byte_len == 16 && wc.qp_num == o.sides[0]->qp_num);
	}
	/* a datagram to itself: by a handle of its own, since the old one leads to the partner */
	struct ibv_ah_attr way = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64 } };
	CHECK(!ibv_query_gid(o.context, 1, 0, &way.grh.dgid));
	struct ibv_ah *self = ibv_create_ah(o.pd, &way);
	CHECK(self);
	struct ibv_sge sge = { (uintptr_t)m->aside[2], 100, o.mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 901, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
				  .wr.ud = { self, o.datagrams->qp_num, 0x1234 } };
	CHECK(!ibv_post_send(o.datagrams, &wr, &bad_send));
	struct ibv_wc wc = side_completion();
	CHECK(wc.wr_id == 700 && wc.byte_len == 140 && wc.src_qp == o.datagrams->qp_num);
	verify(m->aside[7] + 40, 100, 0, 77);
	CHECK(!ibv_destroy_ah(self));
	struct ibv_srq_attr attr;
	CHECK(!ibv_query_srq(o.spare_srq, &attr) && attr.srq_limit == 1);
}

static void make_all(void)
{
	make_basics();
	struct ibv_srq_init_attr init = { .srq_context = &m->srq, .attr = { .max_wr = RECVS, .max_sge = 1 } };
	CHECK((o.srq = ibv_create_srq(o.pd, &init)));
	init.srq_context = NULL;
	CHECK((o.spare_srq = ibv_create_srq(o.pd, &init)));
	struct ibv_recv_wr nothing = { .wr_id = 1 }, *bad;
	for (int i = 0; i < 2; i++)
		CHECK(!ibv_post_srq_recv(o.spare_srq, &nothing, &bad));
	struct ibv_srq_attr limit = { .srq_limit = 1 };
	CHECK(!ibv_modify_srq(o.spare_srq, &limit, IBV_SRQ_LIMIT));
	o.qp = make(IBV_QPT_RC, o.cq, o.srq, &m->qpn);
	for (uint64_t i = 0; i < RECVS; i++)
		post_recv(i);
	/* told as soon as the first RECV is used; nobody reads it before the next process */
	limit.srq_limit = RECVS;
	CHECK(!ibv_modify_srq(o.srq, &limit, IBV_SRQ_LIMIT));

	int to = open(in_folder("to_partner"), O_WRONLY), from = open(in_folder("to_program"), O_RDONLY);
	CHECK(to >= 0 && from >= 0);
	struct hello me = about_me(o.qp);
	put(to, &me);
	get(from, &m->peer);
	connect_to(o.qp, &m->peer);
	share_secret();
	make_aside();

	/* the partner writes through a window */
	CHECK((o.window = ibv_alloc_mw(o.pd, IBV_MW_TYPE_1)));
	struct ibv_mw_bind bind = {
		.wr_id = 4711,
		.send_flags = IBV_SEND_SIGNALED,
		.bind_info = { o.mr, (uintptr_t)m->written, sizeof(m->written), IBV_ACCESS_REMOTE_WRITE },
	};
	CHECK(!ibv_bind_mw(o.qp, o.window, &bind));
	struct ibv_wc wc;
	while (!ibv_poll_cq(o.cq, 1, &wc))
		;
	CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == 4711);
	me.rkey = o.window->rkey;
	put(to, &me);
	struct hello ready;
	get(from, &ready);
	CHECK(!close(to) && !close(from));
	CHECK(!ibv_req_notify_cq(o.cq, 0));

	m->pd = o.pd->handle;
	m->cq = o.cq->handle;
	m->side_cq = o.side_cq->handle;
	m->srq = o.srq->handle;
	m->spare_srq = o.spare_srq->handle;
	m->lkey = o.mr->lkey;
	m->rkey = o.mr->rkey;
	m->window = o.window->rkey;
	m->ah = o.ah->handle;
	m->qpn = o.qp->qp_num;
	m->datagrams = o.datagrams->qp_num;
	for (int i = 0; i < 2; i++)
		m->sides[i] = o.sides[i]->qp_num;
}

static void *load(size_t *bytes)
{
	struct stat about;
	int fd = open(in_folder("dump"), O_RDONLY);
	CHECK(fd >= 0 && !fstat(fd, &about));
	*bytes = (size_t)about.st_size;
	void *dump = malloc(*bytes);
	CHECK(dump && read(fd, dump, *bytes) == about.st_size && !close(fd));
	return dump;
}

static void restore_all(void)
{
	size_t bytes;
	void *dump = load(&bytes);
	CHECK(!verbatim_check_dump(dump, bytes));
	open_first();
	const struct ibv_dump_record *record = NULL;
	while ((record = ibv_dump_next(dump, bytes, record))) {
		void *object = NULL;
		int failed = ibv_restore_object(o.context, &object, record->type, IBV_RESTORE_CREATE, (void *)record,
						record->length);
		if (failed)
			fprintf(stderr, "type %d, handle %#x: %s\n", record->type, record->handle, strerror(failed));
		CHECK(!failed && object);
		uint32_t handle = record->handle;
		switch (record->type) {
		case IBV_OBJECT_PD:
			o.pd = object;
			break;
		case IBV_OBJECT_COMP_CHANNEL:
			o.channel = object;
			break;
		case IBV_OBJECT_CQ:
			*(handle == m->cq ? &o.cq : &o.side_cq) = object;
			break;
		case IBV_OBJECT_SRQ:
			*(handle == m->srq ? &o.srq : &o.spare_srq) = object;
			break;
		case IBV_OBJECT_MR:
			o.mr = object;
			break;
		case IBV_OBJECT_AH:
			o.ah = object;
			break;
		case IBV_OBJECT_MW:
			o.window = object;
			break;
		case IBV_OBJECT_QP:
			if (handle == m->qpn)
				o.qp = object;
			else if (handle == m->datagrams)
				o.datagrams = object;
			else
				o.sides[handle == m->sides[1]] = object;
			break;
		default:
			CHECK(0);
		}
	}
	CHECK(o.pd->handle == m->pd && o.cq->handle == m->cq && o.cq->channel == o.channel && o.cq->cq_context == m);
	CHECK(o.srq->handle == m->srq && o.srq->srq_context == &m->srq && o.srq->pd == o.pd);
	CHECK(o.mr->lkey == m->lkey && o.mr->rkey == m->rkey && o.mr->addr == m && o.mr->length == sizeof(*m));
	CHECK(o.window->rkey == m->window && o.ah->handle == m->ah && o.ah->pd == o.pd);
	CHECK(o.qp->qp_num == m->qpn && o.qp->srq == o.srq && o.qp->send_cq == o.cq && o.qp->qp_context == &m->qpn);
	CHECK(o.datagrams->qp_num == m->datagrams && o.qp->state == IBV_QPS_RESET);
	while ((record = ibv_dump_next(dump, bytes, record))) {
		void *object = NULL;
		if (record->type != IBV_OBJECT_QP)
			continue;
		CHECK(!ibv_restore_object(o.context, &object, record->type, IBV_RESTORE_REFILL, (void *)record,
					  record->length));
		CHECK(((struct ibv_qp *)object)->qp_num == record->handle);
		CHECK(ibv_restore_object(o.context, &object, record->type, IBV_RESTORE_REFILL, (void *)record,
					 record->length) == EINVAL);
	}
	CHECK(o.qp->state == IBV_QPS_RTS && o.sides[0]->state == IBV_QPS_RTS && o.datagrams->state == IBV_QPS_RTS);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	CHECK(!ibv_query_qp(o.qp, &attr, IBV_QP_STATE, &init));
	CHECK(attr.qp_state == IBV_QPS_RTS && attr.dest_qp_num == m->peer.qpn && attr.timeout == 18);
	free(dump);
}

static void dump_all(void)
{
	int count = 0, again = 0;
	CHECK(!ibv_dump_context(o.context, &count, NULL, 0) && count > 0);
	size_t bytes = verbatim_dump_bytes(o.context);
	unsigned char *dump = malloc(bytes);
	CHECK(dump && ibv_dump_context(o.context, NULL, dump, bytes - 1) == ENOSPC);
	CHECK(!ibv_dump_context(o.context, &again, dump, bytes) && again == count);
	CHECK(!verbatim_check_dump(dump, bytes) && ((struct ibv_dump_head *)dump)->count == (uint32_t)count);
	int fd = open(in_folder("dump"), O_WRONLY | O_CREAT | O_TRUNC, 0600);
	CHECK(fd >= 0 && write(fd, dump, bytes) == (ssize_t)bytes && !close(fd));
}

/* The limit of the shared receive queue was reached before the first dump; that is told once. */
static void read_events(int expected)
{
	int limits = 0;
	struct ibv_async_event event;
	CHECK(!fcntl(o.context->async_fd, F_SETFL, fcntl(o.context->async_fd, F_GETFL) | O_NONBLOCK));
	while (!ibv_get_async_event(o.context, &event)) {
		if (event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED)
			CHECK(event.element.srq == o.srq && ++limits);
		else
			CHECK(event.event_type == IBV_EVENT_COMM_EST);
		ibv_ack_async_event(&event);
	}
	CHECK(errno == EAGAIN && limits == expected);
}

static void clear_all(void)
{
	CHECK(!ibv_dealloc_mw(o.window));
	CHECK(!ibv_destroy_qp(o.qp) && !ibv_destroy_qp(o.datagrams));
	CHECK(!ibv_destroy_qp(o.sides[0]) && !ibv_destroy_qp(o.sides[1]));
	CHECK(!ibv_destroy_ah(o.ah) && !ibv_dereg_mr(o.mr));
	CHECK(!ibv_destroy_srq(o.srq) && !ibv_destroy_srq(o.spare_srq));
	CHECK(!ibv_destroy_cq(o.cq) && !ibv_destroy_cq(o.side_cq));
	CHECK(!ibv_destroy_comp_channel(o.channel) && !ibv_dealloc_pd(o.pd) && !ibv_close_device(o.context));
}

static void be_partner(void)
{
	map_memory(1);
	make_basics();
	o.qp = make(IBV_QPT_RC, o.cq, NULL, NULL);
	int from = open(in_folder("to_partner"), O_RDONLY), to = open(in_folder("to_program"), O_WRONLY);
	CHECK(to >= 0 && from >= 0);
	get(from, &m->peer);
	struct hello me = about_me(o.qp);
	put(to, &me);
	connect_to(o.qp, &m->peer);
	share_secret();
	for (uint64_t i = 0; i < RECVS; i++)
		post_recv(i);
	get(from, &m->peer);
	CHECK(!ibv_req_notify_cq(o.cq, 0));
	put(to, &me);
	CHECK(!close(to) && !close(from));
	work(MESSAGES + 1);
	int end = open(in_folder("end"), O_WRONLY);
	CHECK(end >= 0 && !close(end));
}

int main(int argc, char **argv)
{
	CHECK(argc == 4);
	folder = argv[2];
	with_secret = !strcmp(argv[3], "secret");
	partner = !strcmp(argv[1], "partner");
	if (partner) {
		be_partner();
		puts("done");
		return 0;
	}
	int generation = atoi(argv[1]);
	map_memory(generation == 0);
	if (generation == 0)
		make_all();
	else
		restore_all();
	if (generation == 1) {
		finish_aside();
		read_events(1);
	} else if (generation > 1) {
		read_events(0);
	}
	if (generation < GENERATIONS - 1) {
		work(MESSAGES * (generation + 1) / GENERATIONS);
		dump_all();
		puts("dumped");
		/* with all that the RNIC has of it */
		fflush(stdout);
		_exit(0);
	}
	work(MESSAGES + 1);
	int end = open(in_folder("end"), O_RDONLY);
	CHECK(end >= 0 && !close(end));
	clear_all();
	puts("done");
	return 0;
}
