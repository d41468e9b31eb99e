#include "plan.h"

#include "pattern.h"

static uint32_t planned_length(const struct workload *load, uint64_t random)
{
	uint64_t span = load->size - MESSAGE_MIN + 1;

	if (!load->random_size)
		return load->size;
	/* Half of the lengths are uniform, half lean towards short ones, so that inline sends occur too. */
	if (random & 1)
		span = (span >> (random >> 1) % 12) + 1;
	if (span > load->size - MESSAGE_MIN + 1)
		span = load->size - MESSAGE_MIN + 1;
	return MESSAGE_MIN + (random >> 8) % span;
}

bool plan_has(const struct workload *load, enum op op)
{
	return load->op == op || load->op == OP_ALL || (load->op == OP_MIX && op != OP_ATOMIC);
}

static enum op planned_op(const struct workload *load, uint64_t random)
{
	switch (load->op) {
	case OP_MIX:
		return random % OP_ATOMIC;
	case OP_ALL:
		return random % OP_COUNT;
	default:
		return load->op;
	}
}

struct message plan_message(const struct workload *load, uint64_t stream, uint64_t seq)
{
	uint64_t random = mix64(load->seed ^ mix64(stream << 48 ^ seq));
	enum op op = planned_op(load, random);

	return (struct message){
		.op = op,
		.length = op == OP_ATOMIC ? ATOMIC_LEN : planned_length(load, random >> 16),
		.want_signal = (random >> 8) % 4 == 0,
		.want_inline = (random >> 12) % 2 == 0,
	};
}

const char *op_name(enum op op)
{
	static const char *const names[] = {
		[OP_SEND] = "send",
		[OP_WRITE] = "write",
		[OP_WRITE_IMM] = "write-imm",
		[OP_READ] = "read",
		[OP_ATOMIC] = "atomic",
		[OP_MIX] = "mix",
		[OP_ALL] = "all",
	};

	return names[op];
}
