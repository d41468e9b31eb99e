#include "control.h"

#include <endian.h>
#include <string.h>

#include "plan.h"

struct control_body {
	uint64_t posted, completed, check, zero;
};
_Static_assert(sizeof(struct message_header) + sizeof(struct control_body) == CONTROL_LEN, "layout");

static uint64_t body_check(const struct control_body *body, uint64_t seq)
{
	return htole64(mix64(body->posted ^ mix64(body->completed ^ mix64(body->zero ^ mix64(seq)))));
}

void control_encode(void *slot, struct message_id id, const struct control *control)
{
	struct control_body body = {
		.posted = htole64(control->posted),
		.completed = htole64(control->completed),
	};

	id.kind = control->kind;
	id.length = MESSAGE_MIN;
	body.check = body_check(&body, id.seq);
	message_fill(slot, &id);
	memcpy((char *)slot + sizeof(struct message_header), &body, sizeof(body));
}

bool control_decode(const void *slot, const struct message_id *id, struct control *control)
{
	struct control_body body;

	memcpy(&body, (const char *)slot + sizeof(struct message_header), sizeof(body));
	*control = (struct control){
		.kind = id->kind,
		.posted = le64toh(body.posted),
		.completed = le64toh(body.completed),
	};
	return body.check == body_check(&body, id->seq);
}
