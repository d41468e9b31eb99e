/*
 * Checkpoint and restore of verbs objects by the program itself, exported by libverbatim.so.
 *
 * The interface is that of MigrOS (Planeta et al., "MigrOS: Transparent Live-Migration Support for Containerised RDMA
 * Applications", USENIX ATC 2021, section 3.5, Listing 1). It works on contexts of Verbatim's software RNIC. More words,
 * the format, its limits and the sizes are in docs/checkpoint-api.md.
 *
 * Taking a dump
 * -------------
 *   int count;
 *   ibv_dump_context(context, &count, NULL, 0);        the context stands still from here on
 *   size_t bytes = verbatim_dump_bytes(context);
 *   void *dump = malloc(bytes);
 *   ibv_dump_context(context, &count, dump, bytes);    and still stands
 *
 * Then write the dump and the memory of all regions to a safe place, and exit; or go on with
 *   ibv_restore_object(context, NULL, IBV_OBJECT_CONTEXT, IBV_RESTORE_RESUME, NULL, 0);
 * after which the dump is worth nothing any more: never restore it.
 *
 * Restoring it
 * ------------
 * In another process, at the same RNIC or at another one:
 *   1. Have the memory of all regions at its old addresses, with its old content.
 *   2. ibv_open_device, as root, at the RNIC's own control socket. Nobody else may ask for numbers and keys (EPERM).
 *   3. verbatim_check_dump, then two walks over the records:
 *
 *   const struct ibv_dump_record *record = NULL;
 *   while ((record = ibv_dump_next(dump, bytes, record)))
 *           ibv_restore_object(context, &object, record->type, IBV_RESTORE_CREATE, (void *)record, record->length);
 *   while ((record = ibv_dump_next(dump, bytes, record)))
 *           if (record->type == IBV_OBJECT_QP)
 *                   ibv_restore_object(context, &object, IBV_OBJECT_QP, IBV_RESTORE_REFILL, (void *)record, record->length);
 *
 * Objects have other addresses then, and the same numbers and keys. record->handle is what the old object was known by:
 * `handle` of struct ibv_pd, ibv_cq, ibv_srq and ibv_ah; qp_num of a queue pair; lkey of a region; rkey of a window.
 * cq_context, srq_context and qp_context are what they were.
 *
 * Restore a dump once only: two processes that are the same end of a connection destroy it.
 *
 * Secrets
 * -------
 * Without a secret, all of this works as long as the partner takes the pause for lost packets: from the dump to the REFILL its
 * queue pair's retries must last (timeout, retry_cnt), and the queue pair must come back at the same address. Its program
 * and its RNIC need to know nothing. With a secret at both ends (verbatim_set_qp_secret), the RNICs tell each other: the partner
 * waits when it hears of the pause, without counting retries, up to its RNIC's pause limit (60 s), and the queue pair may
 * come back at another RNIC. A partner that sends nothing while the dumped context still exists does not hear of the pause.
 *
 * A dump holds the secrets of the connections in it. Keep it like one.
 */
#ifndef VERBATIM_H
#define VERBATIM_H

#include <stddef.h>
#include <stdint.h>

#include <infiniband/verbs.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a record is of. In a dump they come in this order, in which they can be restored. */
enum ibv_object_type {
	/* The whole context; for IBV_RESTORE_RESUME only. */
	IBV_OBJECT_CONTEXT = 0,
	IBV_OBJECT_PD = 1,
	IBV_OBJECT_COMP_CHANNEL = 2,
	IBV_OBJECT_CQ = 3,
	IBV_OBJECT_SRQ = 4,
	IBV_OBJECT_MR = 5,
	IBV_OBJECT_AH = 6,
	IBV_OBJECT_QP = 7,
	IBV_OBJECT_MW = 8
};

/*
 * What ibv_restore_object is to do. There is no IBV_RESTORE_MR_KEYS: a region has its old keys as soon as it is created.
 */
enum ibv_restore_cmd {
	/*
	 * Makes the object of a record, with its old number and keys, and with all that was in it: completions that nobody has
	 * polled, events that nobody has read, RECVs of a shared receive queue, a window's binding. What the record names must
	 * have been made before. A queue pair is empty, in RESET, and waits for IBV_RESTORE_REFILL.
	 */
	IBV_RESTORE_CREATE = 1,
	/*
	 * IBV_OBJECT_QP only, with the same record, once: gives the queue pair its requests, its state and its connection, and
	 * lets it go on; the partner is told where. The program need not call ibv_modify_qp. After a failure the queue pair
	 * can only be destroyed.
	 */
	IBV_RESTORE_REFILL = 2,
	/* IBV_OBJECT_CONTEXT only, with no record: a context that was dumped goes on where it is. */
	IBV_RESTORE_RESUME = 3
};

