/* What libibverbs loads, and what calls it back. */
int ibv_fake_mark(void);
int driver_mark(void) { return ibv_fake_mark(); }
