/* What a preloaded library does: it defines a name of libibverbs's. */
int ibv_fake_mark(void) { return 2; }
