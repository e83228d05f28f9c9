// std::shared_ptr asks whether it may count without atomic instructions. "No" is right in any process.
char __libc_single_threaded = 0;