/* The first bytes of a dump. All numbers are little-endian, as the machines are that this runs on. */
struct ibv_dump_head {
	uint8_t magic[4]; /* "VBCX" */
	uint16_t version; /* 1 */
	uint16_t zero;
	uint32_t count; /* of records */
	uint32_t checksum; /* CRC-32 (ISO-HDLC) of all, with this taken for zero */
	uint64_t length; /* of all, in bytes */
};

/* The first bytes of a record, whose body follows. */
struct ibv_dump_record {
	uint32_t length; /* of the record, in bytes, this included: a multiple of 4 */
	uint16_t type; /* enum ibv_object_type */
	uint16_t version; /* 1 */
	uint32_t handle;
	uint32_t checksum; /* of the record, as above */
};

/*
 * Makes the context stand still, if it does not, and writes all its objects to `dump`. `*count` is how many those are (`count`
 * may be NULL). With `dump` NULL and `length` 0 nothing is written; verbatim_dump_bytes then tells how long the dump is.
 *
 * It is atomic: all queue pairs stand still before the first object is looked at. Reliable connections do so in the middle
 * of whatever is under way. What datagram queue pairs have been given is waited for, 5 s at most. After a success the
 * context stands still until IBV_RESTORE_RESUME or its end; after a failure it is as it was before the call: what ran goes on.
 * While it stands, queue pairs cannot be modified (EBUSY), and what is posted waits. No other thread may use the context during
 * the call.
 *
 * Returns 0 or
 *   ENOSPC      `length` is too little; `*count` and verbatim_dump_bytes are right
 *   EOPNOTSUPP  a live unreliable connection (UC), a datagram queue pair in SQE, on-chip memory (ibv_alloc_dm), a context
 *               that an agent has moved or whose partner it has moved, or one that is not of the software RNIC
 *   EBUSY       a queue pair is paused by an operator, or waits for IBV_RESTORE_REFILL
 *   ETIMEDOUT   a queue pair that cannot be paused does not become idle
 *   EIO         the RNIC is gone
 */
int ibv_dump_context(struct ibv_context *ctx, int *count, void *dump, size_t length);

/* How many bytes the dump has or would have had that ibv_dump_context was last called for; 0 if it never was. */
size_t verbatim_dump_bytes(struct ibv_context *ctx);

/*
 * Carries out `cmd`. `args` and `length` are one record, of `object_type`. `*object` becomes the pointer to the object
 * (struct ibv_pd *, ...); `object` may be NULL for IBV_RESTORE_RESUME.
 *
 * Returns 0 or
 *   EEXIST            the number or key is another object's, of this context or of anybody at the RNIC
 *   EPERM             not root, or not at the RNIC's own control socket
 *   EBADMSG           the record is damaged: its checksum is wrong
 *   EPROTONOSUPPORT   it was written by another version
 *   EINVAL            it is no record, cannot be restored, or names an object that is not there (yet)
 *   EBUSY             the context stands still since its own dump
 */
int ibv_restore_object(struct ibv_context *ctx, void **object, int object_type, int cmd, void *args, size_t length);

/* Whether all of a dump is as it was written: 0, or EBADMSG, EPROTONOSUPPORT, EINVAL as above. */
int verbatim_check_dump(const void *dump, size_t length);

/*
 * Gives a reliable connection's RNIC the secret that it shares with the partner's: the same 32 random bytes at both ends, for this
 * connection alone, with `first` 1 at one end and 0 at the other. `key` NULL takes it away. Call it at both ends when the
 * connection is in RTS and both ends agree that it is; it ends with RESET. Returns 0 or an errno.
 */
int verbatim_set_qp_secret(struct ibv_qp *qp, const uint8_t *key, int first);

/*
 * The record behind `after`; the first if that is NULL. NULL at the end, and where the lengths do not fit. `dump` is aligned to
 * 8 bytes.
 */
static inline const struct ibv_dump_record *
ibv_dump_next(const void *dump, size_t length, const struct ibv_dump_record *after)
{
	const uint8_t *start = (const uint8_t *)dump;
	size_t at = sizeof(struct ibv_dump_head);
	const struct ibv_dump_record *record;

	if (after)
		at = (size_t)((const uint8_t *)after - start) + after->length;
	if (at > length || length - at < sizeof(*record))
		return NULL;
	record = (const struct ibv_dump_record *)(const void *)(start + at);
	if (record->length < sizeof(*record) || record->length % 4 || record->length > length - at)
		return NULL;
	return record;
}

#ifdef __cplusplus
}
#endif

#endif
