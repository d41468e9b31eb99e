/*
 * rxe without libibverbs: commands to the kernel, by write(2) or by the ioctl INVOKE_WRITE, and the rings that the kernel
 * shares with its user. What a provider hides is visible here: who maps what, and which system call is a doorbell.
 *
 * Whatever fails ends the probe, but for functions that say that they return an errno.
 */
#ifndef UVERBS_H
#define UVERBS_H

#include <infiniband/verbs.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/rdma_user_rxe.h>
#include <stdbool.h>
#include <stdint.h>

enum { PORT = 1, QKEY = 0x11111111, PATIENCE_MS = 30000 };

/* How commands are given. */
enum way { BY_WRITE, BY_IOCTL };

struct device {
	int fd;
	enum way way;
	/* The RoCEv2 GID of the IPv4 address. */
	uint8_t gid[16];
	uint8_t gid_index;
};

/* Memory of the kernel's that is to be mapped once. */
struct ring {
	struct mminfo where;
	struct rxe_queue_buf *at;
};

struct cq {
	uint32_t handle;
	struct ring ring;
};

struct qp {
	uint32_t handle;
	uint32_t number;
	struct ring sends;
	struct ring recvs;
	uint32_t posted;
};

struct mr {
	uint32_t handle;
	uint32_t lkey;
	uint32_t rkey;
};

/* A request; what is 0 is left out. */
struct request {
	enum ibv_wr_opcode opcode;
	uint64_t id;
	unsigned flags;
	uint64_t local;
	uint32_t length;
	uint32_t lkey;
	uint64_t remote;
	uint32_t rkey;
	/* ATOMIC */
	uint64_t add;
	/* UD */
	uint32_t ah;
	uint32_t qpn;
};

struct device device_open(void);
/* Of a descriptor that is open already. */
struct device device_of(int fd, enum way way);

/* A command of the write ABI: 0 or an errno. `core` bytes of `in` and `out` are the core's, the rest the driver's. */
int command(const struct device *device, unsigned number, const void *in, unsigned in_core, unsigned in_all,
	    void *out, unsigned out_core, unsigned out_all);

uint32_t pd_make(const struct device *device);
struct mr mr_make(const struct device *device, uint32_t pd, void *at, uint64_t length, unsigned access);
/* 0 or an errno. */
int mr_try(const struct device *device, uint32_t pd, void *at, uint64_t length, unsigned access, struct mr *mr);
struct cq cq_make(const struct device *device, unsigned entries);
struct qp qp_make(const struct device *device, uint32_t pd, const struct cq *cq, enum ibv_qp_type type, unsigned entries);
uint32_t ah_make(const struct device *device, uint32_t pd);

/* NULL with errno if it fails. */
void *ring_try_map(const struct device *device, const struct ring *ring);
void ring_map(const struct device *device, struct ring *ring);
static inline void qp_map(const struct device *device, struct qp *qp)
{
	ring_map(device, &qp->sends);
	ring_map(device, &qp->recvs);
}

/* 0 or an errno. */
int qp_modify(const struct device *device, const struct qp *qp, const struct ibv_qp_attr *attr, int mask);
void qp_state(const struct device *device, const struct qp *qp, enum ibv_qp_state state);
/* To INIT, RTR and RTS: connected with the queue pair of this number on the same RNIC, or for datagrams. */
void qp_connect(const struct device *device, const struct qp *qp, enum ibv_qp_type type, uint32_t other, uint32_t sq_psn,
		uint32_t rq_psn, unsigned access);
struct ib_uverbs_query_qp_resp qp_query(const struct device *device, const struct qp *qp);

void put_send(struct qp *qp, const struct request *request);
/* 0 or an errno. */
int doorbell(const struct device *device, const struct qp *qp);
void send_request(const struct device *device, struct qp *qp, const struct request *request);
void put_recv(struct qp *qp, uint64_t id, uint64_t local, uint32_t length, uint32_t lkey);

/* Takes a completion if there is one. */
bool cq_take(struct cq *cq, struct ib_uverbs_wc *wc);
/* Waits for one; false if none comes within so many milliseconds. */
bool cq_wait(struct cq *cq, struct ib_uverbs_wc *wc, unsigned limit_ms);
/* Waits for one, or ends the probe. */
struct ib_uverbs_wc cq_next(struct cq *cq);

/* Descriptors and bytes over a socket. */
void give(int socket, const void *bytes, unsigned length, int fd);
/* The descriptor, or -1. */
int get(int socket, void *bytes, unsigned length);

#endif
